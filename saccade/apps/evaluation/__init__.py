"""Accuracy evaluation of any OpenAI-compatible server on questions about images."""
