"""Expert GEMMs over sorted pairs: gate/up with SiLU, then down times the routing weight. Knows no routing.

    block b of `SortedPairs`: up to ROWS pairs of one expert      program (b, tile): OUTPUTS rows of its weight

    moe_gate_up   x [T, H], rows gathered by pair // slots    x   gate_up[expert] [2 I, H]   gate rows | up rows
                  wide [pairs, I], in sorted order            =   silu(gate) * up
    moe_down      wide, rows contiguous                       x   down[expert] [H, I]
                  out [pairs, H], in pair order               =   row * weight of its pair

Few rows per expert (decode) are memory-bound: out^T = weight x^T, so that the weight's rows are the wide side of an
MMA. Many (prefill) are compute-bound: out = x weight^T; GROUP blocks run tile by tile, so that a wave shares rows and
weights in L2. Grids are sized for the worst routing; programs without a block end at once. Rows after the last of a
block are the last one again, and their results are dropped.

A float8 weight has `scales`, float32 [E, N / 128, K / 128] or [E, N, 1], as in `gemm.skinny`. With many rows x is
float8 as well, by `quantize_rows`: MMAs are twice as fast, and no weight is converted.

With `tma`, weights (and the rows of `wide`) are loaded by TMA tensor descriptors instead of pointers.

PDL: the block table is older than the previous GEMM, which waited before it released its dependents. So `moe_down`
may read the table before its own wait, and prefetch its first weights into L2 (see `launch.pdl`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from saccade.kernels.launch.device import precision_of
from saccade.kernels.launch.pdl import pdl_options, pdl_wait_then_release, prefetch_l2, supports_pdl
from saccade.kernels.moe.sorting import SortedPairs
from saccade.kernels.ops.gate import gated
from saccade.kernels.ops.scaled_weight import BLOCK, block_of, convert_weights

_LINE = 128  # bytes


class TileConfig(NamedTuple):
    """The sizes an expert GEMM is launched with; a block's rows are those of `SortedPairs`."""

    outputs: int  # weight rows of a program; of the gate and as many of `up`
    inputs: int  # columns it reads at a time
    warps: int = 4
    stages: int = 4  # of the software pipeline
    group: int = 1  # blocks that run tile by tile
    swapped: bool = True  # out^T = weight x^T, for few rows
    tma: bool = False
    prefetch: int = 0  # cache lines of each weight row, before the previous kernel has ended; `moe_down` alone


def moe_gate_up(
    x: Tensor, weight: Tensor, pairs: SortedPairs, config: TileConfig, scales: Tensor | None = None,
    x_scales: Tensor | None = None, dtype: torch.dtype | None = None, gelu: bool = False,
) -> Tensor:  # fmt: skip
    """x [T, H], weight [E, 2 I, H] with gates first -> silu(gate) * up: [pairs, I], in sorted order; or with GELU.

    `x_scales` are those of float8 rows, float32 [H / 128, T or more]; `dtype` is then that of the result.
    """
    _, both, inputs = weight.shape
    outputs = both // 2
    assert x.stride(1) == 1 and weight.is_contiguous() and x.shape[1] == inputs
    _check_scales(x, weight, scales, config, x_scales)
    out = torch.empty((len(pairs.order), outputs), dtype=dtype or x.dtype, device=x.device)
    pdl = supports_pdl(x)
    _gate_up_kernel[grid_of(pairs, outputs, config)](
        x, _weights(weight, config), scales, x_scales, pairs.order, pairs.blocks, out, outputs,
        pairs.blocks.shape[1], x.stride(0), pairs.slots, _row_of(x_scales), K=inputs, BLOCK=block_of(weight, scales),
        ROWS=pairs.rows, GELU=gelu, **_sizes(config, x, pdl),
    )  # fmt: skip
    return out


