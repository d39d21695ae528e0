"""The engines of one server, and which of them gets a request."""
