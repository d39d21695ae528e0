"""Images from bytes to embeddings: decoded in threads, uploaded, and passed through the tower together."""
