"""One row by an INT4 weight, on CUDA cores: the kernel of `int4_linear` for it, and what experts share with it.

A number q becomes a float32 without a conversion: in the mantissa of a power of two, its four bits are that power plus
q. Three of a word's eight numbers are at such places, and two shifts bring the others there:

    bits of a word      28  24  20  16  12   8   4   0         place in the mantissa    16       12       8
    numbers              7   6   5   4   3   2   1   0         is worth            128 + q  2^11 + q  2^15 + q
    as they are                      4   3   2
    word >> 12           7   6   5
    word << 8                                1   0   at 12 and 8

Numbers 0 to 3 are the even columns of the four planes, 4 to 7 the odd ones. The powers are the same for all rows of a
weight: sums start with what they add, negated.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.gemm.skinny_parts import scale_and_gate, store_outputs
from saccade.kernels.launch.pdl import pdl_wait_then_release
from saccade.kernels.ops.load_columns import load_columns

_PLACES = (8, 12, 8, 12, 16, 8, 12, 16)  # of numbers in the mantissa, after their word was shifted


@triton.jit
def int4_vector_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, bias: tl.tensor, residual: tl.tensor,
    norm: tl.tensor, out: tl.tensor, eps: tl.tensor, N: tl.tensor, K: tl.constexpr, GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GATED: tl.constexpr, BF16: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Two columns of x, and of a norm in 16 bits, are an int32, and eight of the weight: a word.

    A thread has four words of a row, a quad: a quarter of a chunk of 128 columns. It loads those of the next step
    before it multiplies this one's, and the first before it waits for x.
    """
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.minimum(columns, N - 1).to(tl.int64)
    MASKED: tl.constexpr = K % INPUTS != 0
    gate = load_tile(weight, scales, zeros, None, None, rows, 0, N, K, 1, GROUP, INPUTS, MASKED)
    up = gate
    if GATED:
        up = load_tile(weight, scales, zeros, None, None, rows + N, 0, N, K, 1, GROUP, INPUTS, MASKED)
    pdl_wait_then_release(PDL)
    acc, acc_up, squares = multiply_row(
        x, weight, scales, zeros, norm, None, None, rows, gate, up, N, K, 1, GROUP, INPUTS, GATED, BF16
    )
    total = tl.sum(tl.sum(squares, 2), 1)  # [1]
    sums = scale_and_gate(tl.sum(acc, 1)[:, None], tl.sum(acc_up, 1)[:, None], total, norm, eps, K, GATED)
    store_outputs(sums, bias, residual, out, tl.arange(0, 1), columns, 1, N, N)


