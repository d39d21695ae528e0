"""How packed rows are cut into tiles, one per program of a launch. Computed on the CPU, once per step.

Each tile has one owner (a request's new tokens, or an image's patches), so no program is without work:

    lengths 5, 3, rows 2      packed  a a a a a b b b
                              tiles   0   1   2 3   4       index (0, 0) (0, 2) (0, 4) (1, 0) (1, 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.util.torch_utils import to_device

_NO_ROW = 2**30  # beyond the last row of any owner


class Launch(NamedTuple):
    """The sizes a kernel is compiled for."""

    rows: int  # query rows of a program
    keys: int  # keys it reads at a time
    warps: int
    stages: int  # of the software pipeline
    registers: int | None = None  # per thread at most, where fewer let more programs share an SM
    one_loop: bool = False  # over all keys, not one for keys without a mask and one for the rest


@dataclass(frozen=True, eq=False)
class Tiles:
    starts: Tensor  # int32 [owners + 1]: packed row where each owner begins, and the end
    index: Tensor  # int32 [tiles, 2]: owner, first row counted from its start
    rows: int  # of a tile; the last one of an owner may have fewer

    @classmethod
    def of(
        cls, lengths: Sequence[int], rows: int, device: torch.device, *, seq_lens: Sequence[int] | None = None,
        capacity: int | None = None,
    ) -> Tiles:  # fmt: skip
        starts, index = tile_metadata(lengths, rows, seq_lens=seq_lens, capacity=capacity)
        both = to_device(torch.tensor([*starts, *index], dtype=torch.int32), device)  # one copy
        return cls(both[: len(starts)], both[len(starts) :].view(-1, 2), rows)


def tile_metadata(
    lengths: Sequence[int], rows: int, *, seq_lens: Sequence[int] | None = None, capacity: int | None = None
) -> tuple[list[int], list[int]]:
    """`starts` and `index` of `Tiles`.

    With `seq_lens`, attention is causal: then the tile with most keys comes first. `capacity` pads the index with
    empty tiles, for launches in a CUDA graph.
    """
    tiles = [(owner, first) for owner, length in enumerate(lengths) for first in range(0, length, rows)]
    if seq_lens is None:
        tiles.sort(key=lambda tile: -lengths[tile[0]])
    else:
        past = [seq_len - length for seq_len, length in zip(seq_lens, lengths, strict=True)]
        tiles.sort(key=lambda tile: -(past[tile[0]] + tile[1]))
    capacity = len(tiles) if capacity is None else capacity
    if len(tiles) > capacity:
        raise ValueError(f"{len(tiles)} tiles do not fit a launch of {capacity}; capture it with a larger capacity")
    tiles += [(0, _NO_ROW)] * (capacity - len(tiles))
    return [0, *accumulate(lengths)], list(chain.from_iterable(tiles))


def power_of_two(n: int, *, minimum: int = 1) -> int:
    """The smallest one that is at least n and `minimum`: tensors in a kernel have such sides."""
    return max(minimum, 1 << (n - 1).bit_length())
