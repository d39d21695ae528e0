"""Weights of a token's experts into L2, while the previous kernel still runs."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.launch.pdl import prefetch_l2

LINE = 128  # bytes of a cache line


@triton.jit
def prefetch_experts(
    first: tl.tensor, experts: tl.tensor, size: tl.tensor,
    SLOTS: tl.constexpr, LINES: tl.constexpr, LINES_PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """LINES cache lines from `first` on, which is in expert 0, of each of SLOTS `experts` of so many elements."""
    of_line: tl.constexpr = 1024 // first.dtype.element_ty.primitive_bitwidth  # elements of a line
    line = tl.minimum(tl.arange(0, LINES_PADDED), LINES - 1)
    for slot in tl.static_range(SLOTS):
        prefetch_l2(first + tl.load(experts + slot) * size + line * of_line)
