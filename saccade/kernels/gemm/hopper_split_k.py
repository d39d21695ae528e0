"""Split-K GEMMs of up to 128 rows with a large weight for Hopper GPUs, in Gluon. Knows shapes and dtypes, not layers.

    weight [N, K]: program (tile, split) has OUTPUTS rows and a share of the columns, as in `skinny`

    ring of stages, 64 columns each   | W0 .  | W1 .  | W2 .  | ...      before the previous kernel has ended
                                      | W0 x0 | W1 x1 | W2 x2 | ...      after

A weight depends on no kernel, so a program first fills its ring with weights and then waits (PDL). Splits write their
partial sums, float32 [splits, M, N]; the next kernel (norm, attention) adds them up as it reads them, which saves a
reduction. A float8 weight is converted in registers; its scales are as in `skinny`. As there, the GEMM is
out^T = weight x^T. TMA fills rows of x after the last with zeros.
`ops.reference` has the same functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
from saccade.kernels.ops.scaled_weight import block_of

MAX_ROWS = 128
_MAX_RING = 144 << 10  # bytes of a program's ring: an SM has shared memory left for the next kernel's
_FLOAT8_RING = 72 << 10  # of a float8 weight: two programs share an SM
_FLOAT8_GATED_RING = 86 << 10  # with a gate: an SM has memory for two
_OUTPUTS = 64  # weight rows of a program, and as many again of `up`: the least that a WGMMA takes
_INPUTS = 64  # columns of a stage: 128 bytes, the widest swizzle


class PipelineConfig(NamedTuple):
    """The sizes a GEMM is launched with."""

    stages: int
    splits: int = 1  # programs that share the columns of a tile


def suits(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whole tiles, so that none reaches from a gate into `up`; and sizes like those that were measured."""
    return rows <= MAX_ROWS and dtype.itemsize == 2 and inputs % _INPUTS == 0 and outputs % _OUTPUTS == 0


