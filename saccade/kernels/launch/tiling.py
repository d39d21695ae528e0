"""How packed rows are cut into tiles, and how a kernel is launched over them. Made on the host, once per step.

Each tile belongs to one owner (a request's new tokens, or a picture's patches), so no program is without work:

    lengths 5, 3, rows 2      packed  a a a a a b b b
                              tiles   0   1   2 3   4       index (0, 0) (0, 2) (0, 4) (1, 0) (1, 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.torch_utils import to_device

_NO_ROW = 2**30  # beyond the last row of any owner


class Launch(NamedTuple):
    """The sizes a kernel is compiled for."""

    rows: int  # query rows of a program
    keys: int  # keys it reads at a time
    warps: int
    stages: int  # loads in flight ahead of their use
    registers: int | None = None  # most a thread may have, where fewer let more programs share a multiprocessor
    one_loop: bool = False  # over all keys, not one over those that need no mask and one over the rest


@dataclass(frozen=True, eq=False)
class Tiles:
    starts: Tensor  # int32 [owners + 1]: packed row where each owner begins, and the end
    index: Tensor  # int32 [tiles, 2]: owner, first row counted from its start
    rows: int  # of a tile; the last one of an owner may have fewer

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        rows: int,
        device: torch.device,
        *,
        contexts: Sequence[int] | None = None,
        capacity: int | None = None,
    ) -> Tiles:
        starts, index = tile_metadata(lengths, rows, contexts=contexts, capacity=capacity)
        both = to_device(torch.tensor([*starts, *index], dtype=torch.int32), device)  # one copy to the device
        return cls(both[: len(starts)], both[len(starts) :].view(-1, 2), rows)


def tile_metadata(
    lengths: Sequence[int], rows: int, *, contexts: Sequence[int] | None = None, capacity: int | None = None
) -> tuple[list[int], list[int]]:
    """`starts` and `index` of such tiles, on the host.

    `contexts` says that rows see only what is before them: then the tile with most keys comes first. `capacity` pads
    the index with tiles that do nothing, for launches recorded in a CUDA graph.
    """
    tiles = [(owner, first) for owner, length in enumerate(lengths) for first in range(0, length, rows)]
    if contexts is None:
        tiles.sort(key=lambda tile: -lengths[tile[0]])
    else:
        past = [context - length for context, length in zip(contexts, lengths, strict=True)]
        tiles.sort(key=lambda tile: -(past[tile[0]] + tile[1]))
    tiles += [(0, _NO_ROW)] * _padding(len(tiles), capacity)
    return [0, *accumulate(lengths)], [number for tile in tiles for number in tile]


def _padding(tiles: int, capacity: int | None) -> int:
    if capacity is None:
        return 0
    if tiles > capacity:
        raise ValueError(f"{tiles} tiles do not fit a launch of {capacity}; record it with a larger capacity")
    return capacity - tiles


def power_of_two(n: int, *, minimum: int = 1) -> int:
    """The smallest one that is neither below n nor below `minimum`: tensors inside a kernel have such sides."""
    return max(minimum, 1 << (n - 1).bit_length())
