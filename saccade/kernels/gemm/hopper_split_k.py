"""Products of up to 128 rows with a large weight for Hopper GPUs, in Gluon. Knows shapes and dtypes, not layers.

    weight [N, K]: program (tile, split) owns OUTPUTS rows and a share of the columns, as in `skinny_kernels`

    ring of stages, 64 columns each   | W0 .  | W1 .  | W2 .  | ...      before the launch ahead has ended
                                      | W0 x0 | W1 x1 | W2 x2 | ...      after

A weight depends on no launch, so a program fills its ring with weights first and waits for its turn then; by that time
much of what it has to read is there. Splits leave their sums as they are, float32 [splits, M, N]: whoever reads them
(the norm, attention) adds them up on the way, which saves the programs a meeting. As in `skinny_kernels`, the product
is out^T = weight x^T. Rows of x beyond the last are copied as zeros. `reference` has the same functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saccade.kernels.gemm.skinny import choose_splits
from saccade.kernels.launch.tiling import power_of_two

MAX_ROWS = 128
_RING = 144 << 10  # bytes of a program's ring at most: the launch behind finds some room beside it
_OUTPUTS = 64  # weight rows of a program, and as many again of `up`: the least that four warps multiply
_INPUTS = 64  # columns of a stage: 128 bytes, the widest that copies swizzle
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name until Triton 3.7
_write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # the same


class PipelineConfig(NamedTuple):
    """The sizes a product is launched with."""

    stages: int
    splits: int = 1  # programs that share the columns of a tile


def suits(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whole tiles: none reaches from a gate into `up`, and sizes like those that were measured."""
    return rows <= MAX_ROWS and dtype.itemsize == 2 and inputs % _INPUTS == 0 and outputs % _OUTPUTS == 0


