"""Small kernels: norms, gates, sampling, unpacking, patches of images; and their references in PyTorch."""
