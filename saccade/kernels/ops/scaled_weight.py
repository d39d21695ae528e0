"""Steps of kernels that read a float8 weight with scales."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # rows and columns of a weight with one scale


def block_of(weight: Tensor, scales: Tensor | None) -> int:
    """Rows and columns with one scale; 0: each row has one, or none has."""
    return 0 if scales is None or scales.shape[-2] == weight.shape[-2] else BLOCK


@triton.jit
def convert_weights(weights: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Through float32: a GPU has a slow instruction from float8 to bfloat16, and fast ones for both steps."""
    if weights.dtype == dtype:
        converted = weights
    elif dtype == tl.bfloat16:
        converted = weights.to(tl.float32).to(dtype)
    else:
        converted = weights.to(dtype)
    return converted
