"""How attention runs inside captured vision blocks: a kernel, and metadata of the images of a pass.

A CUDA graph reads its metadata from a fixed address. Each pass copies its own there, so the launch must fit
whatever images a pass has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from saccade.kernels.attention import vit_schedule
from saccade.kernels.attention.vit_schedule import TileSchedule
from saccade.kernels.launch.varlen_tiles import Tiles, tile_metadata


class Attend(Protocol):
    def __call__(self, qkv: Tensor, scale: float, /) -> Tensor:
        """(q, k, v [T, 3, heads, d] with RoPE applied, scale) -> [T, heads, d]"""


@runtime_checkable
class PartedAttend(Attend, Protocol):
    """Attention that may also take queries and keys in the order in which `qkv_rope` writes them."""

    def takes_parted(self, dim: int, dtype: torch.dtype) -> bool:
        """Of such heads."""

    def parted(self, qkv: Tensor, scale: float) -> Tensor:
        """Attention over queries and keys in that order."""


class PassLimits(NamedTuple):
    """What a captured pass may have at most."""

    patches: int
    images: int  # or windows


class VisionHeads(NamedTuple):
    """Of a block."""

    number: int
    dim: int
    dtype: torch.dtype


class AttentionPath(Protocol):
    def suits(self, lengths: Sequence[int], heads: VisionHeads, size: int) -> bool:
        """Whether a pass over such images, padded to so many patches, takes this path."""

    def metadata_size(self, heads: VisionHeads, limits: PassLimits) -> int:
        """Elements, at most."""

    def metadata(self, lengths: Sequence[int], heads: VisionHeads, limits: PassLimits) -> Tensor:
        """int32, on the CPU."""

    def attend(self, metadata: Tensor, limits: PassLimits) -> Attend:
        """Attention that reads its metadata there; `limits` has the patches of the graph."""


class TiledAttention:
    """For any images: tiles of so many rows."""

    def __init__(self, over: Callable[[Tiles], Attend], rows: int) -> None:
        self._over = over
        self._rows = rows

    def suits(self, lengths: Sequence[int], heads: VisionHeads, size: int) -> bool:
        return True

    def metadata_size(self, heads: VisionHeads, limits: PassLimits) -> int:
        return limits.images + 1 + 2 * num_tiles(limits, self._rows)

    def metadata(self, lengths: Sequence[int], heads: VisionHeads, limits: PassLimits) -> Tensor:
        padded = (*lengths, *[0] * (limits.images - len(lengths)))
        return _tile_metadata(padded, self._rows, num_tiles(limits, self._rows))

    def attend(self, metadata: Tensor, limits: PassLimits) -> Attend:
        starts = metadata[: limits.images + 1]
        index = metadata[limits.images + 1 :][: 2 * num_tiles(limits, self._rows)]
        return self._over(Tiles(starts, index.view(-1, 2), self._rows))


@lru_cache(maxsize=64)  # images of one camera have one grid
def _tile_metadata(lengths: tuple[int, ...], rows: int, capacity: int) -> Tensor:
    starts, index = tile_metadata(lengths, rows, capacity=capacity)
    return torch.tensor([*starts, *index], dtype=torch.int32)


def num_tiles(limits: PassLimits, rows: int) -> int:
    """The most that so many patches are cut into, whatever images they are of."""
    return limits.patches // rows + limits.images


class ScheduledAttention:
    """For larger images: a persistent program on each SM, by a schedule."""

    def __init__(
        self,
        suits: Callable[[Sequence[int], int, torch.dtype], bool],
        over: Callable[[TileSchedule], Attend],
        programs: int,
        min_patches: int,  # of a pass that gains by it
    ) -> None:
        self._suits = suits
        self._over = over
        self._programs = programs
        self._min_patches = min_patches

    def suits(self, lengths: Sequence[int], heads: VisionHeads, size: int) -> bool:
        return size >= self._min_patches and self._suits(lengths, heads.dim, heads.dtype)

    def metadata_size(self, heads: VisionHeads, limits: PassLimits) -> int:
        tiles = heads.number * (limits.patches // (2 * vit_schedule.GROUP_ROWS) + limits.images)
        items = tiles + vit_schedule.max_slots(self._programs)
        return vit_schedule.items_at(self._programs) + vit_schedule.ITEM * items

    def metadata(self, lengths: Sequence[int], heads: VisionHeads, limits: PassLimits) -> Tensor:
        return vit_schedule.make_schedule(tuple(lengths), heads.number, self._programs).metadata

    def attend(self, metadata: Tensor, limits: PassLimits) -> Attend:
        slots = vit_schedule.max_slots(self._programs)
        return self._over(TileSchedule.view_of(metadata, self._programs, slots))
