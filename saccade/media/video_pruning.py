"""Video token pruning (vLLM: EVS): a frame group keeps the tokens with the largest changes of pixels.

previous frame ─┐ change of each cell, summed over the frames
own frames ─────┴──────────────────────────────────────────► the `slots` cells with the largest sums, in order

Sums are integers, so the choice is the same on every machine and device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.types.media import MediaItem, Size

Ints = npt.NDArray[np.int64]

_SAMPLES = 4  # along each side of a cell: enough to detect a moving line, too few for compression noise


class Kept(NamedTuple):
    tokens: Ints  # [slots]: indices, ascending
    cells: Ints  # [2, slots]: their rows and columns


def kept_of(item: MediaItem, frames: npt.NDArray[np.uint8]) -> Kept | None:
    """`frames` [decoded, H, W, 3] start with the one before the group. None: all tokens stay."""
    cells = item.geometry.cells
    if cells is None:
        return None
    tokens = top_changed(changes(frames, cells), item.geometry.slots)
    return Kept(tokens, np.stack(np.divmod(tokens, cells.width)))


def changes(frames: npt.NDArray[np.uint8], cells: Size) -> Ints:
    """[cells]: sum of absolute differences between consecutive frames, downsampled to `_SAMPLES` a side."""
    size = (cells.width * _SAMPLES, cells.height * _SAMPLES)
    images = [Image.fromarray(frame).resize(size, Image.Resampling.BOX) for frame in frames]
    small = [np.asarray(image).astype(np.int64) for image in images]
    total = sum((np.abs(later - earlier) for earlier, later in pairwise(small)), np.zeros_like(small[0]))
    by_cell: Ints = total.reshape(cells.height, _SAMPLES, cells.width, _SAMPLES, 3).sum((1, 3, 4))
    return by_cell.reshape(-1)


def top_changed(changed: Ints, count: int) -> Ints:
    """Indices of the largest changes, ascending; ties keep the first."""
    return np.sort(np.argsort(-changed, kind="stable")[:count])
