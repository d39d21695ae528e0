"""Sizes of the buffers through which KV blocks pass to host memory and back. Pure data, as `graph_sizes`."""

from __future__ import annotations

STAGING_BYTES = 32 << 20  # of a buffer: 0.6 ms over PCIe 5, so that copies and kernels overlap
OUT_BUFFERS = 4  # what a step evicts should fit: the next kernel waits for a buffer
IN_BUFFERS = 2


def staging_blocks(block_bytes: int) -> int:
    """Blocks that a staging buffer holds."""
    return max(1, STAGING_BYTES // block_bytes)
