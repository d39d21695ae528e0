"""What a plan needs on the device: batches, caches, the sampler, and the model's forward pass."""
