"""Expert GEMMs over sorted pairs by INT4 weights: what `experts` is for others, by the chunks of `int4_tiles`.

out^T = weight x^T for any number of rows: unpacked weights are the operand that an MMA takes from registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.gemm.int4_linear import Int4Weight
from saccade.kernels.gemm.int4_tiles import add_chunk
from saccade.kernels.launch.pdl import pdl_options, pdl_wait_then_release, supports_pdl
from saccade.kernels.moe.experts import TileConfig, block_and_tile, grid_of
from saccade.kernels.moe.sorting import SortedPairs
from saccade.kernels.ops.gate import gated

_CHUNK = 128


def int4_moe_gate_up(
    x: Tensor, packed: Int4Weight, pairs: SortedPairs, config: TileConfig, *, gelu: bool = False
) -> Tensor:
    """x [T, H], weight [E, 2 I, H / 4] gates first -> silu(gate) * up: [pairs, I], in sorted order; or with GELU."""
    packed.check(x)
    outputs = packed.weight.shape[1] // 2
    out = torch.empty((len(pairs.order), outputs), dtype=x.dtype, device=x.device)
    int4_gate_up_tile_kernel[grid_of(pairs, outputs, config)](
        x, packed.weight, packed.scales, packed.zeros, pairs.order, pairs.blocks, out, outputs, pairs.blocks.shape[1],
        x.stride(0), pairs.slots, GELU=gelu, **_sizes(x, packed, pairs, config),
    )  # fmt: skip
    return out


def int4_moe_down(wide: Tensor, packed: Int4Weight, pairs: SortedPairs, shares: Tensor, config: TileConfig) -> Tensor:
    """wide [pairs, I] in sorted order, weight [E, H, I / 4], shares float32 [T, slots] -> [pairs, H] in pair order."""
    packed.check(wide)
    assert wide.is_contiguous() and shares.is_contiguous() and shares.numel() == len(pairs.order)
    outputs = packed.weight.shape[1]
    out = torch.empty((len(pairs.order), outputs), dtype=wide.dtype, device=wide.device)
    int4_down_tile_kernel[grid_of(pairs, outputs, config)](
        wide, packed.weight, packed.scales, packed.zeros, pairs.order, pairs.blocks, shares, out, outputs,
        pairs.blocks.shape[1], **_sizes(wide, packed, pairs, config),
    )  # fmt: skip
    return out


def _sizes(x: Tensor, packed: Int4Weight, pairs: SortedPairs, config: TileConfig) -> dict[str, Any]:
    """A step reads whole chunks, and only as many as divide a row."""
    assert config.inputs % _CHUNK == 0, config
    pdl = supports_pdl(x)
    return {
        "K": packed.inputs, "GROUP": packed.group, "ROWS": pairs.rows, "OUTPUTS": config.outputs,
        "INPUTS": config.inputs if packed.inputs % config.inputs == 0 else _CHUNK, "BLOCKS": config.group,
        "PAIRED": x.device.type != "cpu", "PDL": pdl,
        "num_warps": config.warps, "num_stages": config.stages, **pdl_options(pdl),
    }  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "slots"])
def int4_gate_up_tile_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, order: tl.tensor, blocks: tl.tensor,
    out: tl.tensor, N: tl.tensor, capacity: tl.tensor, x_row: tl.tensor, slots: tl.tensor,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BLOCKS: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr, GELU: tl.constexpr = False,
) -> None:  # fmt: skip
    """BLOCKS blocks run tile by tile."""
    block, tile = block_and_tile(N, OUTPUTS, BLOCKS)
    pdl_wait_then_release(PDL)
    count = tl.load(blocks + 2 * capacity + block, mask=block < capacity, other=0)
    if count == 0:
        return
    first = tl.load(blocks + capacity + block)
    rows = tl.arange(0, ROWS)
    tokens = tl.load(order + first + tl.minimum(rows, count - 1)) // slots
    columns = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_rows = tl.load(blocks + block).to(tl.int64) * 2 * N + tl.minimum(columns, N - 1)  # weight rows of the gate
    here = x + tokens[:, None].to(tl.int64) * x_row
    gate, up = _multiply_rows(
        here, weight, scales, zeros, weight_rows, N, K, GROUP, ROWS, OUTPUTS, INPUTS, True, PAIRED
    )
    rows_out = tl.trans(gated(gate, up, GELU))  # [ROWS, OUTPUTS]
    target = out + (first + rows)[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(target, rows_out.to(out.dtype.element_ty), mask=(rows < count)[:, None] & (columns < N)[None, :])


@triton.jit(do_not_specialize=["capacity"])
def int4_down_tile_kernel(
    wide: tl.tensor, weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, order: tl.tensor, blocks: tl.tensor,
    shares: tl.tensor, out: tl.tensor, N: tl.tensor, capacity: tl.tensor,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BLOCKS: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    block, tile = block_and_tile(N, OUTPUTS, BLOCKS)
    pdl_wait_then_release(PDL)
    count = tl.load(blocks + 2 * capacity + block, mask=block < capacity, other=0)
    if count == 0:
        return
    first = tl.load(blocks + capacity + block)
    rows = tl.arange(0, ROWS)
    columns = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_rows = tl.load(blocks + block).to(tl.int64) * N + tl.minimum(columns, N - 1)
    here = wide + (first + tl.minimum(rows, count - 1))[:, None].to(tl.int64) * K
    acc, _ = _multiply_rows(here, weight, scales, zeros, weight_rows, N, K, GROUP, ROWS, OUTPUTS, INPUTS, False, PAIRED)
    pair = tl.load(order + first + rows, mask=rows < count, other=0)
    outputs = tl.trans(acc) * tl.load(shares + pair)[:, None]  # [ROWS, OUTPUTS]
    target = out + pair[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(target, outputs.to(out.dtype.element_ty), mask=(rows < count)[:, None] & (columns < N)[None, :])


@triton.jit
def _multiply_rows(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, zeros: tl.tensor, weight_rows: tl.tensor, N: tl.tensor,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    GATED: tl.constexpr, PAIRED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """`weight_rows`, and those N rows further on if gated, times rows of x [ROWS, 1]: [OUTPUTS, ROWS] each."""
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    few = x + tl.arange(0, 32)[None, :]
    for first in range(0, K, INPUTS):
        for chunk in tl.static_range(INPUTS // 128):
            start = first + chunk * 128
            x0 = tl.load(few + start)
            x1 = tl.load(few + start + 32)
            x2 = tl.load(few + start + 64)
            x3 = tl.load(few + start + 96)
            here = (x0, x1, x2, x3)
            acc = add_chunk(acc, here, weight, scales, zeros, weight_rows, start, K, GROUP, INPUTS, PAIRED)
            if GATED:
                acc_up = add_chunk(
                    acc_up, here, weight, scales, zeros, weight_rows + N, start, K, GROUP, INPUTS, PAIRED
                )
    return acc, acc_up
