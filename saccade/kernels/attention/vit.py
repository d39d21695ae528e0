"""Vision attention over packed images: its kernels, for passes that are launched or captured as CUDA graphs.

A CUDA graph reads its metadata from a fixed address. Each pass copies its own there, so the launch must fit
whatever images a pass has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from saccade.kernels.attention import vit_schedule
from saccade.kernels.attention.vit_schedule import TileSchedule
from saccade.kernels.attention.vit_triton import TILE_ROWS, packed_vit
from saccade.kernels.launch.varlen_tiles import Tiles, tile_metadata


class VisionHeads(NamedTuple):
    """The heads of a block."""

    number: int
    dim: int
    dtype: torch.dtype


class Attend(Protocol):
    def __call__(self, qkv: Tensor, scale: float, /) -> Tensor:
        """(q, k, v [T, 3, heads, d] with RoPE applied, scale) -> [T, heads, d]"""


@runtime_checkable
class PartedAttend(Attend, Protocol):
    """Attention that may also take queries and keys in the order in which `qkv_rope` writes them."""

    def takes_parted(self, heads: VisionHeads) -> bool: ...

    def parted(self, qkv: Tensor, scale: float) -> Tensor:
        """Attention over queries and keys in that order."""


class PassLimits(NamedTuple):
    """What a captured pass may have at most."""

    patches: int
    images: int  # or windows


class VitKernel(Protocol):
    def suits(self, lengths: Sequence[int], heads: VisionHeads, size: int | None = None) -> bool:
        """Whether it takes such images, in a captured pass padded to so many patches."""

    def begin(self, lengths: Sequence[int], heads: VisionHeads, device: torch.device) -> Attend:
        """The attention of a pass that is launched."""

    def metadata_size(self, heads: VisionHeads, limits: PassLimits) -> int:
        """Elements, at most."""

    def metadata(self, lengths: Sequence[int], heads: VisionHeads, limits: PassLimits) -> Tensor:
        """int32, on the CPU."""

    def attend(self, metadata: Tensor, limits: PassLimits) -> Attend:
        """Attention that reads its metadata there; `limits` has the patches of the graph."""


class TiledVit:
    """The Triton kernel, for any images: one launch, and nothing to set up for a new size."""

    def suits(self, lengths: Sequence[int], heads: VisionHeads, size: int | None = None) -> bool:
        return True

    def begin(self, lengths: Sequence[int], heads: VisionHeads, device: torch.device) -> Attend:
        return _over(Tiles.of(lengths, TILE_ROWS, device))

    def metadata_size(self, heads: VisionHeads, limits: PassLimits) -> int:
        return limits.images + 1 + 2 * num_tiles(limits, TILE_ROWS)

    def metadata(self, lengths: Sequence[int], heads: VisionHeads, limits: PassLimits) -> Tensor:
        padded = (*lengths, *[0] * (limits.images - len(lengths)))
        return _tile_metadata(padded, num_tiles(limits, TILE_ROWS))

    def attend(self, metadata: Tensor, limits: PassLimits) -> Attend:
        starts = metadata[: limits.images + 1]
        index = metadata[limits.images + 1 :][: 2 * num_tiles(limits, TILE_ROWS)]
        return _over(Tiles(starts, index.view(-1, 2), TILE_ROWS))


def _over(tiles: Tiles) -> Attend:
    def attend(qkv: Tensor, scale: float) -> Tensor:
        q, k, v = qkv.unbind(1)  # [T, heads, d] each
        return packed_vit(q, k, v, tiles, scale)

    return attend


@lru_cache(maxsize=64)  # images of one camera have one grid
def _tile_metadata(lengths: tuple[int, ...], capacity: int) -> Tensor:
    starts, index = tile_metadata(lengths, TILE_ROWS, capacity=capacity)
    return torch.tensor([*starts, *index], dtype=torch.int32)


def num_tiles(limits: PassLimits, rows: int) -> int:
    """The most that so many patches are cut into, whatever images they are of."""
    return limits.patches // rows + limits.images


@dataclass(frozen=True, eq=False)
class ScheduledVit:
    """A persistent program on each SM, by a schedule: for larger images."""

    suits_images: Callable[[Sequence[int], int, torch.dtype], bool]
    over: Callable[[TileSchedule], Attend]
    programs: int
    min_patches: int  # of a captured pass that gains by it

    def on(self, programs: int) -> ScheduledVit:
        """The same on so many SMs."""
        return replace(self, programs=programs)

    def suits(self, lengths: Sequence[int], heads: VisionHeads, size: int | None = None) -> bool:
        is_large = size is None or size >= self.min_patches
        return is_large and self.suits_images(lengths, heads.dim, heads.dtype)

    def begin(self, lengths: Sequence[int], heads: VisionHeads, device: torch.device) -> Attend:
        return self.over(TileSchedule.of(lengths, heads.number, self.programs, device))

    def metadata_size(self, heads: VisionHeads, limits: PassLimits) -> int:
        tiles = heads.number * (limits.patches // (2 * vit_schedule.GROUP_ROWS) + limits.images)
        items = tiles + vit_schedule.max_slots(self.programs)
        return vit_schedule.items_at(self.programs) + vit_schedule.ITEM * items

    def metadata(self, lengths: Sequence[int], heads: VisionHeads, limits: PassLimits) -> Tensor:
        return vit_schedule.make_schedule(tuple(lengths), heads.number, self.programs).metadata

    def attend(self, metadata: Tensor, limits: PassLimits) -> Attend:
        slots = vit_schedule.max_slots(self.programs)
        return self.over(TileSchedule.view_of(metadata, self.programs, slots))


class PackedAttention:
    """Attention of a launched pass. The first kernel that suits is chosen once heads are known."""

    def __init__(self, kernels: Sequence[VitKernel], lengths: Sequence[int], device: torch.device) -> None:
        self._kernels = kernels
        self._lengths = lengths
        self._device = device
        self._attend: Attend | None = None
        self._takes_parted = False

    def __call__(self, qkv: Tensor, scale: float) -> Tensor:
        attend = self._attend or self._choose(VisionHeads(qkv.shape[2], qkv.shape[3], qkv.dtype))
        return attend(qkv, scale)

    def takes_parted(self, heads: VisionHeads) -> bool:
        if self._attend is None:
            self._choose(heads)
        return self._takes_parted

    def parted(self, qkv: Tensor, scale: float) -> Tensor:
        assert isinstance(self._attend, PartedAttend), "`takes_parted` was asked before"
        return self._attend.parted(qkv, scale)

    def _choose(self, heads: VisionHeads) -> Attend:
        kernel = next(kernel for kernel in self._kernels if kernel.suits(self._lengths, heads))
        self._attend = kernel.begin(self._lengths, heads, self._device)
        self._takes_parted = isinstance(self._attend, PartedAttend) and self._attend.takes_parted(heads)
        return self._attend
