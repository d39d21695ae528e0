"""Queries, keys and values of rotary heads in one product, for Hopper GPUs, in Gluon. Knows rows and heads, no tower.

As `hopper_linear_act`, whose roles and tiles these are. Dimensions i and i + d / 2 of a head rotate as a pair:
rows of the weight are copied so that the two are neighbours, which one thread has. Attention does not ask in which
order a head's dimensions are, as long as queries and keys share it, so whole boxes are written as they come:

    a row    | q: 64 of each head, 32 pairs | 16 of each head, the other 8 pairs | k: the same | v: head by head |

`hopper_vit` takes a head in the same two parts.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saccade.kernels.gemm.hopper_tiles import (
    ALIGNED,
    BOX,
    GROUPS,
    STAGES,
    Unchecked,
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
    seen_as,
    write,
)

DIM = 80  # of a head: 64 and 16
_DIM = gl.constexpr(DIM)
_TOGETHER = 16  # heads of a tile of short parts
_MIN_FILL = 0.78  # of the multiprocessors' time; below, two launches with smaller tiles are faster
_PAIRS = gl.NVMMASharedLayout(swizzle_byte_width=2 * BOX, element_bitwidth=16, rank=4)


def hopper_qkv_rope(
    x: Tensor,  # [T, K], contiguous as all that follow
    weight: Tensor,  # [3 * heads * d, K]
    bias: Tensor,  # [3 * heads * d]
    rotary: Tensor,  # float32 [T, d]: cosine and sine of each pair
    heads: int,
    programs: int,  # one for each multiprocessor
) -> Tensor:
    """x @ weight.T + bias with queries and keys turned, in the order above: [T, 3, heads, d]."""
    (rows, inputs), outputs = x.shape, len(weight)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tiles = num_tiles(rows, outputs, False)
    whole = num_whole(tiles, programs)
    _compiled(heads, x.dtype, x.device)[min(programs, 2 * tiles - whole), 1, 1](
        boxes(x), boxes(weight), *_pair_boxes(weight), boxes(out),
        bias, rotary, rows, inputs, whole, 2 * (tiles - whole), heads,
    )  # fmt: skip
    return out.view(rows, 3, heads, -1)


def suits(rows: int, inputs: int, heads: int, dim: int, programs: int) -> bool:
    """Whether tiles divide such heads, and it is faster than a product and a rotation by themselves."""
    is_divided = heads % _TOGETHER == 0 and dim == DIM and inputs % ALIGNED == 0
    return is_divided and fill(rows, 3 * heads * dim, False, programs) >= _MIN_FILL


@lru_cache
def _compiled(heads: int, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
    like = torch.empty((BOX, BOX), dtype=dtype, device=device)
    rotary = torch.empty(BOX, dtype=torch.float32, device=device)
    return _qkv_kernel.warmup(
        boxes(like), boxes(like), *_pair_boxes(like), boxes(like),
        like, rotary, BOX, BOX, 0, 0, HEADS=heads, num_warps=4, maxnreg=168, launch_pdl=True, grid=(1,),
    )  # fmt: skip


def _pair_boxes(weight: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """32 pairs of a head, 8 pairs of 4 heads: the two of a pair are next to each other."""
    outputs, inputs = weight.shape
    shape, strides = (outputs // DIM, DIM // 2, 2, inputs), (DIM * inputs, inputs, DIM // 2 * inputs, 1)
    long = Unchecked(weight, shape, strides, [1, 32, 2, BOX], _PAIRS)
    return long, Unchecked(weight, shape, strides, [4, 8, 2, BOX], _PAIRS)


@gluon.jit(do_not_specialize=["M", "whole", "halves"])
def _qkv_kernel(
    x: tma.tensor_descriptor, weight: tma.tensor_descriptor,
    long: tma.tensor_descriptor, short: tma.tensor_descriptor, out: tma.tensor_descriptor,
    bias: gl.tensor, rotary: gl.tensor,
    M: gl.tensor, K: gl.tensor, whole: gl.tensor, halves: gl.tensor, HEADS: gl.constexpr,
) -> None:  # fmt: skip
    shared = new_ring(x)
    shape = (M, gl.to_tensor(3 * HEADS * _DIM), K, whole, halves)
    ends = (out, bias, rotary)
    gdc_wait()  # before others start that may not: they find all that was written before this launch
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (shared, ends, shape, 0, HEADS)),
            (_consume, (shared, ends, shape, 1, HEADS)),
            (_produce, (shared, x, weight, long, short, shape, HEADS)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _whose(output: gl.tensor, HEADS: gl.constexpr) -> gl.tuple:
    """Of a tile that begins there: has it values, has it short parts, its first head (keys follow queries)."""
    turned = output // (HEADS * _DIM)  # 0: queries, 1: keys
    inside = output - turned * (HEADS * _DIM)
    is_short = inside >= HEADS * 64
    head = turned * HEADS + gl.where(is_short, (inside - HEADS * 64) // 16, inside // 64)
    return turned == 2, is_short, head


# --- the producer -------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(
    shared: gl.tuple, x: tma.tensor_descriptor, weight: tma.tensor_descriptor,
    long: tma.tensor_descriptor, short: tma.tensor_descriptor, shape: gl.tuple, HEADS: gl.constexpr,
) -> None:  # fmt: skip
    given = (x, weight, long, short)
    _, _, _, whole, halves = shape
    stage, phase = _copy_tiles(shared, given, shape, whole, gl.to_tensor(0), gl.to_tensor(0), 256, HEADS)
    _copy_tiles(shared, given, shape, halves, stage, phase, 128, HEADS)


@gluon.jit
def _copy_tiles(
    shared: gl.tuple, given: gl.tuple, shape: gl.tuple, units: gl.tensor, stage: gl.tensor, phase: gl.tensor,
    WIDE: gl.constexpr, HEADS: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    rows, weights, _, bars = shared
    x, weight, long, short = given
    longs = seen_as(weights, weights.dtype, [4 * STAGES, 1, 32, 2, 64], long.layout)
    shorts = seen_as(weights, weights.dtype, [4 * STAGES, 4, 8, 2, 64], short.layout)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, output = place(unit, shape, WIDE, False)
        is_value, is_short, head = _whose(output, HEADS)
        for k in range(0, shape[2], 64):
            full = bars.index(stage)
            mbarrier.wait(bars.index(STAGES + stage), phase ^ 1)
            mbarrier.expect(full, (GROUPS * 64 + WIDE) * 64 * 2)
            for i in gl.static_range(WIDE // 64):
                if is_value:
                    copy(weight, [output + i * 64, k], full, weights.index(4 * stage + i))
                elif is_short:
                    copy(short, [head + 4 * i, 32, 0, k], full, shorts.index(4 * stage + i))
                else:
                    copy(long, [head + i, 0, 0, k], full, longs.index(4 * stage + i))
            for i in gl.static_range(GROUPS):
                copy(x, [row + i * 64, k], full, rows.index(GROUPS * stage + i))
            stage, phase = following(stage, phase)
    return stage, phase


# --- the groups of rows -------------------------------------------------------------------------------------------


@gluon.jit
def _consume(shared: gl.tuple, ends: gl.tuple, shape: gl.tuple, GROUP: gl.constexpr, HEADS: gl.constexpr) -> None:
    _, _, _, whole, halves = shape
    ring = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))  # stage, its phase, the room that is free for results
    ring = _compute_tiles(shared, ends, shape, whole, ring, 256, GROUP, HEADS)
    _compute_tiles(shared, ends, shape, halves, ring, 128, GROUP, HEADS)
    tma.store_wait(0)


@gluon.jit
def _compute_tiles(
    shared: gl.tuple, ends: gl.tuple, shape: gl.tuple, units: gl.tensor, ring: gl.tuple,
    WIDE: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    out, bias, rotary = ends
    stage, phase, room = ring
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, output = place(unit, shape, WIDE, False)
        is_value, is_short, head = _whose(output, HEADS)
        acc, stage, phase = multiply(shared, gl.zeros([64, WIDE], gl.float32, SUMS), shape, stage, phase, WIDE, GROUP)
        # both come while the last products are under way
        more = _biases(bias, output, is_value, is_short, head, SUMS, WIDE)
        turn = _rotary(rotary, row + GROUP * 64, shape[0], is_value, is_short)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(shared[3].index(STAGES + before(stage)), count=1)
        acc += more.to(gl.float32)
        if is_value:
            room = _finish(shared[2], out, acc, turn, row + GROUP * 64, output, room, GROUP, False)
        else:
            room = _finish(shared[2], out, acc, turn, row + GROUP * 64, output, room, GROUP, True)
    return stage, phase, room


@gluon.jit
def _biases(
    bias: gl.tensor, output: gl.tensor, is_value: gl.tensor, is_short: gl.tensor, head: gl.tensor,
    SUMS: gl.constexpr, WIDE: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Of a tile's columns: [1, WIDE]."""
    columns = gl.arange(0, WIDE, layout=gl.SliceLayout(0, SUMS))
    box, heads, pairs, which = columns // 64, columns // 16 % 4, columns // 2 % 8, columns % 2
    first, next_box, next_head = head * _DIM, _DIM, 8
    next_pair, next_half = 1, _DIM // 2
    if is_value:
        first, next_box, next_head, next_pair, next_half = output, 64, 16, 2, 1
    elif is_short:
        first, next_box, next_head, next_pair, next_half = head * _DIM + 32, 4 * _DIM, _DIM, 1, _DIM // 2
    own = first + box * next_box + heads * next_head + pairs * next_pair + which * next_half
    return gl.load(bias + own)[None, :]


