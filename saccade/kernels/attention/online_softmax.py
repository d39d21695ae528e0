"""Online softmax, shared by the Triton attention kernels. Knows neither keys nor masks."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # kernels use powers of two: scale times this


@triton.jit
def new_accumulator(ROWS: tl.constexpr, DIM: tl.constexpr) -> tl.tuple:
    """Before the first key: the maximum and the sum of weights, both [rows], and the sums of values [rows, d]."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    return largest, total, tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def weigh(scores: tl.tensor, scale: tl.tensor, largest: tl.tensor, total: tl.tensor) -> tl.tuple:
    """One more tile of scores [rows, keys], -inf where masked; every row has had at least one that is not.

    Returns its weights, the factor for the accumulator so far, and the maximum (times scale) and sum of weights so
    far, both [rows].
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
    shrink = tl.exp2(largest - new_largest)
    weights = tl.exp2(scores * scale - new_largest[:, None])
    return weights, shrink, new_largest, total * shrink + tl.sum(weights, 1)


@triton.jit
def divide(acc: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The accumulator [rows, d] by sums of weights [rows]; zero for rows without keys."""
    return acc / tl.where(total > 0, total, 1.0)[:, None]
