"""Records the vision tower's small passes at start. Knows which packings there can be, not how blocks are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from tqdm import tqdm

from saccade.config import ModelConfig
from saccade.models.interface import VisionLanguageModel
from saccade.types import Grid

_ROWS = 8  # tokens: the height of the pictures that are recorded; only their patches count


@runtime_checkable
class Recorder(Protocol):
    def recording(self) -> AbstractContextManager[None]: ...


@torch.inference_mode()
def record_tower(model: VisionLanguageModel) -> None:
    """Every size of pass that is launched faster as a recording, the largest first: others compute in its memory."""
    ops = getattr(model, "ops", None)  # families that have no tower of ours have none
    if model.config.vision is None or not isinstance(ops, Recorder):
        return
    from saccade.models.recorded_vision import SIZES  # needs Triton, which only CUDA machines have

    packings = list(_packings(model.config, SIZES))
    with ops.recording():
        for grids in tqdm(packings, "Recording the tower", disable=None):
            for _ in model.encode(_blank(model, grids), grids):
                pass


def _packings(config: ModelConfig, sizes: tuple[int, ...]) -> Iterator[list[Grid]]:
    """One of each size; where all pictures have the same, as many as fit."""
    vision = config.vision
    assert vision is not None
    side = vision.spatial_merge_size
    if side > 1 and not vision.takes_squares:
        for size in reversed(sizes):
            yield [Grid(1, _ROWS * side, size // (_ROWS * side))]
    elif vision.image_size:
        square = Grid(1, vision.image_size // vision.patch_size, vision.image_size // vision.patch_size)
        for pictures in range(sizes[-1] // square.patches, 0, -1):
            yield [square] * pictures


def _blank(model: VisionLanguageModel, grids: list[Grid]) -> torch.Tensor:
    vision, table = model.config.vision, model.decoder.table
    assert vision is not None
    patches = sum(grid.patches for grid in grids)
    return torch.ones(patches, vision.patch_dim, dtype=table.dtype, device=table.device)
