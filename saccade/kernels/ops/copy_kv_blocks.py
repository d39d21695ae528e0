"""Copies blocks of a cache to rows of a staging buffer and back. Knows block ids alone.

cache [layers, blocks, width]                                   rows [n, layers * width]

    layer 0   | . | . | 2 | . | 4 |        blocks = [4, 2]      | layer 0 of 4 | layer 1 of 4 |
    layer 1   | . | . | 2 | . | 4 |     ◄──────────────────►    | layer 0 of 2 | layer 1 of 2 |

A row is contiguous, so that one copy of the GPU's copy engine takes many of them to host memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_VALUES = 1024  # 8 bytes each, of a program


def copy_blocks(
    cache: Tensor,  # int64 [layers, blocks, width]; a layer is contiguous
    rows: Tensor,  # int64 [n, layers * width], may be columns of a wider buffer
    blocks: Tensor,  # int64 [n]
    *,
    to_cache: bool,
) -> None:
    layers, _, width = cache.shape
    assert rows.shape == (len(blocks), layers * width) and rows.stride(1) == 1
    assert cache.stride()[1:] == (width, 1)
    _copy_kernel[(len(blocks), layers, triton.cdiv(width, _VALUES))](
        cache, rows, blocks, cache.stride(0), rows.stride(0),
        WIDTH=width, VALUES=_VALUES, TO_CACHE=to_cache, num_warps=4,
    )  # fmt: skip


@triton.jit
def _copy_kernel(
    cache: tl.tensor, rows: tl.tensor, blocks: tl.tensor, layer_step: tl.tensor, row_step: tl.tensor,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, TO_CACHE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_cache = cache + layer * layer_step + tl.load(blocks + row) * WIDTH + columns
    in_row = rows + row * row_step + layer * WIDTH + columns
    if TO_CACHE:
        tl.store(in_cache, tl.load(in_row, mask=columns < WIDTH), mask=columns < WIDTH)
    else:
        tl.store(in_row, tl.load(in_cache, mask=columns < WIDTH), mask=columns < WIDTH)
