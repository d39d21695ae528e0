"""Places for embeddings after the device: host memory, a folder, a Valkey or Redis server."""