@gluon.jit
def _rotary(rotary: gl.tensor, row: gl.tensor, M: gl.tensor, is_value: gl.tensor, is_short: gl.tensor) -> gl.tuple:
    """Cosines and sines of a box's pairs: [64, 32] each."""
    BOX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, BOX))[:, None]
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, BOX))[None, :]
    columns = gl.where(is_short, 64 + columns % 16, columns)
    mask = (rows < M) & (columns >= 0) & (is_value == 0)
    return gl.split(gl.reshape(gl.load(rotary + rows * _DIM + columns, mask=mask, other=0.0), [64, 32, 2]))


@gluon.jit
def _finish(
    results: gl.shared_memory_descriptor, out: tma.tensor_descriptor, sums: gl.tensor, turn: gl.tuple,
    row: gl.tensor, output: gl.tensor, room: gl.tensor, GROUP: gl.constexpr, IS_ROTATED: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Turn and write sums [64, 64 to 256]."""
    WIDE: gl.constexpr = sums.shape[1]
    if WIDE > 64:
        left, right = left_right(sums)
        room = _finish(results, out, left, turn, row, output, room, GROUP, IS_ROTATED)
        room = _finish(results, out, right, turn, row, output + WIDE // 2, room, GROUP, IS_ROTATED)
    else:
        tma.store_wait(1)  # the last writing may still go on: it reads from the other room
        here = results.index(2 * GROUP + room)
        if IS_ROTATED:
            sums = _rotate(sums, turn)
        here.store(sums.to(results.dtype))
        fence_async_shared()
        write(out, [row, output], here)
        room = room ^ 1
    return room


@gluon.jit
def _rotate(sums: gl.tensor, turn: gl.tuple) -> gl.tensor:
    along, across = turn
    low, high = gl.split(gl.reshape(sums, [64, 32, 2]))
    turned = gl.join(low * along - high * across, high * along + low * across)
    return gl.convert_layout(gl.reshape(turned, [64, 64]), sums.type.layout, assert_trivial=True)
