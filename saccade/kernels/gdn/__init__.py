"""Kernels of gated delta nets: decode, and prefill in chunks."""
