"""Expert GEMMs of one token or a few, on CUDA cores, without sorting: each pair reads its own expert's weights.

    gate_up   grid (I / OUTPUTS, pairs)    program: OUTPUTS rows of the gate and of up, of the pair's expert
    down      grid (H / OUTPUTS, T)        program: OUTPUTS rows of `down` of each of the token's experts in turn

`vector_down` has all experts of a token in one program, so it sums them there, in slot order: no partial results, no
launch to combine them. Several tokens that share an expert read its weights from L2.

PDL: the experts are older than `vector_gate_up`, which waits before it releases its dependents. So `vector_down` may
read them before its own wait, and prefetch its weights into L2 while the last programs of `vector_gate_up` run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.pdl import pdl_options, pdl_wait_then_release, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two
from saccade.kernels.moe.combine import add_and_store
from saccade.kernels.moe.experts_gemv_scaled import scaled_down_kernel, scaled_gate_up_kernel
from saccade.kernels.moe.prefetch_experts import LINE, prefetch_experts
from saccade.kernels.moe.topk_routing import Routed
from saccade.kernels.ops.gate import gated
from saccade.kernels.ops.load_columns import load_columns
from saccade.kernels.ops.scaled_weight import BLOCK, block_of

MAX_TOKENS = 4


class VectorConfig(NamedTuple):
    outputs: int  # weight rows of a program; of the gate and as many of `up`
    inputs: int  # columns it reads at a time
    warps: int = 4
    stages: int = 4  # of the software pipeline
    prefetch: bool = False  # weights, before the previous kernel has ended; `vector_down` alone


def vector_gate_up(
    x: Tensor, weight: Tensor, routed: Routed, config: VectorConfig, scales: Tensor | None = None, *, gelu: bool = False
) -> Tensor:
    """x [T, H], weight [E, 2 I, H] -> silu(gate) * up: [pairs, I], in pair order; or with GELU."""
    _, both, inputs = weight.shape
    outputs = both // 2
    pairs = routed.experts.numel()
    assert x.stride(1) == 1 and weight.is_contiguous() and x.shape[1] == inputs
    out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    pdl = supports_pdl(x)
    grid = (triton.cdiv(outputs, config.outputs), pairs)
    args = (routed.experts, out, outputs, x.stride(0))
    sizes = {
        "K": inputs, "SLOTS": routed.experts.shape[1], "OUTPUTS": config.outputs, "INPUTS": config.inputs,
        "STAGES": config.stages, "GELU": gelu, "PDL": pdl, "num_warps": config.warps, "num_stages": config.stages,
        **pdl_options(pdl),
    }  # fmt: skip
    if scales is not None:
        scaled_gate_up_kernel[grid](x, weight, scales, *args, BLOCK=_checked_block(weight, scales, config), **sizes)
    else:
        assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
        _gate_up_kernel[grid](x, weight, *args, **sizes)
    return out


def vector_down(
    wide: Tensor, weight: Tensor, routed: Routed, config: VectorConfig,
    addend: Tensor | None = None, gate: Tensor | None = None, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """wide [pairs, I], weight [E, H, I] -> [T, H]: the weighted sum over slots, `addend` and `gate` as in `combine`."""
    _, outputs, inputs = weight.shape
    tokens, slots = routed.experts.shape
    assert wide.is_contiguous() and weight.is_contiguous() and wide.shape[1] == inputs
    assert addend is None or (addend.is_contiguous() and addend.shape == (tokens, outputs))
    out = torch.empty((tokens, outputs), dtype=wide.dtype, device=wide.device)
    pdl = supports_pdl(wide)
    grid = (triton.cdiv(outputs, config.outputs), tokens)
    args = (routed.experts, routed.weights, addend, gate, out, outputs)
    lines = triton.cdiv(config.outputs * inputs * weight.element_size(), LINE)  # of a program's rows of one expert
    if not (config.prefetch and pdl and outputs % config.outputs == 0):
        lines = 0
    sizes = {
        "K": inputs, "SLOTS": slots, "OUTPUTS": config.outputs, "INPUTS": config.inputs, "LINES": lines,
        "LINES_PADDED": power_of_two(lines), "PDL": pdl, "num_warps": config.warps, "num_stages": config.stages,
        **pdl_options(pdl),
    }  # fmt: skip
    if scales is not None:
        scaled_down_kernel[grid](wide, weight, scales, *args, BLOCK=_checked_block(weight, scales, config), **sizes)
    else:
        assert wide.dtype == weight.dtype, (wide.dtype, weight.dtype)
        _down_kernel[grid](wide, weight, *args, **sizes)
    return out


def _checked_block(weight: Tensor, scales: Tensor, config: VectorConfig) -> int:
    """Rows and columns with one scale; 0: each row has one. A program's rows are in one block."""
    experts, outputs, inputs = weight.shape
    in_blocks = (experts, outputs // BLOCK, inputs // BLOCK)
    assert scales.is_contiguous() and scales.shape in (in_blocks, (experts, outputs, 1)), (scales.shape, weight.shape)
    assert BLOCK % config.outputs == 0 and config.inputs % BLOCK == 0 and inputs % BLOCK == 0, (config, inputs)
    return block_of(weight, scales)


@triton.jit
def _gate_up_kernel(
    x: tl.tensor, weight: tl.tensor, experts: tl.tensor, out: tl.tensor, N: tl.tensor, x_row: tl.tensor,
    K: tl.constexpr, SLOTS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, GELU: tl.constexpr = False,
) -> None:  # fmt: skip
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    pair = tl.program_id(1)
    pdl_wait_then_release(PDL)
    expert = tl.load(experts + pair).to(tl.int64)
    gates = weight + (expert * 2 * N + tl.minimum(columns, N - 1)[:, None]) * K  # [OUTPUTS, 1]
    ups = gates + tl.cast(N, tl.int64) * K
    row = x + (pair // SLOTS) * x_row
    gate = tl.zeros([OUTPUTS, INPUTS], tl.float32)  # each thread's own columns; one reduction at the end
    up = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for k in tl.range(0, K, INPUTS, num_stages=STAGES):
        inputs = k + tl.arange(0, INPUTS)[None, :]
        here = load_columns(row, inputs, K, K % INPUTS != 0, "").to(tl.float32)
        gate += load_columns(gates, inputs, K, K % INPUTS != 0, "evict_first").to(tl.float32) * here
        up += load_columns(ups, inputs, K, K % INPUTS != 0, "evict_first").to(tl.float32) * here
    row_out = gated(tl.sum(gate, 1), tl.sum(up, 1), GELU)
    tl.store(out + pair * N + columns, row_out.to(out.dtype.element_ty), mask=columns < N)


@triton.jit
def _down_kernel(
    wide: tl.tensor, weight: tl.tensor, experts: tl.tensor, scales: tl.tensor, addend: tl.tensor, gate: tl.tensor,
    out: tl.tensor, N: tl.tensor,
    K: tl.constexpr, SLOTS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, LINES: tl.constexpr,
    LINES_PADDED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1)
    weight_rows = weight + tl.minimum(columns, N - 1)[:, None].to(tl.int64) * K  # [OUTPUTS, 1], of expert 0
    size = tl.cast(N, tl.int64) * K
    if LINES > 0:
        first = weight + tl.program_id(0) * OUTPUTS * K
        prefetch_experts(first, experts + token * SLOTS, size, SLOTS, LINES, LINES_PADDED)
    pdl_wait_then_release(PDL)
    acc = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        rows = weight_rows + tl.load(experts + pair) * size
        scale = tl.load(scales + pair)
        for k in tl.static_range(0, K, INPUTS):
            inputs = k + tl.arange(0, INPUTS)[None, :]
            here = load_columns(wide + pair * K, inputs, K, K % INPUTS != 0, "").to(tl.float32) * scale
            acc += load_columns(rows, inputs, K, K % INPUTS != 0, "evict_first").to(tl.float32) * here
    total = tl.sum(acc, 1)
    add_and_store(total, addend, gate, out, token, columns, N)
