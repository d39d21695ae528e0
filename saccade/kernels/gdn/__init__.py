"""Kernels of layers that keep states: gated delta nets, and short convolutions between gates."""
