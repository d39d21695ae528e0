"""Products that end with an activation, for Hopper GPUs, in Gluon. Knows rows and weights, no layers.

Tiles are those of `hopper_tiles`. Three roles run side by side and meet at barriers only:

    producer, 1 warp                copies 64 columns of x and weight a stage into a ring   | x0 w0 | x1 w1 | .. |
    2 groups of 4 warps, 64 rows    multiply; then the activation in registers, and out through shared memory

    a tile is 128 rows by 256 rows of the weight:    no gate  | 256 outputs |
                                                     a gate   | 128 of gate | the same 128 of up |

The reference is that of `reference`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saccade.kernels.gemm.hopper_tiles import (
    ALIGNED,
    BOX,
    GROUPS,
    STAGES,
    before,
    boxes,
    copy,
    fill,
    following,
    left_right,
    multiply,
    new_ring,
    num_tiles,
    num_whole,
    place,
    write,
)

ACTS = ("quick_gelu", "tanh_gelu", "silu_and_mul")  # the last takes a weight of the gate's rows and those of `up`
_QUICK_GELU, _SILU_AND_MUL = gl.constexpr(0), gl.constexpr(2)
_MIN_FILL = 0.75  # of the multiprocessors' time; below, two launches with smaller tiles are faster


def hopper_linear_act(
    x: Tensor,  # [M, K], contiguous as all that follow
    weight: Tensor,  # [N, K], with a gate [2 N, K]
    bias: Tensor | None,  # as long
    act: str,
    programs: int,  # one for each multiprocessor
    out: Tensor | None = None,  # [M, N]
) -> Tensor:
    """act(x @ weight.T + bias): [M, N]."""
    (rows, inputs), is_gated, has_bias = x.shape, act == "silu_and_mul", bias is not None
    outputs = len(weight) // 2 if is_gated else len(weight)
    assert x.is_contiguous() and weight.is_contiguous() and inputs % ALIGNED == 0 and outputs % ALIGNED == 0
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    tiles = num_tiles(rows, outputs, is_gated)
    whole = num_whole(tiles, programs)
    _compiled(ACTS.index(act), has_bias, x.dtype, x.device)[min(programs, 2 * tiles - whole), 1, 1](
        boxes(x), boxes(weight), boxes(out), weight if bias is None else bias,
        rows, outputs, inputs, whole, 2 * (tiles - whole), ACTS.index(act), has_bias,
    )  # fmt: skip
    return out


def suits(rows: int, inputs: int, outputs: int, is_gated: bool, programs: int) -> bool:
    """Whether it is faster than a product and an activation by themselves, of 16-bit numbers."""
    is_aligned = inputs % ALIGNED == 0 and outputs % ALIGNED == 0
    return is_aligned and fill(rows, outputs, is_gated, programs) >= _MIN_FILL


@lru_cache
def _compiled(act: int, has_bias: bool, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
    """For all sizes. To find it by its arguments again takes the host three times as long as the whole launch."""
    like = torch.empty((BOX, BOX), dtype=dtype, device=device)
    return _act_linear_kernel.warmup(
        boxes(like), boxes(like), boxes(like), like, BOX, BOX, BOX, 0, 0,
        ACT=act, HAS_BIAS=has_bias, num_warps=4, maxnreg=168, launch_pdl=True, grid=(1,),
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "whole", "halves"])
def _act_linear_kernel(
    x: tma.tensor_descriptor, weight: tma.tensor_descriptor, out: tma.tensor_descriptor, bias: gl.tensor,
    M: gl.tensor, N: gl.tensor, K: gl.tensor, whole: gl.tensor, halves: gl.tensor,
    ACT: gl.constexpr, HAS_BIAS: gl.constexpr,
) -> None:  # fmt: skip
    shared = new_ring(x)
    shape = (M, N, K, whole, halves)
    gdc_wait()  # before others start that may not: they find all that was written before this launch
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (shared, out, bias, shape, 0, ACT, HAS_BIAS)),
            (_consume, (shared, out, bias, shape, 1, ACT, HAS_BIAS)),
            (_produce, (shared, x, weight, shape, ACT)),
        ],
        [4, 1],
        [240, 24],
    )


# --- the producer -------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(
    shared: gl.tuple, x: tma.tensor_descriptor, weight: tma.tensor_descriptor, shape: gl.tuple, ACT: gl.constexpr
) -> None:
    _, _, _, whole, halves = shape
    stage, phase = _copy_tiles(shared, x, weight, shape, whole, gl.to_tensor(0), gl.to_tensor(0), 256, ACT)
    _copy_tiles(shared, x, weight, shape, halves, stage, phase, 128, ACT)


@gluon.jit
def _copy_tiles(
    shared: gl.tuple, x: tma.tensor_descriptor, weight: tma.tensor_descriptor, shape: gl.tuple, units: gl.tensor,
    stage: gl.tensor, phase: gl.tensor, WIDE: gl.constexpr, ACT: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """What lies behind the end of x or weight is filled with zeros."""
    BOXES: gl.constexpr = WIDE // 64
    rows, weights, _, bars = shared
    _, N, K, _, _ = shape
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, output = place(unit, shape, WIDE, ACT == _SILU_AND_MUL)
        second = output + WIDE // 2
        if ACT == _SILU_AND_MUL:
            second = output + N
        for k in range(0, K, 64):
            full = bars.index(stage)
            mbarrier.wait(bars.index(STAGES + stage), phase ^ 1)
            mbarrier.expect(full, (GROUPS * 64 + WIDE) * 64 * 2)
            for i in gl.static_range(BOXES // 2):
                copy(weight, [output + i * 64, k], full, weights.index(4 * stage + i))
                copy(weight, [second + i * 64, k], full, weights.index(4 * stage + BOXES // 2 + i))
            for i in gl.static_range(GROUPS):
                copy(x, [row + i * 64, k], full, rows.index(GROUPS * stage + i))
            stage, phase = following(stage, phase)
    return stage, phase


# --- the groups of rows -------------------------------------------------------------------------------------------


@gluon.jit
def _consume(
    shared: gl.tuple, out: tma.tensor_descriptor, bias: gl.tensor, shape: gl.tuple,
    GROUP: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr,
) -> None:  # fmt: skip
    _, _, _, whole, halves = shape
    ring = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))  # stage, its phase, the room that is free for results
    ring = _compute_tiles(shared, out, bias, shape, whole, ring, 256, GROUP, ACT, HAS_BIAS)
    _compute_tiles(shared, out, bias, shape, halves, ring, 128, GROUP, ACT, HAS_BIAS)
    tma.store_wait(0)


@gluon.jit
def _compute_tiles(
    shared: gl.tuple, out: tma.tensor_descriptor, bias: gl.tensor, shape: gl.tuple, units: gl.tensor, ring: gl.tuple,
    WIDE: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    results = shared[2]
    stage, phase, room = ring
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, output = place(unit, shape, WIDE, ACT == _SILU_AND_MUL)
        acc, stage, phase = multiply(shared, gl.zeros([64, WIDE], gl.float32, SUMS), shape, stage, phase, WIDE, GROUP)
        if HAS_BIAS:
            more = _biases(bias, output, shape, SUMS, WIDE, ACT)  # comes while the last products are under way
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(shared[3].index(STAGES + before(stage)), count=1)
        if HAS_BIAS:
            acc += more.to(gl.float32)
        left, right = left_right(acc)
        if ACT == _SILU_AND_MUL:
            room = _finish(results, out, left, right, row, output, room, GROUP, ACT)
        else:
            room = _finish(results, out, left, left, row, output, room, GROUP, ACT)
            room = _finish(results, out, right, right, row, output + WIDE // 2, room, GROUP, ACT)
    return stage, phase, room


@gluon.jit
def _biases(
    bias: gl.tensor, output: gl.tensor, shape: gl.tuple,
    SUMS: gl.constexpr, WIDE: gl.constexpr, ACT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Of a tile's columns: [1, WIDE]."""
    columns = gl.arange(0, WIDE, layout=gl.SliceLayout(0, SUMS))
    end = shape[1]
    if ACT == _SILU_AND_MUL:
        columns = gl.where(columns < WIDE // 2, columns, columns - WIDE // 2 + end)
        end = 2 * end
    return gl.load(bias + output + columns, mask=output + columns < end, other=0.0)[None, :]


@gluon.jit
def _finish(
    results: gl.shared_memory_descriptor, out: tma.tensor_descriptor, sums: gl.tensor, ups: gl.tensor,
    row: gl.tensor, output: gl.tensor, room: gl.tensor, GROUP: gl.constexpr, ACT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Activate and write sums [64, 64 or 128]. `ups` are what a gate multiplies."""
    WIDE: gl.constexpr = sums.shape[1]
    if WIDE == 128:
        left, right = left_right(sums)
        more_left, more_right = left_right(ups)
        room = _finish_box(results, out, left, more_left, row, output, room, GROUP, ACT)
        room = _finish_box(results, out, right, more_right, row, output + 64, room, GROUP, ACT)
    else:
        room = _finish_box(results, out, sums, ups, row, output, room, GROUP, ACT)
    return room


@gluon.jit
def _finish_box(
    results: gl.shared_memory_descriptor, out: tma.tensor_descriptor, sums: gl.tensor, ups: gl.tensor,
    row: gl.tensor, output: gl.tensor, room: gl.tensor, GROUP: gl.constexpr, ACT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Rows and outputs behind the end are not written."""
    tma.store_wait(1)  # the last writing may still go on: it reads from the other room
    here = results.index(2 * GROUP + room)
    here.store(_activate(sums, ups, ACT).to(results.dtype))
    fence_async_shared()
    write(out, [row + GROUP * 64, output], here)
    return room ^ 1


@gluon.jit
def _activate(y: gl.tensor, up: gl.tensor, ACT: gl.constexpr) -> gl.tensor:
    """y sigmoid(s), with sigmoid(s) = (1 + tanh(s / 2)) / 2: one special function instead of two."""
    half = y * 0.5
    if ACT == _SILU_AND_MUL:
        return (half * _tanh(half) + half) * up
    if ACT == _QUICK_GELU:
        return half * _tanh(y * 0.851) + half
    return half * _tanh(y * (0.7978845608028654 + 0.035677408136300125 * y * y)) + half


@gluon.jit
def _tanh(x: gl.tensor) -> gl.tensor:
    """Right to 11 bits, which a result of 16 bits does not show."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
