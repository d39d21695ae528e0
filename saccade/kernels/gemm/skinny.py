"""Skinny GEMMs: a few rows by a large weight, as in a decode step. Knows shapes and dtypes, not layers.

Such a GEMM is memory-bound. One row runs on CUDA cores, up to 32 on tensor cores, and more, where cuBLAS is better,
through `F.linear`. `choose` decides from the shape alone, so a CUDA graph can hold the launches, and nothing is tuned
while serving.

    weight [N, K]: program (tile, split) has OUTPUTS rows and a share of the columns, and reads INPUTS at a time

                   |<--------------------- K --------------------->|
        tile 0     | split 0 | INPUTS | INPUTS | split 1 | ...     |   out[:, 0 .. OUTPUTS - 1]
        tile 1     |         |        |        |         |         |   out[:, OUTPUTS .. ]

    partials [tiles, SPLITS, OUTPUTS, ROWS]: split-K partials. The last split to arrive at the counter of its tile adds
    them up in a fixed order, writes the result and resets the counter.

The GEMM is out^T = weight x^T: the weight's many rows are the wide side of an MMA, those of x the narrow one. Rows
after the last of either are the last one again: loads need no masks, and their results are dropped.

With a norm, x is multiplied by the norm's weight as it is loaded, and its squares are summed. The divisor is common to
a row, so it is applied last: rms_norm(x) W^T = ((x * g) W^T) * rsqrt(mean(x^2) + eps).

A float8 weight has `scales`: float32 [N / 128, K / 128], one for each block, or [N, 1], one for each row. It is
converted to the type of x as it is loaded. A program's rows lie within one block, so it has one scale for 128 columns;
scales of rows are applied last.

With PDL, a program starts before the previous kernel has ended (see `pdl`). Until its wait it may touch nothing that
others write; weights are constant, so it prefetches the first ones, PREFETCH cache lines of each row, into L2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.gemm.fp8_linear import fp8_linear
from saccade.kernels.gemm.skinny_parts import (
    finish_tile,
    prefetch_weights,
    scale_and_gate,
    scale_rows,
    store_outputs,
)
from saccade.kernels.gemm.skinny_scaled import scaled_vector_kernel
from saccade.kernels.launch.device import has_async_mma, precision_of, shared_memory
from saccade.kernels.launch.pdl import pdl_options, pdl_wait_then_release, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two
from saccade.kernels.ops.load_columns import load_columns
from saccade.kernels.ops.norm import silu_and_mul
from saccade.kernels.ops.scaled_weight import BLOCK, block_of, convert_weights

MAX_ROWS = 32  # that `choose` has launches for
MAX_NORMED_ROWS = 16  # beyond, norming x again in every program costs more than a launch of its own
MAX_SCALED_ROWS = 64  # of a float8 weight
MAX_ELEMENTS = 32 << 20  # of a weight that several rows are multiplied with
_MANY_OUTPUTS = 1 << 16
_PROGRAMS = 132  # that a launch should have at least: one for each SM of an H100 or H200
MAX_PROGRAMS = 4 * _PROGRAMS  # of a launch with splits: the workspace is for these
_LINE = 128  # bytes
_SCRATCH = 2 << 10  # bytes of shared memory beside the stages of the pipeline


class Config(NamedTuple):
    """The sizes a GEMM is launched with."""

    rows: int  # of x, at most: 1 for CUDA cores, else a power of two from 16 for tensor cores
    outputs: int  # weight rows of a program; of the gate and as many of `up` where there is one
    inputs: int  # columns it reads at a time
    splits: int = 1  # programs that share the columns of a tile
    warps: int = 4
    stages: int = 4  # of the software pipeline
    pdl: bool = True  # start while the previous kernel still runs, where the device can
    prefetch: int = 0  # cache lines of each weight row that are prefetched then


class SplitWorkspace(NamedTuple):
    """Scratch memory of GEMMs. One is enough for all layers; two CUDA streams need two."""

    partials: Tensor  # float32 [programs * outputs * rows]: sums over a split's columns
    squares: Tensor  # float32 [programs * rows]: sums of squares, for the norm
    counters: Tensor  # int32 [programs]: splits that have arrived at a tile; zero between launches
    unpacked: Tensor | None = None  # [elements]: an INT4 weight for many rows

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device) -> SplitWorkspace:
        """For every launch that `choose` gives for up to `max_rows` rows."""
        rows = power_of_two(max_rows, minimum=16)
        return cls(
            torch.empty(MAX_PROGRAMS * _split_outputs(rows) * rows, dtype=torch.float32, device=device),
            torch.empty(MAX_PROGRAMS * rows, dtype=torch.float32, device=device),
            torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device),
        )


def skinny_linear(
    x: Tensor,  # [M, K], the last dimension dense
    weight: Tensor,  # [N, K], contiguous
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [M, N], contiguous
    *,
    scales: Tensor | None = None,  # of a float8 weight
    workspace: SplitWorkspace | None = None,
    config: Config | None = None,
    out: Tensor | None = None,  # [M, N], the last dimension dense
) -> Tensor:
    """x @ weight.T + bias + residual: [M, N], added up in float32 and rounded once to the type of `out`, or of x."""
    config = config or choose(len(x), weight.shape[0], weight.shape[1], x.dtype, scaled=scales is not None)
    if config is None:
        rows = _library_linear(x, weight, scales, bias, out)
        return rows if residual is None else rows.add_(residual)
    return _launch(_Gemm(x, weight, bias, residual, scales=scales), config, workspace, out)


def norm_linear(
    x: Tensor,  # [M, K]
    norm_weight: Tensor,  # [K]; may be float32
    eps: float,
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    workspace: SplitWorkspace | None = None,
    config: Config | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """rms_norm(x) @ weight.T + bias: [M, N]."""
    config = config or choose(len(x), weight.shape[0], weight.shape[1], x.dtype, scaled=scales is not None)
    if config is None or not norms(config, x.dtype):
        normed = _normed(x, norm_weight, eps)
        return skinny_linear(normed, weight, bias, scales=scales, workspace=workspace, config=config, out=out)
    return _launch(_Gemm(x, weight, bias, None, norm_weight, eps, scales=scales), config, workspace, out)


def gated_linear(
    x: Tensor, gate_up_weight: Tensor, *,
    scales: Tensor | None = None, config: Config | None = None, gelu: bool = False,
) -> Tensor:  # fmt: skip
    """x [M, K], weight [2 wide, K], the gate's rows first -> silu(x @ gate.T) * (x @ up.T): [M, wide]; or with GELU."""
    wide, inputs = len(gate_up_weight) // 2, x.shape[1]
    config = config or choose(len(x), wide, inputs, x.dtype, gated=True, scaled=scales is not None)
    if config is None:
        return silu_and_mul(_library_linear(x, gate_up_weight, scales, None, None), gelu=gelu)
    return _launch(_Gemm(x, gate_up_weight, gated=2 if gelu else 1, scales=scales), config, None, None)


