"""Expert GEMMs of one token or a few by float8 weights: the kernels of `experts_gemv` for them.

Columns are in groups of 128, so that a thread reads a scale once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.launch.pdl import pdl_wait_then_release
from saccade.kernels.moe.combine import add_and_store
from saccade.kernels.ops.load_columns import load_columns


@triton.jit
def scaled_gate_up_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, experts: tl.tensor, out: tl.tensor, N: tl.tensor,
    x_row: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    pair = tl.program_id(1)
    pdl_wait_then_release(PDL)
    gates = tl.load(experts + pair).to(tl.int64) * 2 * N + tl.minimum(columns, N - 1)  # [OUTPUTS], rows of all experts
    row = x + (pair // SLOTS) * x_row
    gate = _gemv(row, weight, scales, gates, 1.0, K, BLOCK, OUTPUTS, INPUTS, STAGES)
    up = _gemv(row, weight, scales, gates + N, 1.0, K, BLOCK, OUTPUTS, INPUTS, STAGES)
    found = gate * tl.sigmoid(gate) * up
    tl.store(out + pair * N + columns, found.to(out.dtype.element_ty), mask=columns < N)


@triton.jit
def scaled_down_kernel(
    wide: tl.tensor, weight: tl.tensor, scales: tl.tensor, experts: tl.tensor, shares: tl.tensor, added: tl.tensor,
    gate: tl.tensor, out: tl.tensor, N: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1)
    pdl_wait_then_release(PDL)
    found = tl.zeros([OUTPUTS], tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        rows = tl.load(experts + pair).to(tl.int64) * N + tl.minimum(columns, N - 1)
        share = tl.load(shares + pair)
        found += _gemv(wide + pair * K, weight, scales, rows, share, K, BLOCK, OUTPUTS, INPUTS, 1)
    add_and_store(found, added, gate, out, token, columns, N)


@triton.jit
def _gemv(
    row: tl.tensor, weight: tl.tensor, scales: tl.tensor, rows: tl.tensor, share: tl.tensor,
    K: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The weight rows [OUTPUTS] times one row of x and `share`: [OUTPUTS]."""
    GROUPS: tl.constexpr = INPUTS // 128
    MASKED: tl.constexpr = K % INPUTS != 0
    groups = tl.arange(0, GROUPS)[None, :, None]
    inside = groups * 128 + tl.arange(0, 128)[None, None, :]  # [1, GROUPS, 128]
    own = weight + rows[:, None, None] * K
    acc = tl.zeros([OUTPUTS, GROUPS, 128], tl.float32)
    for first in tl.range(0, K, INPUTS, num_stages=STAGES):
        here = load_columns(row + first, inside, K - first, MASKED, "").to(tl.float32)
        if BLOCK > 0:
            blocks = scales + tl.min(rows) // BLOCK * (K // BLOCK) + first // BLOCK
            here *= load_columns(blocks, groups, (K - first) // BLOCK, MASKED, "")
        acc += load_columns(own + first, inside, K - first, MASKED, "evict_first").to(tl.float32) * here
    found = tl.sum(tl.sum(acc, 2), 1) * share
    if BLOCK == 0:
        found *= tl.load(scales + rows)
    return found
