"""GEMM with an activation as its epilogue for Hopper GPUs, in Gluon. Knows rows and weights, no layers.

Main loop and tiles are those of `hopper_mainloop`. Warp-specialized roles:

    producer, 1 warp                TMA loads of 64 columns of x and weight per stage      | x0 w0 | x1 w1 | .. |
    2 groups of 4 warps, 64 rows    WGMMA; then the activation in registers, and a TMA store

    a tile is 128 rows by 256 rows of the weight:    no gate  | 256 outputs |
                                                     a gate   | 128 of gate | the same 128 of up |

The reference is `ops.reference.linear_act`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from saccade.kernels.gemm import hopper_mainloop as gemm
from saccade.kernels.launch import gluon_compat as hopper
from saccade.kernels.launch.gluon_compat import gl, gluon, mbarrier, tma
from saccade.kernels.launch.hopper_pipeline import next_stage
from saccade.kernels.launch.launch_cache import launch_for_any_size

ACTS = ("quick_gelu", "tanh_gelu", "silu_and_mul", "gelu_and_mul")  # the last two take rows of the gate and of `up`
_QUICK_GELU = gl.constexpr(0)
_SILU_AND_MUL = gl.constexpr(2)  # the first with a gate
_OPTIONS = {"num_warps": 4, "maxnreg": 168, "launch_pdl": True}
_MIN_UTILIZATION = 0.75  # of the SMs; below, two launches with smaller tiles are faster


def hopper_linear_act(
    x: Tensor,  # [M, K], contiguous as all that follow
    weight: Tensor,  # [N, K], with a gate [2 N, K]
    bias: Tensor | None,  # as long
    act: str,
    programs: int,  # one per SM
    out: Tensor | None = None,  # [M, N]
) -> Tensor:
    """act(x @ weight.T + bias): [M, N]."""
    rows, inputs = x.shape
    is_gated = act.endswith("_and_mul")
    has_bias = bias is not None
    outputs = len(weight) // 2 if is_gated else len(weight)
    assert x.is_contiguous() and weight.is_contiguous() and inputs % gemm.ALIGNED == 0 and outputs % gemm.ALIGNED == 0
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    tiles = gemm.num_tiles(rows, outputs, is_gated)
    whole = gemm.num_whole(tiles, programs)
    args = (
        gemm.boxes(x), gemm.boxes(weight), gemm.boxes(out), weight if bias is None else bias,
        rows, outputs, inputs, whole, 2 * (tiles - whole),
    )  # fmt: skip
    grid = (min(programs, 2 * tiles - whole), 1, 1)
    key = (x.dtype, x.device)
    sizes = (ACTS.index(act), has_bias)
    launch_for_any_size(_linear_act_kernel, grid, args, partial(_like, *key), key, sizes, **_OPTIONS)
    return out


def suits(rows: int, inputs: int, outputs: int, is_gated: bool, programs: int) -> bool:
    """Whether it is faster than a GEMM and an activation in two launches, in 16-bit types."""
    is_aligned = inputs % gemm.ALIGNED == 0 and outputs % gemm.ALIGNED == 0
    return is_aligned and gemm.utilization(rows, outputs, is_gated, programs) >= _MIN_UTILIZATION


def _like(dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    box = torch.empty((gemm.BOX, gemm.BOX), dtype=dtype, device=device)
    return *[gemm.boxes(box)] * 3, box, *[gemm.BOX] * 3, 0, 0


@gluon.jit(do_not_specialize=["M", "whole", "halves"])
def _linear_act_kernel(
    x: tma.tensor_descriptor, weight: tma.tensor_descriptor, out: tma.tensor_descriptor, bias: gl.tensor,
    M: gl.tensor, N: gl.tensor, K: gl.tensor, whole: gl.tensor, halves: gl.tensor,
    ACT: gl.constexpr, HAS_BIAS: gl.constexpr,
) -> None:  # fmt: skip
    ring = gemm.new_ring(x)
    shape = gemm.Shape(M, N, K, whole, halves)
    hopper.gdc_wait()  # before the release: dependents that do not wait may read what was written before this launch
    hopper.gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (ring, out, bias, shape, 0, ACT, HAS_BIAS)),
            (_consume, (ring, out, bias, shape, 1, ACT, HAS_BIAS)),
            (_produce, (ring, x, weight, shape, ACT)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _produce(
    ring: gemm.Ring, x: tma.tensor_descriptor, weight: tma.tensor_descriptor, shape: gemm.Shape, ACT: gl.constexpr
) -> None:
    stage, phase = _load_tiles(ring, x, weight, shape, shape.whole, gl.to_tensor(0), gl.to_tensor(0), 256, ACT)
    _load_tiles(ring, x, weight, shape, shape.halves, stage, phase, 128, ACT)


@gluon.jit
def _load_tiles(
    ring: gemm.Ring, x: tma.tensor_descriptor, weight: tma.tensor_descriptor, shape: gemm.Shape, units: gl.tensor,
    stage: gl.tensor, phase: gl.tensor, WIDE: gl.constexpr, ACT: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """TMA fills rows and columns after the end with zeros."""
    BOXES: gl.constexpr = WIDE // 64
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, output = gemm.tile_start(unit, shape, WIDE, ACT >= _SILU_AND_MUL)
        second = output + WIDE // 2
        if ACT >= _SILU_AND_MUL:
            second = output + shape.N
        for k in range(0, shape.K, 64):
            full = ring.bars.full(stage)
            mbarrier.wait(ring.bars.free(stage), phase ^ 1)
            mbarrier.expect(full, (gemm.GROUPS * 64 + WIDE) * 64 * 2)
            for i in gl.static_range(BOXES // 2):
                hopper.tma_load(weight, [output + i * 64, k], full, ring.weights.index(4 * stage + i))
                hopper.tma_load(weight, [second + i * 64, k], full, ring.weights.index(4 * stage + BOXES // 2 + i))
            for i in gl.static_range(gemm.GROUPS):
                hopper.tma_load(x, [row + i * 64, k], full, ring.rows.index(gemm.GROUPS * stage + i))
            stage, phase = next_stage(stage, phase, gemm.STAGES)
    return stage, phase


@gluon.jit
def _consume(
    ring: gemm.Ring, out: tma.tensor_descriptor, bias: gl.tensor, shape: gemm.Shape,
    GROUP: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr,
) -> None:  # fmt: skip
    cursor = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))  # stage, phase, buffer for the next result
    cursor = _compute_tiles(ring, out, bias, shape, shape.whole, cursor, 256, GROUP, ACT, HAS_BIAS)
    _compute_tiles(ring, out, bias, shape, shape.halves, cursor, 128, GROUP, ACT, HAS_BIAS)
    tma.store_wait(0)


@gluon.jit
def _compute_tiles(
    ring: gemm.Ring, out: tma.tensor_descriptor, bias: gl.tensor, shape: gemm.Shape, units: gl.tensor, cursor: gl.tuple,
    WIDE: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    results = ring.results
    stage, phase, buffer = cursor
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, output = gemm.tile_start(unit, shape, WIDE, ACT >= _SILU_AND_MUL)
        acc, stage, phase = gemm.multiply(ring, shape, stage, phase, WIDE, GROUP)
        if HAS_BIAS:
            SUMS: gl.constexpr = acc.type.layout
            more = _biases(bias, output, shape.N, SUMS, WIDE, ACT)  # loaded while the last WGMMA runs
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(ring.bars.free(gemm.previous_stage(stage)), count=1)
        if HAS_BIAS:
            acc += more.to(gl.float32)
        left_half, right = gemm.left_right(acc)
        if ACT >= _SILU_AND_MUL:
            buffer = _finish(results, out, left_half, right, row, output, buffer, GROUP, ACT)
        else:
            buffer = _finish(results, out, left_half, left_half, row, output, buffer, GROUP, ACT)
            buffer = _finish(results, out, right, right, row, output + WIDE // 2, buffer, GROUP, ACT)
    return stage, phase, buffer


@gluon.jit
def _biases(
    bias: gl.tensor, output: gl.tensor, end: gl.tensor,
    SUMS: gl.constexpr, WIDE: gl.constexpr, ACT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Of a tile's columns: [1, WIDE]."""
    columns = gl.arange(0, WIDE, layout=gl.SliceLayout(0, SUMS))
    if ACT >= _SILU_AND_MUL:
        columns = gl.where(columns < WIDE // 2, columns, columns - WIDE // 2 + end)
        end = 2 * end
    return gl.load(bias + output + columns, mask=output + columns < end, other=0.0)[None, :]


@gluon.jit
def _finish(
    results: gl.shared_memory_descriptor, out: tma.tensor_descriptor, sums: gl.tensor, ups: gl.tensor,
    row: gl.tensor, output: gl.tensor, buffer: gl.tensor, GROUP: gl.constexpr, ACT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Activate and store sums [64, 64 or 128]; `ups` are what a gate multiplies. Nothing is stored after the end."""
    WIDE: gl.constexpr = sums.shape[1]
    if WIDE > 64:
        left, right = gemm.left_right(sums)
        more_left, more_right = gemm.left_right(ups)
        buffer = _finish(results, out, left, more_left, row, output, buffer, GROUP, ACT)
        buffer = _finish(results, out, right, more_right, row, output + WIDE // 2, buffer, GROUP, ACT)
    else:
        tma.store_wait(1)  # the last store may still read from the other buffer
        here = results.index(2 * GROUP + buffer)
        here.store(_activate(sums, ups, ACT).to(results.dtype))
        hopper.fence_async_shared()
        hopper.tma_store(out, [row + GROUP * 64, output], here)
        buffer = buffer ^ 1
    return buffer


@gluon.jit
def _activate(y: gl.tensor, up: gl.tensor, ACT: gl.constexpr) -> gl.tensor:
    """y sigmoid(s), with sigmoid(s) = (1 + tanh(s / 2)) / 2: one special function instead of two."""
    half = y * 0.5
    if ACT == _SILU_AND_MUL:
        return (half * _tanh(half) + half) * up
    if ACT == _QUICK_GELU:
        return half * _tanh(y * 0.851) + half
    gelu = half * _tanh(y * (0.7978845608028654 + 0.035677408136300125 * y * y)) + half
    if ACT > _SILU_AND_MUL:
        gelu *= up
    return gelu


@gluon.jit
def _tanh(x: gl.tensor) -> gl.tensor:
    """Exact to 11 bits: enough for a 16-bit result."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
