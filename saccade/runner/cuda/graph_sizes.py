"""Sizes for which CUDA graphs are captured. Imports no Triton, so that memory can be planned anywhere."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

GRAPH_TOKENS: tuple[int, ...] = (
    *(16, 32, 64, 96),
    *range(128, 2048, 128),
    *range(2048, 4096, 256),
    *range(4096, 8193, 512),
)

MAX_EXPANDED = 32_768  # tokens of contexts whose keys and values MLA expands in one pass
GRAPH_PIECES = 64  # of windows that are cut where checkpoints of recurrent states are saved
GRAPH_STRETCHES = 64  # rows of a prefill pass that cross-attend to the same images
GRAPH_WINDOWS = 16
"""Prefills with more windows are launched kernel by kernel, which takes the host longer than the device."""

# By rows that decode: all rows of a mixed batch. A pass takes about as long as one of somewhat fewer rows.
_SIZES = {8: (128, 256, 384, 512), 32: (128, 256, 384, 512), 64: (256, 384, 512), 128: (384, 512, 768)}

MAX_MIXED_ROWS = max(map(max, _SIZES.values()))


class MixedSize(NamedTuple):
    tokens: int  # of prompts
    rows: int  # that decode


def mixed_sizes(max_tokens: int, max_rows: int) -> list[MixedSize]:
    """The largest first; none is larger than a step needs. With one request at a time there are none."""
    sizes = []
    for smaller, rows in pairwise((0, *_SIZES)):
        if max(smaller, 1) < max_rows:
            tokens = [size - min(rows, max_rows) for size in _SIZES[rows]]
            useful = [size for less, size in pairwise((0, *tokens)) if less < max_tokens - smaller]
            sizes += [MixedSize(size, min(rows, max_rows)) for size in useful]
    return sorted(sizes, reverse=True)
