"""Captures CUDA graphs of the vision tower's small passes. Chooses the packings, not how to capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast, runtime_checkable

import torch
from tqdm import tqdm

from saccade import vision_graph_sizes as sizes
from saccade.checkpoint.config import VisionConfig
from saccade.models.interface import DecoderModel, VisionLanguageModel
from saccade.types.media import Grid

_ROWS = 8  # tokens: the height of the captured images; only their number of patches matters
_SMALL = 128  # patches of a small image, for which attention may take another path than for large ones


@runtime_checkable
class CapturesGraphs(Protocol):
    def capturing(self) -> AbstractContextManager[None]: ...


@torch.inference_mode()
def capture_tower(model: VisionLanguageModel, *, progress: bool = True) -> None:
    """Every size of pass that is faster as a CUDA graph, the largest first: the others share its memory."""
    ops = getattr(model, "ops", None)  # only towers of our own have them
    if model.config.vision is None or not isinstance(ops, CapturesGraphs):
        return
    packings = list(_packings(model.config.vision))
    with ops.capturing():
        for grids in tqdm(packings, "Capturing the tower", disable=None if progress else True):
            for _ in model.encode(blank_patches(model, grids), grids):
                pass


def run_tower(model: Any) -> None:
    """Every pass of the vision tower that is captured, with what it chooses and captures thrown away."""
    ops = getattr(model, "ops", None)
    if ops is None:  # a tower of Transformers
        return
    model.ops = type(ops)()
    try:
        capture_tower(model, progress=False)
    finally:
        model.ops = ops


def _packings(vision: VisionConfig) -> Iterator[list[Grid]]:
    """One image of each size, and several small ones; with one fixed image size, each number of images."""
    side = vision.spatial_merge_size
    if side > 1 and not vision.takes_squares:
        for size in reversed(sizes.SIZES):
            packs = [[_about(size, side)]]
            if size > _SMALL:
                packs.append([_about(_SMALL, side)] * (size // _SMALL))
            # Some round up to another size, which has its own.
            yield from (pack for pack in packs if sizes.size_for(sum(grid.patches for grid in pack)) == size)
    for images in range(sizes.max_squares(vision), 0, -1):
        yield [sizes.square(vision)] * images


def _about(patches: int, side: int) -> Grid:
    """An image of so many patches, rounded down to whole tokens."""
    tokens = patches // side**2
    rows = 1 if tokens % _ROWS else _ROWS
    return Grid(1, rows * side, tokens // rows * side)


def blank_patches(model: VisionLanguageModel, grids: list[Grid]) -> torch.Tensor:
    vision = model.config.vision
    assert vision is not None
    table = model.decoder.table
    # An encoder worker's table has no memory.
    device = cast(DecoderModel, model).params.device if table.is_meta else table.device
    shape = (sum(grid.patches for grid in grids), vision.patch_dim)
    return torch.ones(shape, dtype=table.dtype, device=device)
