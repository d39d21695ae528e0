"""Accuracy of anything that answers questions about pictures over HTTP. Knows no weights and no engine."""
