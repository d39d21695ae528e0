"""Layers in PyTorch: the reference, and what runs on a CPU."""
