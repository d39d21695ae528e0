"""Options of the engine and of the server, and how vLLM's become ours."""
