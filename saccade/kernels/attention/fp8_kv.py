"""FP8 keys and values: how kernels store them, and which type they are multiplied in. Knows no slots.

    stored = saturate(x / scale) in e4m3        x = stored * scale, one scale per layer for keys and one for values

A kernel folds the keys' scale into that of the scores, and multiplies its sums of values by theirs. FP8 is multiplied
as float16, which holds it exactly and into which a GPU converts two values with one instruction.

An MMA wants values of neighbouring keys side by side, but memory has those of neighbouring dimensions. Shared memory
is read transposed in units of 16 bits, so decode reads values as pairs, and sums even and odd dimensions apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNSCALED = (1.0, 1.0)
_MAX = tl.constexpr(448.0)
_MAX_HALF = tl.constexpr(65504.0)


def launched(scales: tuple[float, float]) -> tuple[float, float, float]:
    """What kernels take of the scales of keys and values: one over each, and the latter."""
    return 1 / scales[0], 1 / scales[1], scales[1]


@triton.jit
def as_stored(x: tl.tensor, by: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """In the type of the cache; `by`: one over the scale, used for FP8 alone."""
    if kind == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32) * by, -_MAX, _MAX)
    return x.to(kind)


@triton.jit
def beside(queries: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Queries in the type in which they are multiplied with keys of this type."""
    if kind == tl.float8e4nv and queries.dtype == tl.bfloat16:
        queries = tl.clamp(queries.to(tl.float32), -_MAX_HALF, _MAX_HALF).to(tl.float16)
    return queries


@triton.jit
def as_pairs(values: tl.tensor) -> tl.tensor:
    """A pointer to FP8 values as one to pairs of them; others as they are."""
    if values.dtype.element_ty == tl.float8e4nv:
        values = values.to(tl.pointer_type(tl.int16), bitcast=True)
    return values


@triton.jit
def unpaired(pairs: tl.tensor, kind: tl.constexpr) -> tl.tuple:
    """The even and the odd values of pairs, converted."""
    even = (pairs & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16).to(kind)
    return even, ((pairs >> 8) & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16).to(kind)
