"""Split-K GEMMs of up to 64 rows with both operands in float8, for Hopper GPUs, in Gluon.

As `hopper_split_k`, which converts a float8 weight in registers; here tensor cores take both sides as they are.

    x        `Fp8Rows`: float8 [M, K], and a scale for a group of 128 or 64 columns
    weight   float8 [N, K], and scales float32 [N / 128, K / 128], or [N, 1]

A stage has 128 columns. The sum over a group is scaled and added up in float32: tensor cores keep some 14 bits of a
long sum of float8 MMAs. `ops.reference` has the same functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.gemm.hopper_split_k import PipelineConfig
from saccade.kernels.gemm.hopper_split_k_parts import (
    Ring,
    Sizes,
    block_scales,
    box_of,
    new_ring,
    produce,
    scale_rows,
    store_partial,
)
from saccade.kernels.gemm.skinny import choose_splits
from saccade.kernels.launch import gluon_compat as hopper
from saccade.kernels.launch.gluon_compat import gl, gluon, mbarrier, tma
from saccade.kernels.launch.hopper_pipeline import next_stage
from saccade.kernels.launch.varlen_tiles import power_of_two
from saccade.kernels.ops.quantize_rows import LARGEST, SMALLEST_SCALE, Fp8Rows
from saccade.kernels.ops.scaled_weight import block_of

MAX_ROWS = 64
GATED_GROUP = 64  # columns of a gated result with one scale: a program's
_OUTPUTS = 64  # weight rows of a program, and as many again of `up`
_INPUTS = 128  # columns of a stage
_MAX_STAGES = 4  # more keep the next kernel's programs off an SM
_GATED_RING = 86 << 10  # bytes: an SM has memory for two


def suits(rows: int, outputs: int, inputs: int) -> bool:
    """Whole tiles, also of a gate and `up`, and no more sums than a program has registers for."""
    return rows <= MAX_ROWS and inputs % _INPUTS == 0 and outputs % (2 * _OUTPUTS) == 0


def fills_device(outputs: int) -> bool:
    """Whether there are programs for most SMs without splits."""
    return outputs // _OUTPUTS >= 64


def choose_split_k(outputs: int, inputs: int) -> PipelineConfig:
    """Two programs share an SM: one multiplies while the other waits."""
    splits = choose_splits(outputs, inputs, _OUTPUTS, _INPUTS, per_sm=2)
    return PipelineConfig(min(-(-inputs // (_INPUTS * splits)), _MAX_STAGES), splits)


def choose_gated(rows: int) -> PipelineConfig:
    stage = (2 * _OUTPUTS + power_of_two(rows, minimum=16)) * _INPUTS
    return PipelineConfig(min(_GATED_RING // stage, _MAX_STAGES))


def fp8_split_k_linear(
    x: Fp8Rows, weight: Tensor, scales: Tensor, bias: Tensor | None, config: PipelineConfig
) -> Tensor:
    """x [M, K], weight [N, K] -> float32 [splits, M, N], which add up to x @ weight.T + bias."""
    partials = torch.empty((config.splits, x.rows, len(weight)), dtype=torch.float32, device=weight.device)
    _launch(x, weight, scales, partials, None, bias, config)
    return partials


def fp8_linear_into(x: Fp8Rows, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """The same without splits, in `out` [M, N], which may be columns of a wider tensor."""
    assert out.shape == (x.rows, len(weight)) and out.stride(1) == 1, (out.shape, out.stride())
    _launch(x, weight, scales, out, None, bias, PipelineConfig(_MAX_STAGES))
    return out


def fp8_split_k_gated_linear(x: Fp8Rows, gate_up_weight: Tensor, scales: Tensor, config: PipelineConfig) -> Fp8Rows:
    """x [M, K], weight [2 wide, K], the gate's rows first -> silu(x @ gate.T) * (x @ up.T): [M, wide]."""
    wide = len(gate_up_weight) // 2
    assert wide % _OUTPUTS == 0 and config.splits == 1 and x.group == _INPUTS, (wide, config, x.group)
    values = torch.empty((x.rows, wide), dtype=x.values.dtype, device=x.values.device)
    of_values = torch.empty((wide // GATED_GROUP, x.rows), dtype=torch.float32, device=x.values.device)
    _launch(x, gate_up_weight, scales, values, of_values, None, config)
    return Fp8Rows(values, of_values, x.rows)


def _launch(
    x: Fp8Rows, weight: Tensor, scales: Tensor, out: Tensor, of_out: Tensor | None, bias: Tensor | None,
    config: PipelineConfig,
) -> None:  # fmt: skip
    assert weight.is_contiguous() and scales.is_contiguous() and weight.dtype == x.values.dtype
    rows, gated = power_of_two(x.rows, minimum=16), of_out is not None
    target = box_of(out, rows, GATED_GROUP) if gated else out
    outputs = out.shape[-1]
    sums = rows if gated else rows // 2
    _fp8_split_k_kernel[(outputs // _OUTPUTS, config.splits)](
        box_of(weight, _OUTPUTS, x.group), box_of(x.values, rows, x.group), scales, x.scales, target, of_out,
        bias, x.rows, outputs, x.scales.shape[1], out.stride(-2),
        K=weight.shape[1], BLOCK=block_of(weight, scales), ROWS=rows, OUTPUTS=_OUTPUTS, GROUP=x.group,
        STAGES=config.stages, SPLITS=config.splits, GATED=gated, LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE,
        num_warps=4, maxnreg=96 if sums <= 32 else 128, launch_pdl=True,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "padded", "out_row"])
def _fp8_split_k_kernel(
    weight: tma.tensor_descriptor, x: tma.tensor_descriptor, scales: gl.tensor, x_scales: gl.tensor, out: gl.tensor,
    of_out: gl.tensor, bias: gl.tensor, M: gl.tensor, N: gl.tensor, padded: gl.tensor, out_row: gl.tensor,
    K: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr, GATED: gl.constexpr, LARGEST: gl.constexpr, SMALLEST: gl.constexpr,
) -> None:  # fmt: skip
    STEPS: gl.constexpr = K // 128
    SHARE: gl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    sizes = Sizes(OUTPUTS, ROWS, STAGES, GATED, K, BLOCK, GROUP, 128 // GROUP, GROUP, 128 // GROUP, False)
    ring = new_ring(weight, x, sizes)
    staged = ring.x.index(0)
    if GATED:
        staged = gl.allocate_shared_memory(x.dtype, [ROWS, OUTPUTS], out.layout)
    first = gl.program_id(1) * SHARE
    steps = gl.minimum(SHARE, STEPS - first)  # of this program, 128 columns each
    gl.warp_specialize(
        [
            (_consume, (ring, staged, scales, x_scales, out, of_out, bias, first, steps, M, N, padded, out_row,
                        sizes, LARGEST, SMALLEST)),
            (produce, (ring, weight, x, first, steps, N, sizes)),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def _consume(
    ring: Ring, staged: gl.shared_memory_descriptor, scales: gl.tensor, x_scales: gl.tensor, out: gl.tensor,
    of_out: gl.tensor, bias: gl.tensor, first: gl.tensor, steps: gl.tensor, M: gl.tensor, N: gl.tensor,
    padded: gl.tensor, out_row: gl.tensor, sizes: Sizes, LARGEST: gl.constexpr, SMALLEST: gl.constexpr,
) -> None:  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.ROWS, 32])
    acc = gl.zeros([sizes.OUTPUTS, sizes.ROWS], gl.float32, layout=L)
    up = gl.zeros([sizes.OUTPUTS, sizes.ROWS], gl.float32, layout=L)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    hopper.gdc_wait()  # the previous kernel writes the scales of x
    of_x, of_last = _row_scales(x_scales, first, M, padded, L, sizes)
    of_weight, of_up = block_scales(scales, first, N, sizes)
    for step in range(steps):
        then = first + gl.minimum(step + 1, steps - 1)
        next_x, next_last = _row_scales(x_scales, then, M, padded, L, sizes)
        next_weight, next_up = block_scales(scales, then, N, sizes)
        mbarrier.wait(ring.bars.full(stage), phase)
        acc, up = _multiply(ring, stage, acc, up, of_x, of_last, of_weight, of_up, sizes)
        of_x, of_last, of_weight, of_up = next_x, next_last, next_weight, next_up
        stage, phase = next_stage(stage, phase, sizes.STAGES)
    acc, up = scale_rows(acc, up, scales, N, sizes)
    if sizes.GATED:
        gated = acc / (1.0 + gl.exp(-acc)) * up
        _store_gated(gated, staged, out, of_out, M, LARGEST, SMALLEST)
    else:
        store_partial(acc, out, bias, M, N, out_row, sizes.OUTPUTS)


@gluon.jit
def _row_scales(
    x_scales: gl.tensor, step: gl.tensor, M: gl.tensor, padded: gl.tensor, L: gl.constexpr, sizes: Sizes
) -> gl.tuple:
    """Of the first group of a stage, and of its last."""
    rows = gl.arange(0, sizes.ROWS, layout=gl.SliceLayout(0, L))
    group = x_scales + step * sizes.BOXES * padded + rows
    first = gl.load(group, mask=rows < M, other=0.0)
    last = first
    if sizes.BOXES == 2:
        last = gl.load(group + padded, mask=rows < M, other=0.0)
    return first, last


@gluon.jit
def _multiply(
    ring: Ring, stage: gl.tensor, acc: gl.tensor, up: gl.tensor, of_x: gl.tensor, of_last: gl.tensor,
    of_weight: gl.tensor, of_up: gl.tensor, sizes: Sizes,
) -> gl.tuple:  # fmt: skip
    """acc and up with a stage's columns added; then the stage is free."""
    nothing = gl.zeros_like(acc)
    place = stage * sizes.BOXES
    here = ring.x.index(place).permute((1, 0))
    sums = hopper.warpgroup_mma(ring.gates.index(place), here, nothing, use_acc=False, is_async=True)
    if sizes.GATED:
        more = hopper.warpgroup_mma(ring.ups.index(place), here, nothing, use_acc=False, is_async=True)
        sums, more = hopper.warpgroup_mma_wait(0, deps=(sums, more))
        up += more * (of_x * of_up)[None, :]
    elif sizes.BOXES == 2:
        last = ring.x.index(place + 1).permute((1, 0))
        more = hopper.warpgroup_mma(ring.gates.index(place + 1), last, nothing, use_acc=False, is_async=True)
        sums, more = hopper.warpgroup_mma_wait(0, deps=(sums, more))
        acc += more * (of_last * of_weight)[None, :]
    else:
        sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(ring.bars.free(stage), count=1)
    acc += sums * (of_x * of_weight)[None, :]
    return acc, up


@gluon.jit
def _store_gated(
    gated: gl.tensor, staged: gl.shared_memory_descriptor, out: tma.tensor_descriptor, of_out: gl.tensor,
    M: gl.tensor, LARGEST: gl.constexpr, SMALLEST: gl.constexpr,
) -> None:  # fmt: skip
    """[OUTPUTS, ROWS] to float8, with one scale for a row's outputs here."""
    rows = gl.arange(0, gated.shape[1], layout=gl.SliceLayout(0, gated.type.layout))
    scale = gl.maximum(gl.max(gl.abs(gated), 0) / LARGEST, SMALLEST)
    gl.store(of_out + gl.program_id(0) * M + rows, scale, mask=rows < M)
    staged.permute((1, 0)).store((gated / scale[None, :]).to(staged.dtype))
    hopper.fence_async_shared()
    hopper.tma_store(out, [0, gl.program_id(0) * gated.shape[0]], staged)
    tma.store_wait(0)