@triton.jit
def multiply_row(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, norm: tl.tensor, experts: tl.tensor,
    shares: tl.tensor, rows: tl.tensor, gate: tl.tuple, up: tl.tuple, N: tl.tensor, K: tl.constexpr,
    SLOTS: tl.constexpr, GROUP: tl.constexpr, INPUTS: tl.constexpr, GATED: tl.constexpr, BF16: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """x times weight rows, and times those N rows further on if gated: [OUTPUTS, QUADS] each, not yet summed.

    `gate` and `up` are the tiles of the first step. With the norm's weight, also the sum of squares of x.
    """
    COLUMNS: tl.constexpr = SLOTS * K
    QUADS: tl.constexpr = INPUTS // 32
    MASKED: tl.constexpr = COLUMNS % INPUTS != 0
    STEPS: tl.constexpr = (COLUMNS + INPUTS - 1) // INPUTS
    unknown = N >> 31  # zero, but not to the compiler, which would load constants again and again
    acc = tl.zeros([rows.shape[0], QUADS], tl.float32)
    acc_up = tl.zeros([rows.shape[0], QUADS], tl.float32)
    squares = tl.zeros([1, QUADS, 4], tl.float32)
    for step in tl.range(0, STEPS, num_stages=1):
        next_own, next_up = gate, up
        if STEPS > 1:
            more = step + 1
            next_own = load_tile(weight, scales, zeros, experts, shares, rows, more, N, K, SLOTS, GROUP, INPUTS, True)
            if GATED:
                next_up = load_tile(
                    weight, scales, zeros, experts, shares, rows + N, more, N, K, SLOTS, GROUP, INPUTS, True
                )
        even0, odd0, squares = _load_plane(x, norm, squares, step, 0, COLUMNS, QUADS, MASKED, BF16)
        even1, odd1, squares = _load_plane(x, norm, squares, step, 1, COLUMNS, QUADS, MASKED, BF16)
        even2, odd2, squares = _load_plane(x, norm, squares, step, 2, COLUMNS, QUADS, MASKED, BF16)
        even3, odd3, squares = _load_plane(x, norm, squares, step, 3, COLUMNS, QUADS, MASKED, BF16)
        here = (even0, even1, even2, even3, odd0, odd1, odd2, odd3)
        acc = _add_tile(acc, here, gate, zeros, unknown, GROUP)
        if GATED:
            acc_up = _add_tile(acc_up, here, up, zeros, unknown, GROUP)
        gate, up = next_own, next_up
    return acc, acc_up, squares


@triton.jit
def _load_plane(
    x: tl.tensor, norm: tl.tensor, squares: tl.tensor, step: tl.tensor, PLANE: tl.constexpr, K: tl.constexpr,
    QUADS: tl.constexpr, MASKED: tl.constexpr, BF16: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Even and odd columns of a plane, [1, QUADS, 4] each, normed but for the divisor; and the sum of squares."""
    quads = tl.arange(0, QUADS)[None, :, None]
    pairs = step * (QUADS * 16) + quads // 4 * 64 + PLANE * 16 + quads % 4 * 4 + tl.arange(0, 4)[None, None, :]
    even, odd = _split_pairs(load_columns(x, pairs, K // 2, MASKED, ""), BF16)
    if norm is not None:
        squares = tl.fma(even, even, tl.fma(odd, odd, squares))
        if norm.dtype.element_ty == tl.float32:
            even *= load_columns(norm, pairs * 2, K, MASKED, "")
            odd *= load_columns(norm, pairs * 2 + 1, K, MASKED, "")
        else:
            of_even, of_odd = _split_pairs(load_columns(norm, pairs, K // 2, MASKED, ""), BF16)
            even *= of_even
            odd *= of_odd
    return even, odd, squares


@triton.jit
def _split_pairs(pairs: tl.tensor, BF16: tl.constexpr) -> tl.tuple:
    """int32 -> the two 16-bit floats in it, as float32. A bfloat16 is the upper half of one."""
    if BF16:
        even = (pairs << 16).to(tl.float32, bitcast=True)
        odd = (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        even = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return even, odd


@triton.jit
def load_tile(
    weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, experts: tl.tensor, shares: tl.tensor, rows: tl.tensor,
    step: tl.tensor, N: tl.tensor, K: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, INPUTS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Words [OUTPUTS, QUADS, 4] of a step; scales, then zero points of a chunk's groups, [OUTPUTS, QUADS] each.

    Threads are along a row, and each has the same columns of all rows: loads in two dimensions are so if the first
    has the columns, or they are dense. Else threads would have to pass on what they load.

    With SLOTS `experts` of N rows each, a row is that of all of them, one after the other, times their `shares`.
    """
    QUADS: tl.constexpr = INPUTS // 32
    PARTS: tl.constexpr = 128 // GROUP  # groups of a chunk
    inside = step * (INPUTS // 8) + tl.arange(0, INPUTS // 8)[None, :]
    weight_rows = _rows_at(rows[:, None], inside, experts, N, K // 8, SLOTS)
    words = load_columns(weight + weight_rows * (K // 8), inside, SLOTS * K // 8, MASKED, "evict_first")
    tile = (tl.reshape(words, (words.shape[0], QUADS, 4)),)
    group = (step * QUADS + tl.arange(0, QUADS)[:, None]) // 4 * PARTS  # [QUADS, 1]
    row = _rows_at(rows[None, :], group, experts, N, K // GROUP, SLOTS) * (K // GROUP)
    for part in tl.static_range(PARTS):
        groups = load_columns(scales + row, group + part, SLOTS * K // GROUP, MASKED, "")
        if shares is not None:
            slot = group // (K // GROUP)
            groups = groups.to(tl.float32) * tl.load(shares + slot, mask=slot < SLOTS, other=0.0)
        tile += (tl.trans(groups),)  # type: ignore[assignment]
    if zeros is not None:
        for part in tl.static_range(PARTS):
            groups = tl.trans(load_columns(zeros + row, group + part, SLOTS * K // GROUP, MASKED, ""))
            tile += (groups,)  # type: ignore[assignment]
    return tile


@triton.jit
def _rows_at(
    rows: tl.tensor, at: tl.tensor, experts: tl.tensor, N: tl.tensor, LENGTH: tl.constexpr, SLOTS: tl.constexpr
) -> tl.tensor:
    """Rows of all experts in which place `at` of a row over SLOTS of them, LENGTH places each, is row * LENGTH + at."""
    if experts is not None:
        slot = at // LENGTH
        rows = rows + tl.load(experts + slot, mask=slot < SLOTS, other=0).to(tl.int64) * N - slot
    return rows


@triton.jit
def _add_tile(
    acc: tl.tensor, x: tl.tuple, tile: tl.tuple, zeros: tl.tensor, unknown: tl.tensor, GROUP: tl.constexpr
) -> tl.tensor:
    """acc [OUTPUTS, QUADS] + a tile's weights * x."""
    PARTS: tl.constexpr = 128 // GROUP
    PLANES: tl.constexpr = GROUP // 32  # of a group
    word = tile[0]
    shifted = (word << 8, word << 8, word, word, word, word >> 12, word >> 12, word >> 12)
    for part in tl.static_range(PARTS):
        sums, total = _multiply_group(shifted, x, unknown, part * PLANES, PLANES)
        zero = 8.0
        if zeros is not None:
            zero = tile[1 + PARTS + part].to(tl.float32)
        acc = tl.fma(tl.sum(sums, 2) - tl.sum(total, 2) * zero, tile[1 + part].to(tl.float32), acc)
    return acc


@triton.jit
def _multiply_group(
    words: tl.tuple, x: tl.tuple, unknown: tl.tensor, FIRST: tl.constexpr, PLANES: tl.constexpr
) -> tl.tuple:
    """Over PLANES planes: numbers * x [OUTPUTS, QUADS, 4], and the sum of x [1, QUADS, 4]."""
    total = x[FIRST] + x[FIRST + 4]
    powers = _power(FIRST) * x[FIRST] + _power(FIRST + 4) * x[FIRST + 4]
    for plane in tl.static_range(FIRST + 1, FIRST + PLANES):
        total += x[plane] + x[plane + 4]
        powers += _power(plane) * x[plane] + _power(plane + 4) * x[plane + 4]
    sums = -powers
    for plane in tl.static_range(FIRST, FIRST + PLANES):
        sums = tl.fma(_number(words[plane], unknown, plane), x[plane], sums)
        sums = tl.fma(_number(words[plane + 4], unknown, plane + 4), x[plane + 4], sums)
    return sums, total


@triton.constexpr_function
def _place(number: int) -> int:
    return _PLACES[number]


@triton.constexpr_function
def _power(number: int) -> int:
    return 1 << (23 - _PLACES[number])


@triton.jit
def _number(word: tl.tensor, unknown: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """The power plus q, as float32."""
    PLACE: tl.constexpr = _place(NUMBER)
    bits = (word & (15 << PLACE)) | (unknown + ((127 + 23 - PLACE) << 23))
    return bits.to(tl.float32, bitcast=True)
