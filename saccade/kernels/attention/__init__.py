"""Attention kernels: decode, prefill, images, latents, cross-attention, and what stores keys and values."""