def choose_split_k(rows: int, outputs: int, inputs: int, itemsize: int = 2) -> PipelineConfig:
    """Stages for all weights of a program, if they fit: they are loaded before the previous kernel ends.

    A program with a float8 weight waits for its conversions, so two share an SM.
    """
    is_float8 = itemsize == 1
    splits = choose_splits(outputs, inputs, _OUTPUTS, _INPUTS, per_sm=2 if is_float8 else 1)
    max_stages = (_FLOAT8_RING if is_float8 else _MAX_RING) // _stage_bytes(rows, itemsize * _OUTPUTS)
    return PipelineConfig(min(-(-inputs // (_INPUTS * splits)), max_stages), splits)


def choose_gated(rows: int, itemsize: int = 2) -> PipelineConfig:
    """As many stages as let two programs share an SM: then all of them run at once.

    With fewer, a third fits on some SMs while the kernel before still has others, and all wait for those three.
    """
    if itemsize == 1:
        return PipelineConfig(max(4, _FLOAT8_GATED_RING // _stage_bytes(rows, 2 * _OUTPUTS)))
    if rows <= 32:
        return PipelineConfig(5)
    return PipelineConfig(4 if rows <= 64 else 3)


def _stage_bytes(rows: int, weights: int) -> int:
    """`weights`: bytes of the weight in one column."""
    return (weights + 2 * power_of_two(rows, minimum=16)) * _INPUTS


def split_k_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: PipelineConfig, scales: Tensor | None = None
) -> Tensor:
    """x [M, K], weight [N, K] -> float32 [splits, M, N], which add up to x @ weight.T + bias."""
    partials = torch.empty((config.splits, len(x), len(weight)), dtype=torch.float32, device=x.device)
    _launch(x, weight, scales, partials, bias, config, gated=0)
    return partials


def split_k_gated_linear(
    x: Tensor, gate_up_weight: Tensor, config: PipelineConfig, scales: Tensor | None = None, *, gelu: bool = False
) -> Tensor:
    """x [M, K], weight [2 wide, K], the gate's rows first -> silu(x @ gate.T) * (x @ up.T): [M, wide]; or with GELU."""
    wide = len(gate_up_weight) // 2
    assert wide % _OUTPUTS == 0 and config.splits == 1, (wide, config)
    out = torch.empty((len(x), wide), dtype=x.dtype, device=x.device)
    _launch(x, gate_up_weight, scales, out, None, config, gated=2 if gelu else 1)
    return out


def _launch(
    x: Tensor, weight: Tensor, scales: Tensor | None, out: Tensor, bias: Tensor | None, config: PipelineConfig, *,
    gated: int,
) -> None:  # fmt: skip
    assert weight.is_contiguous() and x.stride(1) == 1 and (scales is not None or x.dtype == weight.dtype)
    assert scales is None or (scales.is_contiguous() and weight.itemsize == 1)
    rows = power_of_two(len(x), minimum=16)
    target = box_of(out, rows, _INPUTS) if gated else out
    outputs = out.shape[-1]
    _split_k_kernel[(-(-outputs // _OUTPUTS), config.splits)](
        box_of(weight, _OUTPUTS, _INPUTS), box_of(x, rows, _INPUTS), scales, target, bias, len(x), outputs,
        K=x.shape[1], BLOCK=block_of(weight, scales), ROWS=rows, OUTPUTS=_OUTPUTS, STAGES=config.stages,
        SPLITS=config.splits, GATED=gated,
        num_warps=4, maxnreg=_registers(rows, gated > 0, weight.itemsize), launch_pdl=True,
    )  # fmt: skip


def _registers(rows: int, gated: bool, itemsize: int) -> int:
    """Per thread, on average: the consumer has the accumulators, the producer next to nothing."""
    sums = rows if gated else rows // 2
    if itemsize == 1:
        return 96 if sums <= 32 else 128
    if sums <= 32:
        return 64
    return 96 if sums <= 64 else 128


@gluon.jit(do_not_specialize=["M"])
def _split_k_kernel(
    weight: tma.tensor_descriptor, x: tma.tensor_descriptor, scales: gl.tensor, out: gl.tensor, bias: gl.tensor,
    M: gl.tensor, N: gl.tensor, K: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr, GATED: gl.constexpr,
) -> None:  # fmt: skip
    STEPS: gl.constexpr = (K + 63) // 64
    SHARE: gl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    sizes = Sizes(OUTPUTS, ROWS, STAGES, GATED, K, BLOCK, 64, 1, 64, 1, False)
    ring = new_ring(weight, x, sizes)
    first = gl.program_id(1) * SHARE
    steps = gl.minimum(SHARE, STEPS - first)  # of this program, 64 columns each
    gl.warp_specialize(
        [
            (_consume, (ring, scales, out, bias, first, steps, M, N, sizes)),
            (produce, (ring, weight, x, first, steps, N, sizes)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _consume(
    ring: Ring, scales: gl.tensor, out: gl.tensor, bias: gl.tensor, first: gl.tensor, steps: gl.tensor,
    M: gl.tensor, N: gl.tensor, sizes: Sizes,
) -> None:  # fmt: skip
    OUTPUTS: gl.constexpr = sizes.OUTPUTS
    GATED: gl.constexpr = sizes.GATED
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.ROWS, 16])
    IS_CONVERTED: gl.constexpr = ring.gates.dtype.primitive_bitwidth == 8
    few = ring.x
    acc = gl.zeros([OUTPUTS, sizes.ROWS], gl.float32, layout=L)
    up = gl.zeros([OUTPUTS, sizes.ROWS], gl.float32, layout=L)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for step in range(steps):
        scale, up_scale = block_scales(scales, first + step, N, sizes)
        mbarrier.wait(ring.bars.full(stage), phase)
        here = few.index(stage).permute((1, 0))
        if IS_CONVERTED:
            acc = _multiply_converted(ring.gates.index(stage), here, acc, scale, sizes)
            if GATED:
                up = _multiply_converted(ring.ups.index(stage), here, up, up_scale, sizes)
        else:
            acc = hopper.warpgroup_mma(ring.gates.index(stage), here, acc, is_async=True)
            if GATED:
                up = hopper.warpgroup_mma(ring.ups.index(stage), here, up, is_async=True)
                acc, up = hopper.warpgroup_mma_wait(0, deps=(acc, up))
            else:
                acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(ring.bars.free(stage), count=1)
        stage, phase = next_stage(stage, phase, sizes.STAGES)
    acc, up = scale_rows(acc, up, scales, N, sizes)
    if GATED:
        inner = acc
        if GATED == 2:  # GELU by tanh: see `ops.gate`
            inner = acc * (1.5957691216057308 + 0.07135481627260025 * acc * acc)
        few.index(0).permute((1, 0)).store((acc / (1.0 + gl.exp(-inner)) * up).to(few.dtype))
        hopper.fence_async_shared()
        hopper.tma_store(out, [0, gl.program_id(0) * OUTPUTS], few.index(0))
        tma.store_wait(0)
    else:
        store_partial(acc, out, bias, M, N, N, OUTPUTS)


@gluon.jit
def _multiply_converted(
    weights: gl.shared_memory_descriptor, here: gl.shared_memory_descriptor, acc: gl.tensor, scale: gl.tensor,
    sizes: Sizes,
) -> gl.tensor:  # fmt: skip
    """acc + float8 weights here, times the scale of their block."""
    L: gl.constexpr = acc.type.layout
    # Through float32: a GPU has a slow instruction from float8 to bfloat16, and fast ones for both steps.
    converted = weights.load(gl.DotOperandLayout(0, L, 2)).to(gl.float32).to(here.dtype)
    if sizes.BLOCK > 0:
        sums = hopper.warpgroup_mma(converted, here, gl.zeros_like(acc), use_acc=False, is_async=True)
        acc += hopper.warpgroup_mma_wait(0, deps=(sums,)) * scale
    else:
        acc = hopper.warpgroup_mma(converted, here, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    return acc
