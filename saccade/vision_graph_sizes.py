"""Sizes of encoder passes that CUDA graphs are captured for. Pure: memory can be planned anywhere."""

from __future__ import annotations

from saccade.checkpoint.config import VisionConfig
from saccade.types.media import Grid

SIZES = tuple(range(128, 2049, 128))  # patches; GEMMs work in tiles of 128 rows anyway
MAXIMUM = 8192  # patches, where all images have one size: then there are few passes to capture
IMAGES = 32  # of a pass, or windows


def size_for(patches: int) -> int:
    """The size of graph that a pass is padded to."""
    return -(-patches // SIZES[0]) * SIZES[0]


def largest_pass(vision: VisionConfig) -> int:
    """Patches of the largest captured pass."""
    squares = max_squares(vision)
    largest = size_for(squares * _rows_of(square(vision))) if squares else 0
    return max(SIZES[-1], largest)


def max_squares(vision: VisionConfig) -> int:
    """Images of the one fixed size in the largest captured pass; 0: sizes vary, or it is too large."""
    has_sizes = vision.spatial_merge_size > 1 and not vision.takes_squares
    if has_sizes or not vision.image_size or square(vision).patches > SIZES[-1]:
        return 0
    return min(IMAGES, MAXIMUM // _rows_of(square(vision)))


def square(vision: VisionConfig) -> Grid:
    assert vision.image_size
    return Grid(1, vision.image_size // vision.patch_size, vision.image_size // vision.patch_size)


def _rows_of(grid: Grid) -> int:
    """Inside a tower, which may add a class token."""
    return grid.patches + 1
