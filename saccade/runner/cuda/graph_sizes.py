"""Sizes that CUDA graphs are captured for. Imports no Triton, so that memory can be planned anywhere."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

GRAPH_TOKENS: tuple[int, ...] = (
    *(16, 32, 64, 96),
    *range(128, 2048, 128),
    *range(2048, 4096, 256),
    *range(4096, 8193, 512),
)


GRAPH_WINDOWS = 16
"""Steps beyond these are launched one kernel at a time, which takes the host longer than the device."""


# Rows that decode: all rows of a pass, which take about as long as somewhat fewer. As many as fit beside those answers.
_SIZES = {8: (128, 256, 384, 512), 32: (128, 256, 384, 512), 64: (256, 384, 512), 128: (384, 512, 768)}


MAX_MIXED_ROWS = max(map(max, _SIZES.values()))


class MixedSize(NamedTuple):
    tokens: int  # of prompts
    rows: int  # that decode


def mixed_sizes(max_tokens: int, max_rows: int) -> list[MixedSize]:
    """The largest first; none is larger than the smallest that holds all that a step may have.

    Where one request runs at a time, nothing is ever beside it.
    """
    found = []
    for smaller, rows in pairwise((0, *_SIZES)):
        if smaller < max_rows and max_rows > 1:
            tokens = [size - min(rows, max_rows) for size in _SIZES[rows]]
            needed = [size for less, size in pairwise((0, *tokens)) if less < max_tokens - smaller]
            found += [MixedSize(size, min(rows, max_rows)) for size in needed]
    return sorted(found, reverse=True)