def norm_gated_linear(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor, *,
    scales: Tensor | None = None, config: Config | None = None,
) -> Tensor:  # fmt: skip
    """`gated_linear` of rms_norm(x)."""
    wide, inputs = len(gate_up_weight) // 2, x.shape[1]
    config = config or choose(len(x), wide, inputs, x.dtype, gated=True, scaled=scales is not None)
    if config is None or not norms(config, x.dtype):
        return gated_linear(_normed(x, norm_weight, eps), gate_up_weight, scales=scales, config=config)
    gemm = _Gemm(x, gate_up_weight, None, None, norm_weight, eps, gated=1, scales=scales)
    return _launch(gemm, config, None, None)


def choose(m: int, n: int, k: int, dtype: torch.dtype, *, gated: bool = False, scaled: bool = False) -> Config | None:
    """The launch of m rows by a weight [n, k], or [2 n, k] if gated; None where cuBLAS is as good.

    cuBLAS has the better main loop, ours has fewer launches and starts earlier: several rows are ours where a weight is
    read in a few microseconds, one row always is. Columns are split among programs until the device is full.
    """
    if scaled:
        return _choose_scaled(m, n, k, gated)
    if m > MAX_ROWS or k % 16:  # weight rows that do not begin at 32 bytes have no vector loads
        return None
    if dtype == torch.float32:  # only for comparisons
        return None
    if m == 1:
        return _choose_vector(n, k, gated)
    if n * k * (2 if gated else 1) > MAX_ELEMENTS:
        return None
    return _choose_few(n, k, gated) if m <= MAX_NORMED_ROWS else _choose_tiles(n, k, gated)