def moe_down(
    wide: Tensor, weight: Tensor, pairs: SortedPairs, shares: Tensor, config: TileConfig,
    scales: Tensor | None = None, wide_scales: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """wide [pairs, I] in sorted order, weight [E, H, I], shares float32 [T, slots] -> [pairs, H] in pair order."""
    _, outputs, inputs = weight.shape
    assert wide.is_contiguous() and weight.is_contiguous() and wide.shape[1] == inputs
    assert shares.is_contiguous() and shares.dtype == torch.float32 and shares.numel() == len(pairs.order)
    _check_scales(wide, weight, scales, config, wide_scales)
    out = torch.empty((len(pairs.order), outputs), dtype=dtype or wide.dtype, device=wide.device)
    pdl = supports_pdl(wide)
    rows = TensorDescriptor.from_tensor(wide, [pairs.rows, config.inputs]) if config.tma else wide
    of_line = _LINE // weight.element_size()
    lines = min(config.prefetch, inputs // of_line) if pdl and not config.tma else 0
    _down_kernel[grid_of(pairs, outputs, config)](
        rows, _weights(weight, config), scales, wide_scales, pairs.order, pairs.blocks, shares, out, outputs,
        pairs.blocks.shape[1], _row_of(wide_scales), K=inputs, BLOCK=block_of(weight, scales), ROWS=pairs.rows,
        PREFETCH=1 << (lines.bit_length() - 1) if lines else 0, **_sizes(config, wide, pdl),
    )  # fmt: skip
    return out


def _row_of(scales: Tensor | None) -> int:
    """The stride of a group of columns."""
    return 0 if scales is None else scales.stride(0)


def _check_scales(
    x: Tensor, weight: Tensor, scales: Tensor | None, config: TileConfig, x_scales: Tensor | None
) -> None:
    """A program's rows are in one block, and so are the columns of a step."""
    assert (x_scales is not None) == (x.element_size() == 1), x.dtype
    assert x_scales is None or (x_scales.shape[0] == x.shape[1] // BLOCK and not config.swapped), config
    if scales is None:
        assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
        return
    experts, outputs, inputs = weight.shape
    in_blocks = (experts, outputs // BLOCK, inputs // BLOCK)
    assert scales.is_contiguous() and scales.shape in (in_blocks, (experts, outputs, 1)), (scales.shape, weight.shape)
    assert BLOCK % config.outputs == 0 and BLOCK % config.inputs == 0, config


def grid_of(pairs: SortedPairs, outputs: int, config: TileConfig) -> tuple[int]:
    groups = triton.cdiv(pairs.blocks.shape[1], config.group)
    return (groups * config.group * triton.cdiv(outputs, config.outputs),)


def _weights(weight: Tensor, config: TileConfig) -> Tensor | TensorDescriptor:
    """A tile that reaches beyond an expert reads rows of the next one; their results are dropped."""
    if not config.tma:
        return weight
    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [config.outputs, config.inputs])


def _sizes(config: TileConfig, x: Tensor, pdl: bool) -> dict[str, Any]:
    return {
        "OUTPUTS": config.outputs, "INPUTS": config.inputs, "GROUP": config.group, "SWAPPED": config.swapped,
        "TMA": config.tma, "PRECISION": precision_of(x), "PDL": pdl,
        "num_warps": config.warps, "num_stages": config.stages, **pdl_options(pdl),
    }  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "slots"])
def _gate_up_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, x_scales: tl.tensor, order: tl.tensor, blocks: tl.tensor,
    out: tl.tensor, N: tl.tensor, capacity: tl.tensor, x_row: tl.tensor, slots: tl.tensor, group_row: tl.tensor,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    GROUP: tl.constexpr, SWAPPED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    GELU: tl.constexpr = False,
) -> None:  # fmt: skip
    block, tile = block_and_tile(N, OUTPUTS, GROUP)
    pdl_wait_then_release(PDL)
    count = tl.load(blocks + 2 * capacity + block, mask=block < capacity, other=0)
    if count == 0:
        return
    expert = tl.load(blocks + block)
    first = tl.load(blocks + capacity + block)
    rows = tl.arange(0, ROWS)
    tokens = tl.load(order + first + tl.minimum(rows, count - 1)) // slots
    own_x = x + tokens[:, None].to(tl.int64) * x_row  # [ROWS, 1]
    gates = expert * 2 * N + tile * OUTPUTS  # first weight row
    gate_rows = _weight_rows(weight, gates, N - tile * OUTPUTS, K, OUTPUTS, TMA)
    up_rows = _weight_rows(weight, gates + N, N - tile * OUTPUTS, K, OUTPUTS, TMA)
    gate = _zeros(ROWS, OUTPUTS, SWAPPED)
    up = _zeros(ROWS, OUTPUTS, SWAPPED)
    for k in range(0, K, INPUTS):
        inputs = k + tl.arange(0, INPUTS)[None, :]
        here = _load(own_x, inputs, K, INPUTS, "")  # [ROWS, INPUTS]
        weights = _load_weights(weight, gate_rows, gates, k, K, OUTPUTS, INPUTS, SWAPPED, TMA)
        by = _row_scales(x_scales, tokens, k, group_row)
        gate = _dot(here, by, weights, gate, scales, gates, k, K, BLOCK, SWAPPED, PRECISION)
        weights = _load_weights(weight, up_rows, gates + N, k, K, OUTPUTS, INPUTS, SWAPPED, TMA)
        up = _dot(here, by, weights, up, scales, gates + N, k, K, BLOCK, SWAPPED, PRECISION)
    gate = _scale_rows(gate, scales, gates, N - tile * OUTPUTS, BLOCK, OUTPUTS, SWAPPED)
    up = _scale_rows(up, scales, gates + N, N - tile * OUTPUTS, BLOCK, OUTPUTS, SWAPPED)
    rows_out = gated(gate, up, GELU)
    if SWAPPED:
        rows_out = tl.trans(rows_out)
    columns = tile * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    target = out + (first + rows)[:, None].to(tl.int64) * N + columns
    tl.store(target, rows_out.to(out.dtype.element_ty), mask=(rows < count)[:, None] & (columns < N))


