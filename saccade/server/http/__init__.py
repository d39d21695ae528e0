"""HTTP itself: connections, parsing, limits, keys and origins."""