def _choose_vector(n: int, k: int, gated: bool) -> Config:
    """Long rows need a pipeline; with short ones, many programs hide latency as well without."""
    if gated:
        return Config(rows=1, outputs=4, inputs=512, pdl=False)
    if k > 4096:
        return Config(rows=1, outputs=2, inputs=1024, prefetch=8)
    return Config(rows=1, outputs=4, inputs=512, stages=1 if k <= 2048 or n >= _MANY_OUTPUTS else 4)


def _choose_few(n: int, k: int, gated: bool) -> Config:
    if gated:
        return Config(rows=16, outputs=64, inputs=64, stages=5, pdl=False)
    return Config(rows=16, outputs=64, inputs=64, splits=choose_splits(n, k, 64, 64), stages=5)


def _choose_tiles(n: int, k: int, gated: bool) -> Config:
    if gated:
        return Config(rows=32, outputs=64, inputs=64, stages=5, pdl=False)
    splits = choose_splits(n, k, 64, 128)
    return Config(rows=32, outputs=64, inputs=128, splits=splits, stages=7 if k > 4096 else 4)


def _choose_scaled(m: int, n: int, k: int, gated: bool) -> Config | None:
    """Of a float8 weight. cuBLAS has no GEMM with x in more bits, so ours take every weight that few rows read."""
    if m > MAX_SCALED_ROWS or k % 128:
        return None
    if m == 1:
        return _choose_scaled_vector(k, gated)
    rows = power_of_two(m, minimum=16)
    if gated:
        return Config(rows=rows, outputs=64, inputs=128, stages=4, pdl=False)
    return Config(rows=rows, outputs=64, inputs=128, splits=choose_splits(n, k, 64, 128), stages=4)


def _choose_scaled_vector(k: int, gated: bool) -> Config:
    if gated:
        return Config(rows=1, outputs=4, inputs=512, warps=1, stages=3, pdl=False)
    if k > 8192:
        return Config(rows=1, outputs=8, inputs=1024, warps=4, stages=3)
    return Config(rows=1, outputs=8, inputs=512, warps=1, stages=3)


