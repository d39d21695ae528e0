"""Samples a token for each of some rows of logits in one launch, without sorting: top-k, top-p, min-p by bisection.

    one program per row      | chunk 0 | chunk 1 | ...     each pass reads all chunks, which stay in L2
    1 pass                   the largest and the smallest
    a pass for each bit      the k-th largest value: count those above the middle of the interval, halve it
    a pass for each bit      the last value of top-p: sum the weights above the middle, halve it
    1 pass                   the sum of what is kept, and the target inside it
    1 pass at most           the chunk of the target, and the token there

A row has only the passes that its parameters need. The bisection is over keys, integers that order as values do: it
ends at a value that occurs, and equal ones stay or go together. Sums do not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels import sampling_rows
from saccade.kernels.ops.argmax import TokenSink

_TEMPERATURE = tl.constexpr(sampling_rows.TEMPERATURE)
_TOP_K = tl.constexpr(sampling_rows.TOP_K)
_TOP_P = tl.constexpr(sampling_rows.TOP_P)
_MIN_P = tl.constexpr(sampling_rows.MIN_P)
_UNIFORM = tl.constexpr(sampling_rows.UNIFORM)
_BLOCK = 8192
_WARPS = 16
_STAGES = tl.constexpr(3)  # of the software pipeline over chunks
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # lowest bits of the same value in float32


def sample_rows(
    logits: Tensor, which: Tensor, params: Tensor, out: Tensor, sink: TokenSink | None = None, block: int = _BLOCK
) -> Tensor:
    """A token for each row of logits [T, N] that `which` [rows] names, written into `out`, int64 [T], at that row.

    `params`, float64 [COUNT, rows], see `sampling_rows`. The cumulative distribution of what top-k, then top-p, then
    min-p leave is inverted at the uniform number.
    """
    rows = len(which)
    size = logits.shape[1]
    assert logits.is_contiguous() and params.shape == (sampling_rows.COUNT, rows), (
        logits.shape,
        logits.stride(),
        params.shape,
    )
    _sample_kernel[(rows,)](
        logits, which, params, *params.stride(), out, *(sink or (None, None)), size,
        UNUSED=_UNUSED_BITS[logits.dtype], BLOCK=block, num_warps=_WARPS,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["param_stride", "row_stride"],  # one compilation for all batch sizes
    do_not_specialize_on_alignment=["which", "sampling", "out", "last_tokens", "request_rows"],
)
def _sample_kernel(
    logits: tl.tensor, which: tl.tensor, sampling: tl.tensor, param_stride: tl.tensor, row_stride: tl.tensor,
    out: tl.tensor, last_tokens: tl.tensor, request_rows: tl.tensor, size: tl.tensor,
    UNUSED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    line = tl.load(which + row).to(tl.int64)
    values = logits + line * size
    numbers = sampling + row * row_stride
    temperature = tl.load(numbers + _TEMPERATURE * param_stride)
    top_k = tl.load(numbers + _TOP_K * param_stride)
    top_p = tl.load(numbers + _TOP_P * param_stride)
    min_p = tl.load(numbers + _MIN_P * param_stride)
    uniform = tl.load(numbers + _UNIFORM * param_stride)
    largest, smallest = _ends(values, size, BLOCK)
    # For exp2. The limit: at a temperature near zero, 0 * scale must not be NaN.
    scale = tl.minimum(1.4426950408889634 / temperature, 1e30).to(tl.float32)
    high, low = _key(largest, UNUSED), _key(smallest, UNUSED)
    if top_k < size:
        low = _kth(values, size, low, high, top_k.to(tl.int32), UNUSED, BLOCK)
    if top_p < 1:
        count = tl.minimum(top_k, size.to(tl.float64)).to(tl.int32)
        low = _last(values, size, low, high, count, top_p, largest, scale, UNUSED, BLOCK)
    bound = _value(low, UNUSED)
    token = _invert(values, size, bound, min_p.to(tl.float32), uniform, largest, scale, BLOCK).to(tl.int64)
    tl.store(out + line, token)
    if last_tokens is not None:
        tl.store(last_tokens + tl.load(request_rows + row), token)


@triton.jit
def _load(values: tl.tensor, index: tl.tensor, size: tl.tensor) -> tl.tensor:
    return tl.load(values + index, mask=index < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(values: tl.tensor, UNUSED: tl.constexpr) -> tl.tensor:
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)  # minus zero is zero
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED  # negative floats order backwards: flipped


@triton.jit
def _value(key: tl.tensor, UNUSED: tl.constexpr) -> tl.tensor:
    """The inverse of `_key`."""
    order = (key << UNUSED) | tl.where(key < 0, (1 << UNUSED) - 1, 0)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _ends(values: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> tl.tuple:
    largest, smallest = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], float("inf"), tl.float32)
    for first in tl.range(0, size, BLOCK, num_stages=_STAGES):
        index = first + tl.arange(0, BLOCK)
        chunk_values = _load(values, index, size)
        largest = tl.maximum(largest, chunk_values)
        smallest = tl.where(index < size, tl.minimum(smallest, chunk_values), smallest)
    return tl.max(largest, 0), tl.min(smallest, 0)


@triton.jit
def _kth(
    values: tl.tensor, size: tl.tensor, low: tl.tensor, high: tl.tensor, k: tl.tensor, UNUSED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The key of the k-th largest value: the largest key that k values reach."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up; a sum might not fit
        if _count(values, size, _value(middle, UNUSED), BLOCK) >= k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _last(
    values: tl.tensor, size: tl.tensor, low: tl.tensor, high: tl.tensor, count: tl.tensor, top_p: tl.tensor,
    largest: tl.tensor, scale: tl.tensor, UNUSED: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The smallest key, from `low` on, such that values above it weigh less than top_p of the top `count`."""
    bound = _value(low, UNUSED)
    ties = count - _count(values, size, _value(low + 1, UNUSED), BLOCK)  # of the k-th value, in top-k
    total = _mass(values, size, bound, largest, scale, BLOCK) + ties.to(tl.float32) * _weigh(bound, largest, scale)
    limit = top_p * total.to(tl.float64)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, rounded down
        if _mass(values, size, _value(middle, UNUSED), largest, scale, BLOCK) < limit:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _count(values: tl.tensor, size: tl.tensor, bound: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """How many are at least this bound, which is not -inf: chunks are padded with that."""
    counts = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, size, BLOCK, num_stages=_STAGES):
        counts += (_load(values, first + tl.arange(0, BLOCK), size) >= bound).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def _weigh(values: tl.tensor, largest: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return tl.exp2((values - largest) * scale)


@triton.jit
def _mass(
    values: tl.tensor, size: tl.tensor, bound: tl.tensor, largest: tl.tensor, scale: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """The sum of the weights of values above this bound."""
    sums = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, size, BLOCK, num_stages=_STAGES):
        chunk_values = _load(values, first + tl.arange(0, BLOCK), size)
        sums += tl.where(chunk_values > bound, _weigh(chunk_values, largest, scale), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _kept(
    values: tl.tensor, index: tl.tensor, size: tl.tensor, bound: tl.tensor, min_p: tl.tensor, largest: tl.tensor,
    scale: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """The weights of a chunk, zero for what is cut off."""
    chunk_values = _load(values, index, size)
    weights = _weigh(chunk_values, largest, scale)
    return tl.where((chunk_values >= bound) & (weights >= min_p), weights, 0.0)


@triton.jit
def _invert(
    values: tl.tensor, size: tl.tensor, bound: tl.tensor, min_p: tl.tensor, uniform: tl.tensor, largest: tl.tensor,
    scale: tl.tensor, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The last token with a weight that begins at or before the target: there always is one, however sums round."""
    sums = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, size, BLOCK, num_stages=_STAGES):
        sums += _kept(values, first + tl.arange(0, BLOCK), size, bound, min_p, largest, scale)
    target = uniform * tl.sum(sums, 0).to(tl.float64)
    first, begin, chunk, mass_before = 0, tl.full([], 0, tl.float64), 0, tl.full([], 0, tl.float64)
    while (first < size) & (mass_before <= target):
        inside = tl.sum(_kept(values, first + tl.arange(0, BLOCK), size, bound, min_p, largest, scale), 0)
        if inside > 0:
            chunk, begin = first, mass_before
        mass_before += inside.to(tl.float64)
        first += BLOCK
    index = chunk + tl.arange(0, BLOCK)
    weights = _kept(values, index, size, bound, min_p, largest, scale).to(tl.float64)
    begins = begin + (tl.cumsum(weights, 0) - weights)
    return tl.max(tl.where((weights > 0) & (begins <= target), index, 0), 0)