def choose_parts(rows: int, outputs: int, inputs: int) -> PipelineConfig:
    """All weights of a program that has few wait in its ring before its turn."""
    splits = choose_splits(outputs, inputs, _OUTPUTS, _INPUTS)
    stage = (power_of_two(rows, minimum=16) + _OUTPUTS) * 2 * _INPUTS  # bytes
    return PipelineConfig(min(-(-inputs // (_INPUTS * splits)), _RING // stage), splits)


def choose_gated(rows: int) -> PipelineConfig:
    """As many stages as let two programs share a multiprocessor: all of them run at once then."""
    return PipelineConfig(5 if rows <= 32 else 4 if rows <= 64 else 3)


def split_k_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ring: PipelineConfig) -> Tensor:
    """x [M, K], weight [N, K] -> float32 [splits, M, N], which add up to x @ weight.T + bias."""
    rows, outputs = len(x), len(weight)
    parts = torch.empty((ring.splits, rows, outputs), dtype=torch.float32, device=x.device)
    _launch(-(-outputs // _OUTPUTS), x, weight, parts, bias, ring)
    return parts


def split_k_gated_linear(x: Tensor, gate_up_weight: Tensor, ring: PipelineConfig) -> Tensor:
    """x [M, K], weight [2 wide, K] with the gate's rows first -> silu(x @ gate.T) * (x @ up.T): [M, wide]."""
    wide = len(gate_up_weight) // 2
    assert wide % _OUTPUTS == 0 and ring.splits == 1, (wide, ring)
    out = torch.empty((len(x), wide), dtype=x.dtype, device=x.device)
    _launch(wide // _OUTPUTS, x, gate_up_weight, out, None, ring, gated=True)
    return out


def _launch(
    tiles: int,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    ring: PipelineConfig,
    *,
    gated: bool = False,
) -> None:
    assert weight.is_contiguous() and x.stride(1) == 1 and x.dtype == weight.dtype
    rows = power_of_two(len(x), minimum=16)
    target = _descriptor(out, rows) if gated else out
    _stream_kernel[(tiles, ring.splits)](
        _descriptor(weight, _OUTPUTS), _descriptor(x, rows), target, bias, len(x), out.shape[-1],
        K=x.shape[1], ROWS=rows, OUTPUTS=_OUTPUTS, STAGES=ring.stages, SPLITS=ring.splits, GATED=gated,
        num_warps=4, maxnreg=_registers(rows, gated), launch_pdl=True,
    )  # fmt: skip


def _registers(rows: int, gated: bool) -> int:
    """Of a thread, on average: one role has the sums, the other next to nothing."""
    sums = rows if gated else rows // 2
    return 64 if sums <= 32 else 96 if sums <= 64 else 128


def _descriptor(rows: Tensor, count: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [count, _INPUTS], layout)


@gluon.jit(do_not_specialize=["M"])
def _stream_kernel(
    weight: tma.tensor_descriptor, x: tma.tensor_descriptor, out: gl.tensor, bias: gl.tensor,
    M: gl.tensor, N: gl.tensor, K: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, STAGES: gl.constexpr,
    SPLITS: gl.constexpr, GATED: gl.constexpr,
) -> None:  # fmt: skip
    STEPS: gl.constexpr = (K + 63) // 64
    SHARE: gl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    gates = gl.allocate_shared_memory(weight.dtype, [STAGES, OUTPUTS, 64], weight.layout)
    ups = gates
    if GATED:
        ups = gl.allocate_shared_memory(weight.dtype, [STAGES, OUTPUTS, 64], weight.layout)
    few = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, 64], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())  # full, and free again
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    first = gl.program_id(1) * SHARE
    place = (first, gl.minimum(SHARE, STEPS - first))  # the program's steps
    ring = (gates, ups, few, bars)
    sizes: gl.constexpr = (OUTPUTS, ROWS, STAGES, GATED)
    gl.warp_specialize(
        [
            (_consume, (ring, out, bias, place, M, N, sizes)),
            (_produce, (ring, weight, x, place, N, sizes)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _produce(
    ring: gl.tuple, weight: tma.tensor_descriptor, x: tma.tensor_descriptor, place: gl.tuple, N: gl.tensor,
    sizes: gl.constexpr,
) -> None:  # fmt: skip
    STAGES: gl.constexpr = sizes[2]
    _, _, few, bars = ring
    first, steps = place
    for i in gl.static_range(STAGES):
        _copy_weights(ring, weight, N, first + i, i, i < steps, sizes)
    gdc_launch_dependents()
    gdc_wait()
    for i in gl.static_range(STAGES):
        _copy(x, [0, (first + i) * 64], bars.index(i), few.index(i), pred=i < steps)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for step in range(STAGES, steps):
        mbarrier.wait(bars.index(STAGES + stage), phase)
        _copy_weights(ring, weight, N, first + step, stage, True, sizes)
        _copy(x, [0, (first + step) * 64], bars.index(stage), few.index(stage))
        stage, phase = _following(stage, phase, STAGES)


@gluon.jit
def _copy_weights(
    ring: gl.tuple, weight: tma.tensor_descriptor, N: gl.tensor, step: gl.tensor, stage: gl.tensor, pred: gl.tensor,
    sizes: gl.constexpr,
) -> None:  # fmt: skip
    """Those of a step. The stage is full when the rows of x, which are not asked for here, have come as well."""
    OUTPUTS: gl.constexpr = sizes[0]
    GATED: gl.constexpr = sizes[3]
    gates, ups, _, bars = ring
    full, row = bars.index(stage), gl.program_id(0) * OUTPUTS
    mbarrier.expect(full, ((2 if GATED else 1) * OUTPUTS + sizes[1]) * 128, pred=pred)
    _copy(weight, [row, step * 64], full, gates.index(stage), pred=pred)
    if GATED:
        _copy(weight, [N + row, step * 64], full, ups.index(stage), pred=pred)


@gluon.jit
def _following(stage: gl.tensor, phase: gl.tensor, STAGES: gl.constexpr) -> gl.tuple:
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def _consume(
    ring: gl.tuple, out: gl.tensor, bias: gl.tensor, place: gl.tuple, M: gl.tensor, N: gl.tensor, sizes: gl.constexpr
) -> None:
    OUTPUTS: gl.constexpr = sizes[0]
    STAGES: gl.constexpr = sizes[2]
    GATED: gl.constexpr = sizes[3]
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes[1], 16])
    gates, ups, few, bars = ring
    _, steps = place
    acc = gl.zeros([OUTPUTS, sizes[1]], gl.float32, layout=L)
    up = gl.zeros([OUTPUTS, sizes[1]], gl.float32, layout=L)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for _ in range(steps):
        mbarrier.wait(bars.index(stage), phase)
        here = few.index(stage).permute((1, 0))
        acc = warpgroup_mma(gates.index(stage), here, acc, is_async=True)
        if GATED:
            up = warpgroup_mma(ups.index(stage), here, up, is_async=True)
            acc, up = warpgroup_mma_wait(0, deps=(acc, up))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(bars.index(STAGES + stage), count=1)
        stage, phase = _following(stage, phase, STAGES)
    if GATED:
        few.index(0).permute((1, 0)).store((acc / (1.0 + gl.exp(-acc)) * up).to(few.dtype))
        fence_async_shared()
        _write(out, [0, gl.program_id(0) * OUTPUTS], few.index(0))
        tma.store_wait(0)
    else:
        _store_part(acc, out, bias, M, N, OUTPUTS)


@gluon.jit
def _store_part(
    acc: gl.tensor, out: gl.tensor, bias: gl.tensor, M: gl.tensor, N: gl.tensor, OUTPUTS: gl.constexpr
) -> None:
    """[OUTPUTS, ROWS] -> out [splits, M, N]. The first split adds the bias."""
    L: gl.constexpr = acc.type.layout
    columns = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, L))
    rows, split = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, L)), gl.program_id(1)
    if bias is not None:
        acc += gl.load(bias + columns, mask=(columns < N) & (split == 0), other=0.0).to(gl.float32)[:, None]
    place = out + (split * M + rows).to(gl.int64)[None, :] * N + columns[:, None]
    gl.store(place, acc, mask=(columns < N)[:, None] & (rows < M)[None, :])
