"""Images, videos, documents and prompts."""
