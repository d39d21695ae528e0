"""Steps in CUDA graphs, and the metadata that they are replayed with."""