@triton.jit(do_not_specialize=["capacity"])
def _down_kernel(
    wide: tl.tensor, weight: tl.tensor, scales: tl.tensor, wide_scales: tl.tensor, order: tl.tensor, blocks: tl.tensor,
    shares: tl.tensor, out: tl.tensor, N: tl.tensor, capacity: tl.tensor, group_row: tl.tensor,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PREFETCH: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, SWAPPED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    block, tile = block_and_tile(N, OUTPUTS, GROUP)
    count = tl.load(blocks + 2 * capacity + block, mask=block < capacity, other=0)
    expert = tl.load(blocks + block, mask=block < capacity, other=0)
    first = tl.load(blocks + capacity + block, mask=block < capacity, other=0)
    weight_row = expert * N + tile * OUTPUTS  # first weight row
    weight_rows = _weight_rows(weight, weight_row, N - tile * OUTPUTS, K, OUTPUTS, TMA)
    if PREFETCH > 0 and count > 0:
        of_line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements
        prefetch_l2(weight_rows + tl.arange(0, PREFETCH)[None, :] * of_line)
    pdl_wait_then_release(PDL)
    if count == 0:
        return
    rows = tl.arange(0, ROWS)
    acc = _zeros(ROWS, OUTPUTS, SWAPPED)
    for k in range(0, K, INPUTS):
        inputs = k + tl.arange(0, INPUTS)[None, :]
        if TMA:
            here = wide.load([first, k])
        else:
            own_wide = wide + (first + tl.minimum(rows, count - 1))[:, None].to(tl.int64) * K
            here = _load(own_wide, inputs, K, INPUTS, "")
        weights = _load_weights(weight, weight_rows, weight_row, k, K, OUTPUTS, INPUTS, SWAPPED, TMA)
        by = _row_scales(wide_scales, first + tl.minimum(rows, count - 1), k, group_row)
        acc = _dot(here, by, weights, acc, scales, weight_row, k, K, BLOCK, SWAPPED, PRECISION)
    acc = _scale_rows(acc, scales, weight_row, N - tile * OUTPUTS, BLOCK, OUTPUTS, SWAPPED)
    if SWAPPED:
        acc = tl.trans(acc)
    pair = tl.load(order + first + rows, mask=rows < count, other=0)
    acc *= tl.load(shares + pair)[:, None]
    columns = tile * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    target = out + pair[:, None].to(tl.int64) * N + columns
    tl.store(target, acc.to(out.dtype.element_ty), mask=(rows < count)[:, None] & (columns < N))


@triton.jit
def block_and_tile(N: tl.tensor, OUTPUTS: tl.constexpr, GROUP: tl.constexpr) -> tl.tuple:
    """Programs of GROUP blocks follow each other, tile by tile."""
    program = tl.program_id(0)
    tiles = tl.cdiv(N, OUTPUTS)
    group = program // (GROUP * tiles)
    inside = program - group * GROUP * tiles
    return group * GROUP + inside % GROUP, inside // GROUP


@triton.jit
def _zeros(ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SWAPPED: tl.constexpr) -> tl.tensor:
    return tl.zeros([OUTPUTS, ROWS] if SWAPPED else [ROWS, OUTPUTS], tl.float32)


@triton.jit
def _weight_rows(
    weight: tl.tensor, first: tl.tensor, count: tl.tensor, K: tl.constexpr, OUTPUTS: tl.constexpr, TMA: tl.constexpr
) -> tl.tensor:
    """Pointers to rows from `first` on, [OUTPUTS, 1]; after the `count` ones of the expert, the last one again."""
    rows = first  # a descriptor needs no pointers
    if not TMA:
        rows = first + tl.minimum(tl.arange(0, OUTPUTS), count - 1)
        rows = weight + rows[:, None].to(tl.int64) * K
    return rows


@triton.jit
def _load_weights(
    weight: tl.tensor, rows: tl.tensor, first: tl.tensor, k: tl.tensor, K: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, SWAPPED: tl.constexpr, TMA: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[OUTPUTS, INPUTS]. Few rows: weights are read once, so they are evicted first."""
    if TMA:
        weights = weight.load([first, k])
    else:
        weights = _load(rows, k + tl.arange(0, INPUTS)[None, :], K, INPUTS, "evict_first" if SWAPPED else "")
    return weights


@triton.jit
def _load(rows: tl.tensor, inputs: tl.tensor, K: tl.constexpr, INPUTS: tl.constexpr, POLICY: tl.constexpr) -> tl.tensor:
    """Columns `inputs` of rows; zero after K."""
    if K % INPUTS == 0:
        columns = tl.load(rows + inputs, eviction_policy=POLICY)
    else:
        columns = tl.load(rows + inputs, mask=inputs < K, other=0.0, eviction_policy=POLICY)
    return columns


@triton.jit
def _row_scales(scales: tl.tensor, rows: tl.tensor, k: tl.tensor, group_row: tl.tensor) -> tl.tensor:
    """[ROWS, 1], of the group of 128 columns that k is in; nothing of rows that are not float8."""
    group = None
    if scales is not None:
        group = tl.load(scales + k // 128 * tl.cast(group_row, tl.int64) + rows)[:, None]
    return group


@triton.jit
def _dot(
    rows: tl.tensor, by: tl.tensor, weights: tl.tensor, acc: tl.tensor, scales: tl.tensor, first: tl.tensor,
    k: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Weight rows from `first` on and columns from k on have one scale, if weights have scales for blocks.

    With few rows it multiplies the sums, with many the weights: a second set of large sums would not fit. Rows in
    float8 need one: their scales `by` multiply sums.
    """
    if by is not None:
        if BLOCK > 0:
            by = by * tl.load(scales + (first // BLOCK).to(tl.int64) * (K // BLOCK) + k // BLOCK)
        acc += _mma(rows, weights, tl.zeros_like(acc), SWAPPED, PRECISION) * by
    elif BLOCK == 0:
        acc = _mma(rows, convert_weights(weights, rows.dtype), acc, SWAPPED, PRECISION)
    else:
        scale = tl.load(scales + (first // BLOCK).to(tl.int64) * (K // BLOCK) + k // BLOCK)
        if SWAPPED:
            weights = convert_weights(weights, rows.dtype)
            acc += _mma(rows, weights, tl.zeros_like(acc), SWAPPED, PRECISION) * scale
        else:
            weights = (weights.to(tl.float32) * scale).to(rows.dtype)
            acc = _mma(rows, weights, acc, SWAPPED, PRECISION)
    return acc


@triton.jit
def _mma(
    rows: tl.tensor, weights: tl.tensor, acc: tl.tensor, SWAPPED: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    if SWAPPED:
        acc = tl.dot(weights, tl.trans(rows), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(rows, tl.trans(weights), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _scale_rows(
    acc: tl.tensor, scales: tl.tensor, first: tl.tensor, count: tl.tensor,
    BLOCK: tl.constexpr, OUTPUTS: tl.constexpr, SWAPPED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Times the scales of weight rows from `first` on, if there are such."""
    if scales is not None and BLOCK == 0:
        row_scales = tl.load(scales + first + tl.minimum(tl.arange(0, OUTPUTS), count - 1))
        acc *= row_scales[:, None] if SWAPPED else row_scales[None, :]
    return acc
