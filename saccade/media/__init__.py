"""Images, videos and PDFs as bytes: fetched, probed, hashed and decoded. No prompts, no torch."""
