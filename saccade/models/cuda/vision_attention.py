"""How recorded blocks attend: a kernel, and the numbers that tell it where the pictures of a pass are.

A recording reads its numbers where they lay when it was made, and each pass copies its own there: whatever pictures it
has, they must fit into the same launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from saccade.kernels.attention.vit_schedule import GROUP_ROWS, ITEM, TileSchedule, items_at, make_schedule, max_slots
from saccade.kernels.launch.tiling import Tiles, tile_metadata


class Attend(Protocol):
    def __call__(self, qkv: Tensor, scale: float, /) -> Tensor:
        """(turned q, k, v [T, 3, heads, d], scale) -> [T, heads, d]"""


@runtime_checkable
class PartedAttend(Attend, Protocol):
    """Attention that may also take queries and keys in the order in which `qkv_rope` writes them."""

    def takes_parted(self, dim: int, dtype: torch.dtype) -> bool:
        """Of such heads."""

    def parted(self, qkv: Tensor, scale: float) -> Tensor:
        """As ever else."""


class PassLimits(NamedTuple):
    """What a recorded pass may have."""

    patches: int
    images: int  # or windows


class Heads(NamedTuple):
    """Of a block."""

    number: int
    dim: int
    dtype: torch.dtype


class AttentionPath(Protocol):
    def suits(self, lengths: Sequence[int], heads: Heads, size: int) -> bool:
        """Whether a pass over such pictures is to go this way, padded to so many patches."""

    def room(self, heads: Heads, maximum: PassLimits) -> int:
        """Numbers of any pass, at most."""

    def metadata(self, lengths: Sequence[int], heads: Heads, maximum: PassLimits) -> Tensor:
        """int32, on the host."""

    def attend(self, metadata: Tensor, maximum: PassLimits) -> Attend:
        """Over what lies there; `maximum` has the patches of this recording."""


class TiledAttention:
    """Any pictures, in tiles of so many rows."""

    def __init__(self, over: Callable[[Tiles], Attend], rows: int) -> None:
        self._over = over
        self._rows = rows

    def suits(self, lengths: Sequence[int], heads: Heads, size: int) -> bool:
        return True

    def room(self, heads: Heads, maximum: PassLimits) -> int:
        return maximum.images + 1 + 2 * num_tiles(maximum, self._rows)

    def metadata(self, lengths: Sequence[int], heads: Heads, maximum: PassLimits) -> Tensor:
        return _tile_part(
            (*lengths, *[0] * (maximum.images - len(lengths))), self._rows, num_tiles(maximum, self._rows)
        )

    def attend(self, metadata: Tensor, maximum: PassLimits) -> Attend:
        starts, rest = metadata[: maximum.images + 1], metadata[maximum.images + 1 :]
        return self._over(Tiles(starts, rest[: 2 * num_tiles(maximum, self._rows)].view(-1, 2), self._rows))


@lru_cache(maxsize=64)  # pictures of one camera have one grid
def _tile_part(lengths: tuple[int, ...], rows: int, capacity: int) -> Tensor:
    starts, index = tile_metadata(lengths, rows, capacity=capacity)
    return torch.tensor([*starts, *index], dtype=torch.int32)


def num_tiles(maximum: PassLimits, rows: int) -> int:
    """Most that so many patches are cut into, whatever pictures they are of."""
    return maximum.patches // rows + maximum.images


class ScheduledAttention:
    """Larger pictures, shared out to one program on each multiprocessor."""

    def __init__(
        self,
        suits: Callable[[Sequence[int], int, torch.dtype], bool],
        over: Callable[[TileSchedule], Attend],
        programs: int,
        minimum: int,  # patches of a pass that gains by it
    ) -> None:
        self._suits = suits
        self._over = over
        self._programs = programs
        self._minimum = minimum

    def suits(self, lengths: Sequence[int], heads: Heads, size: int) -> bool:
        return size >= self._minimum and self._suits(lengths, heads.dim, heads.dtype)

    def room(self, heads: Heads, maximum: PassLimits) -> int:
        tiles = heads.number * (maximum.patches // (2 * GROUP_ROWS) + maximum.images)
        return items_at(self._programs) + ITEM * (tiles + max_slots(self._programs))

    def metadata(self, lengths: Sequence[int], heads: Heads, maximum: PassLimits) -> Tensor:
        return make_schedule(tuple(lengths), heads.number, self._programs).metadata

    def attend(self, metadata: Tensor, maximum: PassLimits) -> Attend:
        return self._over(TileSchedule.among(metadata, self._programs, max_slots(self._programs)))