def choose_splits(n: int, k: int, outputs: int, inputs: int, per_sm: int = 1) -> int:
    """As many as run at once, none without columns."""
    tiles, steps = triton.cdiv(n, outputs), triton.cdiv(k, inputs)
    splits = max(1, min(per_sm * _PROGRAMS // tiles, steps))
    return int(triton.cdiv(steps, triton.cdiv(steps, splits)))


def norms(config: Config, dtype: torch.dtype) -> bool:
    """Whether a launch can norm its rows. Tensor cores get x before it is divided: float16 may overflow."""
    return config.rows == 1 or (config.rows <= MAX_NORMED_ROWS and dtype != torch.float16)


def _normed(x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    if norm_weight.dtype == x.dtype:
        return F.rms_norm(x, norm_weight.shape, norm_weight, eps)
    return F.rms_norm(x.float(), norm_weight.shape, norm_weight.float(), eps).to(x.dtype)


def _split_outputs(rows: int) -> int:
    """The most weight rows of a program in a launch with splits."""
    return 128 if rows >= 64 else 64


def _library_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    return library_linear(x, weight, bias, out) if scales is None else fp8_linear(x, weight, scales, bias, out)


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """By cuBLAS, for any number of rows."""
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


class _Gemm(NamedTuple):
    x: Tensor  # [M, K]
    weight: Tensor  # [N, K], or [2 N, K] if gated
    bias: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None  # norm x first
    eps: float = 0.0
    gated: int = 0  # 1: by SiLU, 2: by GELU
    scales: Tensor | None = None  # of a float8 weight

    @property
    def block(self) -> int:
        """Rows and columns with one scale; 0: each row has one, or none has."""
        return block_of(self.weight, self.scales)


def _launch(gemm: _Gemm, config: Config, workspace: SplitWorkspace | None, out: Tensor | None) -> Tensor:
    x = gemm.x
    _check(gemm, config)
    outputs = len(gemm.weight) // 2 if gemm.gated else len(gemm.weight)
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device) if out is None else out
    assert out.shape == (len(x), outputs) and out.stride(1) == 1
    if config.rows == 1:
        _launch_vector(gemm, config, out)
    else:
        _launch_tiles(gemm, config, workspace, out)
    return out


def _launch_vector(gemm: _Gemm, config: Config, out: Tensor) -> None:
    inputs = gemm.x.shape[1]
    pdl = config.pdl and supports_pdl(gemm.x)
    common = (gemm.bias, gemm.residual, gemm.norm_weight, out, gemm.eps, out.shape[1])
    sizes = {
        "K": inputs, "OUTPUTS": config.outputs, "INPUTS": config.inputs, "STAGES": config.stages, "GATED": gemm.gated,
        "PDL": pdl, "num_warps": config.warps, "num_stages": config.stages, **pdl_options(pdl),
    }  # fmt: skip
    grid = (triton.cdiv(out.shape[1], config.outputs),)
    if gemm.scales is not None:
        scaled_vector_kernel[grid](gemm.x, gemm.weight, gemm.scales, *common, BLOCK=gemm.block, **sizes)
        return
    lines = prefetched_lines(config, inputs, gemm.weight) if pdl else 0
    _vector_kernel[grid](gemm.x, gemm.weight, *common, PREFETCH=lines, **sizes)


def _launch_tiles(gemm: _Gemm, config: Config, workspace: SplitWorkspace | None, out: Tensor) -> None:
    rows, inputs = gemm.x.shape
    outputs = out.shape[1]
    tiles = triton.cdiv(outputs, config.outputs)
    splits = config.splits
    scratch = checked_workspace(workspace, config, tiles)[:3] if splits > 1 else (None, None, None)
    share = triton.cdiv(triton.cdiv(inputs, config.inputs), splits) * config.inputs
    pdl = config.pdl and supports_pdl(gemm.x)
    _tile_kernel[(tiles, splits)](
        gemm.x, gemm.weight, gemm.scales, gemm.bias, gemm.residual, gemm.norm_weight, out, *scratch, gemm.eps, rows,
        outputs, gemm.x.stride(0), out.stride(0),
        K=inputs, BLOCK=gemm.block, ROWS=config.rows, OUTPUTS=config.outputs, INPUTS=config.inputs, SPLITS=splits,
        GATED=gemm.gated, PRECISION=precision_of(gemm.x), PDL=pdl,
        PREFETCH=prefetched_lines(config, min(share, inputs), gemm.weight) if pdl else 0,
        num_warps=config.warps, num_stages=_fitting_stages(config, gemm), **pdl_options(pdl),
    )  # fmt: skip


def _fitting_stages(config: Config, gemm: _Gemm) -> int:
    """The stages of a config, or as many as a program has shared memory for."""
    device = gemm.x.device
    weights = (2 if gemm.gated else 1) * config.outputs * gemm.weight.element_size()
    buffer = (weights + config.rows * gemm.x.element_size()) * config.inputs
    buffers = (shared_memory(device) - _SCRATCH) // buffer
    return max(1, min(config.stages, buffers if has_async_mma(device) else buffers + 1))


def prefetched_lines(config: Config, columns: int, weight: Tensor) -> int:
    """Cache lines: a power of two, within a program's columns."""
    lines = min(config.prefetch, max(1, columns * weight.element_size() // _LINE))
    return 1 << (lines.bit_length() - 1) if lines else 0


def checked_workspace(workspace: SplitWorkspace | None, config: Config, tiles: int) -> SplitWorkspace:
    programs = tiles * config.splits
    floats = programs * config.outputs * config.rows
    if workspace is None:
        raise ValueError(f"{config.splits} splits of {tiles} tiles need a workspace: pass SplitWorkspace.allocate(...)")
    space = workspace.partials.numel()
    if floats > space or programs * config.rows > workspace.squares.numel() or tiles > workspace.counters.numel():
        raise ValueError(
            f"{config.splits} splits of {tiles} tiles need {floats} floats and {tiles} counters of workspace; there are"
            f" {space} and {workspace.counters.numel()}: allocate it for more rows, or split less"
        )
    return workspace


def _check(gemm: _Gemm, config: Config) -> None:
    x, weight = gemm.x, gemm.weight
    if len(x) > config.rows:
        raise ValueError(f"{len(x)} rows do not fit a launch for {config.rows}; choose a config for more rows")
    if gemm.gated and config.splits > 1:
        raise ValueError(f"a gated GEMM cannot be split, and {config.splits} splits were asked for; use splits=1")
    if gemm.scales is None:
        assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    else:
        _check_scales(gemm, config)
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.stride(1) == 1 and weight.is_contiguous()
    assert gemm.residual is None or gemm.residual.is_contiguous()
    assert gemm.norm_weight is None or norms(config, x.dtype), f"{config} cannot norm {x.dtype}"


def _check_scales(gemm: _Gemm, config: Config) -> None:
    """A program's rows, of the gate and of `up`, are in one block, and so are the columns of a step."""
    assert gemm.scales is not None and gemm.scales.is_contiguous() and gemm.scales.dtype == torch.float32
    rows, inputs = gemm.weight.shape
    if gemm.block:
        assert gemm.scales.shape == (rows // BLOCK, inputs // BLOCK), (gemm.scales.shape, gemm.weight.shape)
        assert rows % (2 * BLOCK if gemm.gated else BLOCK) == 0 and BLOCK % config.outputs == 0
        assert config.rows == 1 or BLOCK % config.inputs == 0
    else:
        assert gemm.scales.shape == (rows, 1), (gemm.scales.shape, gemm.weight.shape)


@triton.jit
def _vector_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, residual: tl.tensor, norm: tl.tensor, out: tl.tensor,
    eps: tl.tensor, N: tl.tensor, K: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
) -> None:  # fmt: skip
    """One row of x, on CUDA cores: each thread multiplies the columns it loads; one reduction at the end."""
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    weight_rows = weight + tl.minimum(columns, N - 1)[:, None].to(tl.int64) * K  # [OUTPUTS, 1]
    to_up = tl.cast(N, tl.int64) * K  # from a row of the gate to its row of `up`
    prefetch_weights(weight_rows, to_up, GATED, PREFETCH)
    pdl_wait_then_release(PDL)
    acc = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    squares = tl.zeros([1, INPUTS], tl.float32)
    MASKED: tl.constexpr = K % INPUTS != 0
    for first in tl.range(0, K, INPUTS, num_stages=STAGES):
        inputs = first + tl.arange(0, INPUTS)[None, :]
        here = load_columns(x, inputs, K, MASKED, "").to(tl.float32)  # [1, INPUTS]
        if norm is not None:
            squares += here * here
            here *= load_columns(norm, inputs, K, MASKED, "").to(tl.float32)
        acc += load_columns(weight_rows, inputs, K, MASKED, "evict_first").to(tl.float32) * here
        if GATED:
            acc_up += load_columns(weight_rows + to_up, inputs, K, MASKED, "evict_first").to(tl.float32) * here
    total = tl.sum(squares, 1)  # [1]
    sums = scale_and_gate(tl.sum(acc, 1)[:, None], tl.sum(acc_up, 1)[:, None], total, norm, eps, K, GATED)
    store_outputs(sums, bias, residual, out, tl.arange(0, 1), columns, 1, N, N)


@triton.jit(do_not_specialize=["M"])
def _tile_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor, residual: tl.tensor, norm: tl.tensor,
    out: tl.tensor, partials: tl.tensor, squares: tl.tensor, counters: tl.tensor,
    eps: tl.tensor, M: tl.tensor, N: tl.tensor, x_row: tl.tensor, out_row: tl.tensor,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SPLITS: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
) -> None:  # fmt: skip
    """Up to ROWS rows of x, on tensor cores."""
    tile, split = tl.program_id(0), tl.program_id(1)
    SHARE: tl.constexpr = ((K + INPUTS - 1) // INPUTS + SPLITS - 1) // SPLITS * INPUTS  # columns of a split
    columns, rows = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    weight_rows = weight + tl.minimum(columns, N - 1)[:, None].to(tl.int64) * K  # [OUTPUTS, 1]
    to_up = tl.cast(N, tl.int64) * K  # from a row of the gate to its row of `up`
    prefetch_weights(weight_rows + split * SHARE, to_up, GATED, PREFETCH)
    pdl_wait_then_release(PDL)
    few = x + tl.minimum(rows, M - 1)[:, None] * x_row  # [ROWS, 1]
    blocks = scales
    if BLOCK > 0:
        blocks = scales + tile * OUTPUTS // BLOCK * (K // BLOCK)
    acc, acc_up, total = _multiply(
        few, weight_rows, weight_rows + to_up, norm, split * SHARE, blocks, N,
        SHARE, K, BLOCK, ROWS, OUTPUTS, INPUTS, SHARE * SPLITS != K, GATED, PRECISION,
    )  # fmt: skip
    acc, acc_up = scale_rows(acc, acc_up, scales, columns, N, BLOCK, GATED)
    finish_tile(
        acc, acc_up, total, bias, residual, norm, out, partials, squares, counters, eps, rows, columns, M, N, out_row,
        K, ROWS, OUTPUTS, SPLITS, GATED,
    )  # fmt: skip


@triton.jit
def _multiply(
    few: tl.tensor, gate: tl.tensor, up: tl.tensor, norm: tl.tensor, start: tl.tensor, blocks: tl.tensor, N: tl.tensor,
    SHARE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, MASKED: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The GEMM over the columns from `start` on [OUTPUTS, ROWS], that with `up`, and sums of x's squares [ROWS]."""
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    squares = tl.zeros([ROWS, INPUTS], tl.float32)  # by thread; one reduction at the end
    for first in range(0, SHARE, INPUTS):
        inputs = start + first + tl.arange(0, INPUTS)[None, :]
        here = load_columns(few, inputs, K, MASKED, "")  # [ROWS, INPUTS]
        if norm is not None:
            exact = here.to(tl.float32)
            squares += exact * exact
            here = (exact * load_columns(norm, inputs, K, MASKED, "").to(tl.float32)).to(here.dtype)
        weights = load_columns(gate, inputs, K, MASKED, "evict_first")  # [OUTPUTS, INPUTS]
        acc = _dot(weights, here, acc, blocks, start + first, BLOCK, PRECISION)
        if GATED:
            weights = load_columns(up, inputs, K, MASKED, "evict_first")
            of_up = blocks
            if BLOCK > 0:
                of_up = blocks + N // BLOCK * (K // BLOCK)
            acc_up = _dot(weights, here, acc_up, of_up, start + first, BLOCK, PRECISION)
    return acc, acc_up, tl.sum(squares, 1)


@triton.jit
def _dot(
    weights: tl.tensor, here: tl.tensor, acc: tl.tensor, blocks: tl.tensor, first: tl.tensor,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """acc + weights here^T. `blocks`: the scales of these rows; columns from `first` on have one."""
    weights = convert_weights(weights, here.dtype)
    if BLOCK > 0:
        acc += tl.dot(weights, tl.trans(here), input_precision=PRECISION) * tl.load(blocks + first // BLOCK)
    else:
        acc = tl.dot(weights, tl.trans(here), acc, input_precision=PRECISION)
    return acc
