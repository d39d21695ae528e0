"""A few rows by an INT4 weight, on tensor cores: the kernel of `int4_linear` for them. It is `skinny`'s otherwise.

A plane of 32 columns is an operand. Its numbers become bfloat16 as in `int4_vector`: 0x4300 is 128, and with four more
bits 128 + q; in float16 0x6400 is 1024. Less that and the zero point they are exact; scales multiply what they add.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.gemm.skinny_parts import finish_tile, prefetch_weights
from saccade.kernels.launch.pdl import pdl_wait_then_release


@triton.jit(do_not_specialize=["M"])
def int4_tile_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, bias: tl.tensor, residual: tl.tensor,
    out: tl.tensor, partials: tl.tensor, squares: tl.tensor, counters: tl.tensor,
    M: tl.tensor, N: tl.tensor, x_row: tl.tensor,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SPLITS: tl.constexpr, GATED: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
) -> None:  # fmt: skip
    """PAIRED: unpack two numbers in one instruction, which the interpreter cannot."""
    split = tl.program_id(1)
    SHARE: tl.constexpr = ((K + INPUTS - 1) // INPUTS + SPLITS - 1) // SPLITS * INPUTS  # columns of a split
    columns, rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    weight_rows = tl.minimum(columns, N - 1).to(tl.int64)  # weight rows, of the gate if there is one
    prefetch_weights(
        weight + weight_rows[:, None] * (K // 4) + split * SHARE // 4, tl.cast(N, tl.int64) * (K // 4), GATED, PREFETCH
    )
    pdl_wait_then_release(PDL)
    few = x + rows[:, None] * x_row + tl.arange(0, 32)[None, :]  # [ROWS, 32]
    present = (rows < M)[:, None]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    end = tl.minimum(split * SHARE + SHARE, K)
    for first in range(split * SHARE, end, INPUTS):
        for chunk in tl.static_range(INPUTS // 128):
            start = first + chunk * 128
            inside = present & (start < K)
            x0 = tl.load(few + start, mask=inside, other=0.0)
            x1 = tl.load(few + start + 32, mask=inside, other=0.0)
            x2 = tl.load(few + start + 64, mask=inside, other=0.0)
            x3 = tl.load(few + start + 96, mask=inside, other=0.0)
            here = (x0, x1, x2, x3)
            acc = add_chunk(acc, here, weight, scales, zeros, weight_rows, start, K, GROUP, INPUTS, PAIRED)
            if GATED:
                acc_up = add_chunk(
                    acc_up, here, weight, scales, zeros, weight_rows + N, start, K, GROUP, INPUTS, PAIRED
                )
    total = tl.zeros([ROWS], tl.float32)
    finish_tile(
        acc, acc_up, total, bias, residual, None, out, partials, squares, counters, 0.0, rows, columns, M, N, N,
        K, ROWS, OUTPUTS, SPLITS, GATED,
    )  # fmt: skip


@triton.jit
def add_chunk(
    acc: tl.tensor, here: tl.tuple, weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, rows: tl.tensor,
    start: tl.tensor, K: tl.constexpr, GROUP: tl.constexpr, INPUTS: tl.constexpr, PAIRED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """acc [OUTPUTS, ROWS] + 128 columns of these weight rows * x's planes, [ROWS, 32] each."""
    PLANES: tl.constexpr = GROUP // 32  # of a group
    units = weight + rows[:, None] * (K // 4) + start // 4 + tl.arange(0, 32)[None, :]
    if K % INPUTS == 0:
        numbers = tl.load(units, eviction_policy="evict_first")  # [OUTPUTS, 32]
    else:
        numbers = tl.load(units, mask=(start < K) & (rows >= 0)[:, None], other=0, eviction_policy="evict_first")
    for part in tl.static_range(128 // GROUP):
        place = rows * (K // GROUP) + tl.minimum(start, K - 128) // GROUP + part
        sums = tl.zeros(acc.shape, tl.float32)
        for plane in tl.static_range(part * PLANES, (part + 1) * PLANES):
            values = _unpack(numbers, zeros, place, plane, here[plane].dtype, PAIRED)
            sums = tl.dot(values, tl.trans(here[plane]), sums)
        acc = tl.fma(sums, tl.load(scales + place).to(tl.float32)[:, None], acc)
    return acc


@triton.jit
def _unpack(
    numbers: tl.tensor, zeros: tl.tensor, place: tl.tensor, PLANE: tl.constexpr, dtype: tl.constexpr,
    PAIRED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """q - zero of a plane."""
    BITS: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
    POWER: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
    if PAIRED:
        pair = tl.inline_asm_elementwise(
            f"{{ .reg .b32 s; shr.u32 s, $1, {4 * PLANE}; lop3.b32 $0, s, 0x000F000F, {BITS * 65537}, 0xEA; }}",
            "=r,r", [numbers], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        pair = ((numbers >> (4 * PLANE)) & 15) | BITS
    if zeros is not None:
        zero = (tl.load(zeros + place).to(tl.float32) + POWER).to(dtype)[:, None]
    else:
        zero = tl.full([1, 1], POWER + 8, dtype)
    return pair.to(dtype, bitcast=True) - zero
