"""vLLM's options, and what each is here."""
