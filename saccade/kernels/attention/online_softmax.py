"""A softmax that sees its scores tile by tile, shared by the attention kernels. Knows neither keys nor masks."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # kernels use powers of two: scale times this


@triton.jit
def weigh(scores: tl.tensor, scale: tl.tensor, largest: tl.tensor, total: tl.tensor) -> tl.tuple:
    """One more tile of scores [rows, keys], -inf where masked; every row has seen at least one that is not.

    Returns its weights, what earlier sums of values are to be multiplied with, and the largest score (times scale)
    and sum of weights so far, both [rows].
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
    shrink = tl.exp2(largest - new_largest)
    weights = tl.exp2(scores * scale - new_largest[:, None])
    return weights, shrink, new_largest, total * shrink + tl.sum(weights, 1)


@triton.jit
def divide(acc: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Sums of values [rows, d] by sums of weights [rows]; zero where nothing was seen."""
    return acc / tl.where(total > 0, total, 1.0)[:, None]
