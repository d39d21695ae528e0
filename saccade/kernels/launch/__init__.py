"""What all kernels share: devices, tiles, choices with self-tests, caches of launches."""
