"""The HTTP server: an OpenAI-compatible API, its metrics and its limits. No torch."""
