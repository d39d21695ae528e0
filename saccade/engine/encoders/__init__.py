"""Encoder workers: processes with the vision tower alone, and shared memory through which embeddings come."""
