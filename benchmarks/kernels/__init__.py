"""Kernels on a GPU beside references, libraries and the device's floor: `python -m benchmarks.kernels`."""
