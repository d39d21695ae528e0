"""Products that end with an activation, for Hopper GPUs, in Gluon. Knows rows and weights, no layers.

One program on each multiprocessor takes tile after tile. Three roles run side by side and meet at barriers only:

    producer, 1 warp                copies 64 columns of x and weight a stage into a ring   | x0 w0 | x1 w1 | .. |
    2 groups of 4 warps, 64 rows    multiply; then the activation in registers, and out through shared memory

    a tile is 128 rows by 256 rows of the weight:    no gate  | 256 outputs |
                                                     a gate   | 128 of gate | the same 128 of up |

Tiles of a last wave that would leave half of the multiprocessors idle are halved. The reference is that of `reference`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
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

ACTS = ("quick_gelu", "tanh_gelu", "silu_and_mul")  # the last takes a weight of the gate's rows and those of `up`
_QUICK_GELU, _SILU_AND_MUL = gl.constexpr(0), gl.constexpr(2)
_GROUPS = gl.constexpr(2)
_STAGES = gl.constexpr(4)  # with the room for results, all of shared memory
_BAND = gl.constexpr(12)  # rows of tiles that are done column by column, so that a wave reads few rows of x and weight
_ROWS, _WIDE = 128, 256  # of a tile: rows of x, rows of the weight
_LEAST_ROWS = 256  # fewer take as long as reading the weight does
_LEAST_FILL = 0.75  # below, two launches with smaller tiles are faster
_ALIGNED = 16  # elements that sizes are multiples of: what is copied in boxes has to, and one kernel then fits all
_BOX = 64  # rows and columns of a copy
_BOXES = gl.NVMMASharedLayout(swizzle_byte_width=2 * _BOX, element_bitwidth=16, rank=2)
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name until Triton 3.7
_room = gl.shared_memory_descriptor
_seen_as = _room.reinterpret if hasattr(_room, "reinterpret") else _room._reinterpret  # its name in Triton 3.6
_write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def hopper_linear(
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
    assert x.is_contiguous() and weight.is_contiguous() and inputs % _ALIGNED == 0 and outputs % _ALIGNED == 0
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    tiles = num_tiles(rows, outputs, is_gated)
    whole = num_whole(tiles, programs)
    _compiled(ACTS.index(act), has_bias, x.dtype, x.device)[min(programs, 2 * tiles - whole), 1, 1](
        _boxes(x), _boxes(weight), _boxes(out), weight if bias is None else bias,
        rows, outputs, inputs, whole, 2 * (tiles - whole), ACTS.index(act), has_bias,
    )  # fmt: skip
    return out


def suits(rows: int, inputs: int, outputs: int, is_gated: bool, programs: int) -> bool:
    """Whether it is faster than a product and an activation by themselves, of 16-bit numbers."""
    return inputs % _ALIGNED == 0 and outputs % _ALIGNED == 0 and fills(rows, outputs, programs, is_gated)


def fills(rows: int, outputs: int, programs: int, is_gated: bool = False) -> bool:
    """Whether tiles leave few multiprocessors without work."""
    tiles = num_tiles(rows, outputs, is_gated)
    whole = num_whole(tiles, programs)
    waves = -(-whole // programs) + (0.5 if tiles > whole else 0)
    sums = rows * outputs * (2 if is_gated else 1)
    return rows >= _LEAST_ROWS and sums >= _LEAST_FILL * waves * programs * _ROWS * _WIDE


def num_tiles(rows: int, outputs: int, is_gated: bool) -> int:
    return -(-rows // _ROWS) * -(-outputs // (_WIDE // 2 if is_gated else _WIDE))


def num_whole(tiles: int, programs: int) -> int:
    """Tiles that are not halved: all, unless the last wave has room for the halves of its tiles."""
    last = tiles % programs
    return tiles - last if 2 * last <= programs else tiles


@lru_cache
def _compiled(act: int, has_bias: bool, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
    """For all sizes. To find it by its arguments again takes the host three times as long as the whole launch."""
    like = torch.empty((_BOX, _BOX), dtype=dtype, device=device)
    return _act_linear_kernel.warmup(
        _boxes(like), _boxes(like), _boxes(like), like, _BOX, _BOX, _BOX, 0, 0,
        ACT=act, HAS_BIAS=has_bias, num_warps=4, maxnreg=168, grid=(1,),
    )  # fmt: skip


class _Unchecked(TensorDescriptor):  # type: ignore[misc]
    """Of rows that are known to be dense and aligned: looking at them again takes the host longer than the launch."""

    def __post_init__(self) -> None:
        pass


def _boxes(rows: Tensor) -> TensorDescriptor:
    return _Unchecked(rows, rows.shape, rows.stride(), [_BOX, _BOX], _BOXES)


@gluon.jit(do_not_specialize=["M", "whole", "halves"])
def _act_linear_kernel(
    x: tma.tensor_descriptor, weight: tma.tensor_descriptor, out: tma.tensor_descriptor, bias: gl.tensor,
    M: gl.tensor, N: gl.tensor, K: gl.tensor, whole: gl.tensor, halves: gl.tensor,
    ACT: gl.constexpr, HAS_BIAS: gl.constexpr,
) -> None:  # fmt: skip
    rows = gl.allocate_shared_memory(x.dtype, [_GROUPS * _STAGES, 64, 64], x.layout)
    weights = gl.allocate_shared_memory(x.dtype, [4 * _STAGES, 64, 64], x.layout)
    results = gl.allocate_shared_memory(x.dtype, [2 * _GROUPS, 64, 64], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * _STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(bars.index(i), count=1)  # a stage is full
        mbarrier.init(bars.index(_STAGES + i), count=_GROUPS)  # it is free again
    fence_async_shared()
    shared = (rows, weights, results, bars)
    shape = (M, N, K, whole, halves)
    gl.warp_specialize(
        [
            (_consume, (shared, out, bias, shape, 0, ACT, HAS_BIAS)),
            (_consume, (shared, out, bias, shape, 1, ACT, HAS_BIAS)),
            (_produce, (shared, x, weight, shape, ACT)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _following(stage: gl.tensor, phase: gl.tensor) -> gl.tuple:
    is_last = stage == _STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def _before(stage: gl.tensor) -> gl.tensor:
    """Counted, not carried: a loop does not carry a name that stands for the same value as another one before it."""
    return gl.where(stage == 0, _STAGES - 1, stage - 1)


@gluon.jit
def _place(unit: gl.tensor, shape: gl.tuple, WIDE: gl.constexpr, ACT: gl.constexpr) -> gl.tuple:
    """First row and first output of a tile, or of half a tile behind the whole ones."""
    OUTPUTS: gl.constexpr = 128 if ACT == _SILU_AND_MUL else 256
    M, N, _, whole, _ = shape
    down, across = (M + 127) // 128, (N + OUTPUTS - 1) // OUTPUTS
    tile, further = unit, 0
    if WIDE == 128:
        tile, further = whole + unit // 2, unit % 2 * (OUTPUTS // 2)
    band = tile // (_BAND * across)
    inside = tile - band * (_BAND * across)
    height = gl.minimum(down - band * _BAND, _BAND)
    return (band * _BAND + inside % height) * 128, inside // height * OUTPUTS + further


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
        row, output = _place(unit, shape, WIDE, ACT)
        second = output + WIDE // 2
        if ACT == _SILU_AND_MUL:
            second = output + N
        for k in range(0, K, 64):
            full = bars.index(stage)
            mbarrier.wait(bars.index(_STAGES + stage), phase ^ 1)
            mbarrier.expect(full, (_GROUPS * 64 + WIDE) * 64 * 2)
            for i in gl.static_range(BOXES // 2):
                _copy(weight, [output + i * 64, k], full, weights.index(4 * stage + i))
                _copy(weight, [second + i * 64, k], full, weights.index(4 * stage + BOXES // 2 + i))
            for i in gl.static_range(_GROUPS):
                _copy(x, [row + i * 64, k], full, rows.index(_GROUPS * stage + i))
            stage, phase = _following(stage, phase)
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
        row, output = _place(unit, shape, WIDE, ACT)
        acc, stage, phase = _multiply(shared, gl.zeros([64, WIDE], gl.float32, SUMS), shape, stage, phase, WIDE, GROUP)
        if HAS_BIAS:
            more = _biases(bias, output, shape, SUMS, WIDE, ACT)  # comes while the last products are under way
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(shared[3].index(_STAGES + _before(stage)), count=1)
        if HAS_BIAS:
            acc += more.to(gl.float32)
        left, right = _halves(acc)
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
def _multiply(
    shared: gl.tuple, acc: gl.tensor, shape: gl.tuple, stage: gl.tensor, phase: gl.tensor,
    WIDE: gl.constexpr, GROUP: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """One product is always on its way, also behind the last; a stage is given back when the next has been begun."""
    rows, weights, _, bars = shared
    joined = _seen_as(weights, weights.dtype, [1024 // WIDE, WIDE, 64], weights.layout)
    STEP: gl.constexpr = 256 // WIDE
    for k in range(0, shape[2], 64):
        mbarrier.wait(bars.index(stage), phase)
        columns = joined.index(STEP * stage).permute((1, 0))
        acc = warpgroup_mma(rows.index(_GROUPS * stage + GROUP), columns, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(bars.index(_STAGES + _before(stage)), count=1, pred=k > 0)
        stage, phase = _following(stage, phase)
    return acc, stage, phase


@gluon.jit
def _halves(acc: gl.tensor) -> gl.tuple:
    """The left columns and the right ones."""
    WIDE: gl.constexpr = acc.shape[1] // 2
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    left, right = gl.split(gl.permute(gl.reshape(acc, [64, 2, WIDE]), (0, 2, 1)))
    return gl.convert_layout(left, HALF, assert_trivial=True), gl.convert_layout(right, HALF, assert_trivial=True)


@gluon.jit
def _finish(
    results: gl.shared_memory_descriptor, out: tma.tensor_descriptor, sums: gl.tensor, ups: gl.tensor,
    row: gl.tensor, output: gl.tensor, room: gl.tensor, GROUP: gl.constexpr, ACT: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Activate and write sums [64, 64 or 128]. `ups` are what a gate multiplies."""
    WIDE: gl.constexpr = sums.shape[1]
    if WIDE == 128:
        left, right = _halves(sums)
        more_left, more_right = _halves(ups)
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
    _write(out, [row + GROUP * 64, output], here)
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
