"""Sizes of encoder passes that CUDA graphs are captured for. Imports no Triton."""

from __future__ import annotations

SIZES = tuple(range(128, 2049, 128))  # patches; GEMMs work in tiles of 128 rows anyway
MAXIMUM = 8192  # patches, where all images have one size: then there are few passes to capture
IMAGES = 32  # of a pass, or windows


def size_for(patches: int) -> int:
    """The size of graph that a pass is padded to."""
    return -(-patches // SIZES[0]) * SIZES[0]
