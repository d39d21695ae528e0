"""Columns of rows, of which the last tile may have fewer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_columns(
    row: tl.tensor, inputs: tl.tensor, K: tl.tensor, MASKED: tl.constexpr, POLICY: tl.constexpr
) -> tl.tensor:
    """Columns `inputs` of rows; zero after K. Weights are read once, so they are evicted first."""
    if MASKED:
        columns = tl.load(row + inputs, mask=inputs < K, other=0.0, eviction_policy=POLICY)
    else:
        columns = tl.load(row + inputs, eviction_policy=POLICY)
    return columns
