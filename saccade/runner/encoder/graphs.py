"""Records the vision tower's small passes at start. Knows which packings there can be, not how blocks are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from tqdm import tqdm

from saccade.checkpoint.config import VisionConfig
from saccade.models.interface import VisionLanguageModel
from saccade.types import Grid

_ROWS = 8  # tokens: the height of the pictures that are recorded; only their patches count
_SMALL = 128  # patches of a picture that attention takes another way than large ones, where it has several


@runtime_checkable
class Recorder(Protocol):
    def recording(self) -> AbstractContextManager[None]: ...


@torch.inference_mode()
def record_tower(model: VisionLanguageModel) -> None:
    """Every size of pass that is launched faster as a recording, the largest first: others compute in its memory."""
    ops = getattr(model, "ops", None)  # families that have no tower of ours have none
    if model.config.vision is None or not isinstance(ops, Recorder):
        return
    packings = list(_packings(model.config.vision))
    with ops.recording():
        for grids in tqdm(packings, "Recording the tower", disable=None):
            for _ in model.encode(_blank(model, grids), grids):
                pass


def largest_pass(vision: VisionConfig) -> int:
    """Patches of the largest one that is recorded."""
    from saccade.models.cuda.vision_sizes import SIZES, size_for

    squares = _max_squares(vision)
    return max(SIZES[-1], size_for(squares * _rows_of(_square(vision)))) if squares else SIZES[-1]


def _packings(vision: VisionConfig) -> Iterator[list[Grid]]:
    """Of each size one picture, and several small ones; where all have the same, as many as are recorded."""
    from saccade.models.cuda.vision_sizes import SIZES, size_for

    side = vision.spatial_merge_size
    if side > 1 and not vision.takes_squares:
        for size in reversed(SIZES):
            packs = [[_about(size, side)], [_about(_SMALL, side)] * (size // _SMALL)]
            # Neither one that is recorded with another size nor, of the smallest, the same again.
            yield from (p for p in packs[: 1 + (size > _SMALL)] if size_for(sum(g.patches for g in p)) == size)
    for images in range(_max_squares(vision), 0, -1):
        yield [_square(vision)] * images


def _about(patches: int, side: int) -> Grid:
    """A picture of so many patches, or of the whole tokens among them."""
    tokens = patches // side**2
    rows = 1 if tokens % _ROWS else _ROWS
    return Grid(1, rows * side, tokens // rows * side)


def _max_squares(vision: VisionConfig) -> int:
    """That are recorded in one pass; 0 where pictures have many sizes, or so large a one that nothing is gained."""
    from saccade.models.cuda.vision_sizes import IMAGES, MAXIMUM, SIZES

    has_sizes = vision.spatial_merge_size > 1 and not vision.takes_squares
    if has_sizes or not vision.image_size or _square(vision).patches > SIZES[-1]:
        return 0
    return min(IMAGES, MAXIMUM // _rows_of(_square(vision)))


def _square(vision: VisionConfig) -> Grid:
    assert vision.image_size
    return Grid(1, vision.image_size // vision.patch_size, vision.image_size // vision.patch_size)


def _rows_of(square: Grid) -> int:
    """Inside a tower, which may put a token of its own in front."""
    return square.patches + 1


def _blank(model: VisionLanguageModel, grids: list[Grid]) -> torch.Tensor:
    vision, table = model.config.vision, model.decoder.table
    assert vision is not None
    patches = sum(grid.patches for grid in grids)
    return torch.ones(patches, vision.patch_dim, dtype=table.dtype, device=table.device)
