"""Expert GEMMs of one token or a few by float8 weights: the kernels of `experts_gemv` for them.

Columns are in groups of 128, so that a thread reads a scale once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.launch.pdl import pdl_wait_then_release
from saccade.kernels.moe.combine import add_and_store
from saccade.kernels.moe.prefetch_experts import prefetch_experts
from saccade.kernels.ops.gate import gated
from saccade.kernels.ops.load_columns import load_columns


@triton.jit
def scaled_gate_up_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, experts: tl.tensor, out: tl.tensor, N: tl.tensor,
    x_row: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, GELU: tl.constexpr = False,
) -> None:  # fmt: skip
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    pair = tl.program_id(1)
    pdl_wait_then_release(PDL)
    gates = tl.load(experts + pair).to(tl.int64) * 2 * N + tl.minimum(columns, N - 1)  # [OUTPUTS], rows of all experts
    row = x + (pair // SLOTS) * x_row
    none = tl.zeros([OUTPUTS, INPUTS // 128, 128], tl.float32)
    gate = _sum(_accumulate(none, row, weight, scales, gates, 1.0, K, BLOCK, INPUTS, STAGES))
    up = _sum(_accumulate(none, row, weight, scales, gates + N, 1.0, K, BLOCK, INPUTS, STAGES))
    tl.store(out + pair * N + columns, gated(gate, up, GELU).to(out.dtype.element_ty), mask=columns < N)


@triton.jit
def scaled_down_kernel(
    wide: tl.tensor, weight: tl.tensor, scales: tl.tensor, experts: tl.tensor, shares: tl.tensor, addend: tl.tensor,
    gate: tl.tensor, out: tl.tensor, N: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, LINES: tl.constexpr, LINES_PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1)
    if LINES > 0:
        first = weight + tl.program_id(0) * OUTPUTS * K
        prefetch_experts(first, experts + token * SLOTS, tl.cast(N, tl.int64) * K, SLOTS, LINES, LINES_PADDED)
    pdl_wait_then_release(PDL)
    acc = tl.zeros([OUTPUTS, INPUTS // 128, 128], tl.float32)  # each thread's own columns; one reduction at the end
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        rows = tl.load(experts + pair).to(tl.int64) * N + tl.minimum(columns, N - 1)
        share = tl.load(shares + pair)
        acc = _accumulate(acc, wide + pair * K, weight, scales, rows, share, K, BLOCK, INPUTS, 1)
    add_and_store(_sum(acc), addend, gate, out, token, columns, N)


@triton.jit
def _accumulate(
    acc: tl.tensor, row: tl.tensor, weight: tl.tensor, scales: tl.tensor, rows: tl.tensor, share: tl.tensor,
    K: tl.constexpr, BLOCK: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`acc` and the weight rows [OUTPUTS] times one row of x and `share`: [OUTPUTS, groups, 128], not yet summed."""
    GROUPS: tl.constexpr = INPUTS // 128
    MASKED: tl.constexpr = K % INPUTS != 0
    groups = tl.arange(0, GROUPS)[None, :, None]
    inside = groups * 128 + tl.arange(0, 128)[None, None, :]  # [1, GROUPS, 128]
    places = weight + rows[:, None, None] * K
    if BLOCK == 0:
        share = share * tl.load(scales + rows)[:, None, None]
    for first in tl.range(0, K, INPUTS, num_stages=STAGES):
        here = load_columns(row + first, inside, K - first, MASKED, "").to(tl.float32) * share
        if BLOCK > 0:
            blocks = scales + tl.min(rows) // BLOCK * (K // BLOCK) + first // BLOCK
            here *= load_columns(blocks, groups, (K - first) // BLOCK, MASKED, "")
        acc += load_columns(places + first, inside, K - first, MASKED, "evict_first").to(tl.float32) * here
    return acc


@triton.jit
def _sum(acc: tl.tensor) -> tl.tensor:
    return tl.sum(tl.sum(acc, 2), 1)
