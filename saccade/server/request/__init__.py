"""From the JSON of a request to what the engine is asked."""
