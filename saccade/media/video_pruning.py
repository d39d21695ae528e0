"""Which tokens of a frame group stay: those where most has changed since the frame before. Knows pixels, not models.

frame before ─┐ change of each cell, frame by frame, added up
own frames ───┴─────────────────────────────────────────────► the `slots` cells with the largest sums, in reading order

Sums are whole numbers, so the choice is the same on every machine and device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.types import MediaItem, Size

Ints = npt.NDArray[np.int64]

_SAMPLES = 4  # along each side of a cell: enough to see a line move, too few to see the noise of compression


class Kept(NamedTuple):
    """What is left of a frame group."""

    tokens: Ints  # [slots]: which of its tokens, rising
    places: Ints  # [2, slots]: their rows and columns


def kept_of(item: MediaItem, frames: npt.NDArray[np.uint8]) -> Kept | None:
    """`frames` [decoded, H, W, 3] begin with the one before the group. None: everything stays."""
    cells = item.geometry.cells
    if cells is None:
        return None
    tokens = max_changed(changes(frames, cells), item.geometry.slots)
    return Kept(tokens, np.stack(np.divmod(tokens, cells.width)))


def changes(frames: npt.NDArray[np.uint8], cells: Size) -> Ints:
    """[cells]: how much each changes from every frame to the next, in steps of 1/255 of a sample and channel."""
    size = (cells.width * _SAMPLES, cells.height * _SAMPLES)
    small = [np.asarray(Image.fromarray(f).resize(size, Image.Resampling.BOX)).astype(np.int64) for f in frames]
    total = sum((np.abs(later - earlier) for earlier, later in pairwise(small)), np.zeros_like(small[0]))
    by_cell: Ints = total.reshape(cells.height, _SAMPLES, cells.width, _SAMPLES, 3).sum((1, 3, 4))
    return by_cell.reshape(-1)


def max_changed(changed: Ints, count: int) -> Ints:
    """Of equals the first ones stay."""
    return np.sort(np.argsort(-changed, kind="stable")[:count])
