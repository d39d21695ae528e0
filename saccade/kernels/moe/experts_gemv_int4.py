"""Expert GEMMs of one token or a few by INT4 weights: what `experts_gemv` is for others, by the steps of `int4_vector`.

    gate_up   grid (I / OUTPUTS, pairs)    program: OUTPUTS rows of the gate and of up, of the pair's expert
    down      grid (H / OUTPUTS, T)        program: OUTPUTS rows of `down`, over all experts of the token as one row

The rows of a token's pairs in `wide` are one row of SLOTS * I columns. So are the rows of its experts, each times the
pair's share, which multiplies the scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.gemm.int4_linear import Int4Weight
from saccade.kernels.gemm.int4_vector import load_tile, multiply_row
from saccade.kernels.launch.pdl import pdl_options, pdl_wait_then_release, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two
from saccade.kernels.moe.combine import add_and_store
from saccade.kernels.moe.experts_gemv import VectorConfig
from saccade.kernels.moe.prefetch_experts import LINE, prefetch_experts
from saccade.kernels.moe.topk_routing import Routed
from saccade.kernels.ops.gate import gated


def int4_vector_gate_up(
    x: Tensor, packed: Int4Weight, routed: Routed, config: VectorConfig, *, gelu: bool = False
) -> Tensor:
    """x [T, H], weight [E, 2 I, H / 4] -> silu(gate) * up: [pairs, I], in pair order; or with GELU."""
    packed.check(x)
    pairs, outputs = routed.experts.numel(), packed.weight.shape[1] // 2
    out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    pdl = supports_pdl(x)
    int4_gate_up_kernel[(triton.cdiv(outputs, config.outputs), pairs)](
        x.view(torch.int32), packed.weight.view(torch.int32), packed.scales, packed.zeros, routed.experts, out, outputs,
        x.stride(0) // 2, K=packed.inputs, SLOTS=routed.experts.shape[1], GROUP=packed.group, OUTPUTS=config.outputs,
        INPUTS=config.inputs, BF16=x.dtype == torch.bfloat16, GELU=gelu, PDL=pdl, num_warps=config.warps,
        **pdl_options(pdl),
    )  # fmt: skip
    return out


def int4_vector_down(
    wide: Tensor, packed: Int4Weight, routed: Routed, config: VectorConfig,
    addend: Tensor | None = None, gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """wide [pairs, I], weight [E, H, I / 4] -> [T, H]: the weighted sum over slots; the rest as in `combine`."""
    packed.check(wide)
    tokens, slots = routed.experts.shape
    outputs = packed.weight.shape[1]
    assert wide.is_contiguous() and len(wide) == tokens * slots
    assert addend is None or (addend.is_contiguous() and addend.shape == (tokens, outputs))
    out = torch.empty((tokens, outputs), dtype=wide.dtype, device=wide.device)
    pdl = supports_pdl(wide)
    lines = triton.cdiv(config.outputs * packed.inputs // 2, LINE)  # of a program's rows of one expert
    if not (config.prefetch and pdl and outputs % config.outputs == 0):
        lines = 0
    int4_down_kernel[(triton.cdiv(outputs, config.outputs), tokens)](
        wide.view(torch.int32), packed.weight.view(torch.int32), packed.scales, packed.zeros, routed.experts,
        routed.weights, addend, gate, out, outputs,
        K=packed.inputs, SLOTS=slots, GROUP=packed.group, OUTPUTS=config.outputs,
        INPUTS=config.inputs, BF16=wide.dtype == torch.bfloat16, LINES=lines, LINES_PADDED=power_of_two(lines),
        PDL=pdl, num_warps=config.warps, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit
def int4_gate_up_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, experts: tl.tensor, out: tl.tensor,
    N: tl.tensor, x_row: tl.tensor, K: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, BF16: tl.constexpr, PDL: tl.constexpr, GELU: tl.constexpr = False,
) -> None:  # fmt: skip
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    pair = tl.program_id(1)
    pdl_wait_then_release(PDL)
    rows = tl.load(experts + pair).to(tl.int64) * 2 * N + tl.minimum(columns, N - 1)
    MASKED: tl.constexpr = K % INPUTS != 0
    gate = load_tile(weight, scales, zeros, None, None, rows, 0, N, K, 1, GROUP, INPUTS, MASKED)
    up = load_tile(weight, scales, zeros, None, None, rows + N, 0, N, K, 1, GROUP, INPUTS, MASKED)
    here = x + (pair // SLOTS) * x_row
    acc, acc_up, _ = multiply_row(
        here, weight, scales, zeros, None, None, None, rows, gate, up, N, K, 1, GROUP, INPUTS, True, BF16
    )
    row_out = gated(tl.sum(acc, 1), tl.sum(acc_up, 1), GELU)
    tl.store(out + pair * N + columns, row_out.to(out.dtype.element_ty), mask=columns < N)


@triton.jit
def int4_down_kernel(
    wide: tl.tensor, weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, experts: tl.tensor, shares: tl.tensor,
    addend: tl.tensor, gate: tl.tensor, out: tl.tensor, N: tl.tensor, K: tl.constexpr, SLOTS: tl.constexpr,
    GROUP: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BF16: tl.constexpr, LINES: tl.constexpr,
    LINES_PADDED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The experts are older than the previous kernel, so the first weights are loaded before it has ended."""
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1)
    slots, parts = experts + token * SLOTS, shares + token * SLOTS
    if LINES > 0:
        first = weight + tl.program_id(0) * OUTPUTS * (K // 8)
        prefetch_experts(first, slots, tl.cast(N, tl.int64) * (K // 8), SLOTS, LINES, LINES_PADDED)
    rows = tl.minimum(columns, N - 1).to(tl.int64)  # of expert 0
    first_tile = load_tile(
        weight, scales, zeros, slots, parts, rows, 0, N, K, SLOTS, GROUP, INPUTS, SLOTS * K % INPUTS != 0
    )
    pdl_wait_then_release(PDL)
    here = wide + token * SLOTS * (K // 2)
    acc, _, _ = multiply_row(
        here,
        weight,
        scales,
        zeros,
        None,
        slots,
        parts,
        rows,
        first_tile,
        first_tile,
        N,
        K,
        SLOTS,
        GROUP,
        INPUTS,
        False,
        BF16,
    )
    add_and_store(tl.sum(acc, 1), addend, gate, out, token, columns, N)
