"""Programs around the engine: load tests, evaluations, plans, batches of requests."""
