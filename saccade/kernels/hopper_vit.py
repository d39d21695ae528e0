"""Full attention inside each packed picture for Hopper GPUs, in Gluon. Knows rows and where pictures begin, no tower.

The same work as `packed_vit`, which stays the reference. Four roles run side by side and meet at barriers only:

    producer, 1 warp       copies keys and values into a ring of stages   | K0 . | K1 V0 | K2 V1 | .. | . Vn |
    2 or 3 groups of       scores of tile j and the values of tile j - 1 are multiplied together, so that the
    4 warps, 64 rows each  exponentials of tile j are taken while the tensor cores still work

Weights are powers of two above a level that is fixed by the first tile: nothing already summed is ever rescaled, and no
maximum is looked for. Should a row's weights outgrow float32's range all the same, everybody starts over and takes the
careful way, with a maximum that moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
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

from saccade.kernels.softmax import LOG2_E
from saccade.kernels.tiles import Tiles

_GROUP_ROWS = 64  # of one group of four warps: the least that its products take
_FIRST, _REST = 64, 16  # a head is two products, as in `packed_vit`
_SUMS1 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _FIRST, 16]))  # of values, in registers
_SUMS2 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _REST, 16]))
_HEADROOM = gl.constexpr(32.0)  # the level lies so many powers of two above what the first tile shows
_MOST = gl.constexpr(2.0**90)  # sums of weights beyond this are not trusted
_LEAST_LENGTH = 256  # smaller pictures are not worth four roles
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name until Triton 3.7


class Ring(NamedTuple):
    """The sizes a kernel is compiled for."""

    groups: int  # of rows
    keys: int  # of a stage
    stages: int
    registers: int  # of a thread, on average over all roles
    row_cost: float  # of time, against the other

    @property
    def rows(self) -> int:
        return self.groups * _GROUP_ROWS


# Three groups hide more of each other's waiting; two make smaller tiles, which fill the last wave better.
RINGS = (Ring(3, 64, 8, 128, 1.0), Ring(2, 128, 4, 168, 1.09))


def suits(lengths: Sequence[int], dim: int, dtype: torch.dtype) -> bool:
    """Float16 has too small a range for weights without a maximum."""
    return _FIRST < dim <= _FIRST + _REST and dtype == torch.bfloat16 and min(lengths) >= _LEAST_LENGTH


def choose_ring(lengths: Sequence[int], heads: int, multiprocessors: int) -> Ring:
    """The one whose waves of programs, one on each multiprocessor, take the least time."""

    def cost(ring: Ring) -> float:
        programs = heads * sum(-(-length // ring.rows) for length in lengths)
        return -(-programs // multiprocessors) * ring.rows * ring.row_cost

    return min(RINGS, key=cost)


class HopperVit:
    """Attention over one packing, layer after layer.

    After the first the compiled kernel is launched itself: to find it anew takes the host longer than the rest of a
    layer together, and nothing that it is chosen by changes.
    """

    def __init__(self, tiles: Tiles, ring: Ring) -> None:
        assert tiles.rows == ring.rows
        self.tiles = tiles
        self.ring = ring
        self._launch: Callable[..., object] | None = None

    def __call__(self, qkv: Tensor, scale: float) -> Tensor:
        """Contiguous q, k, v [T, 3, heads, d] -> [T, heads, d]."""
        tokens, _, heads, dim = qkv.shape
        assert qkv.is_contiguous()
        ring, tiles, rows = self.ring, self.tiles, qkv.view(tokens, -1)
        out = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
        descriptors = (_descriptor(rows, ring.keys, columns) for columns in (_FIRST, _REST))
        args = (*descriptors, qkv, tiles.starts, tiles.index, out, scale * LOG2_E)
        sizes = (dim, ring.keys, ring.stages, ring.groups)
        if self._launch is None:
            grid = (len(tiles.index), heads, 1)
            kernel = _vit_kernel[grid](*args, *sizes, num_warps=4, maxnreg=ring.registers)
            self._launch = kernel[grid]
        else:
            self._launch(*args, *sizes)
        return out


def _descriptor(rows: Tensor, keys: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [keys, columns], _layout(columns))


@lru_cache
def _layout(columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * columns, element_bitwidth=16, rank=2)


@gluon.jit(do_not_specialize_on_alignment=["starts", "index"])
def _vit_kernel(
    wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor,  # of all rows, for the parts of a head
    qkv: gl.tensor, starts: gl.tensor, index: gl.tensor, out: gl.tensor, scale: gl.tensor,
    DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
) -> None:  # fmt: skip
    picture, first = gl.load(index + 2 * gl.program_id(0)), gl.load(index + 2 * gl.program_id(0) + 1)
    start = gl.load(starts + picture)
    length = gl.load(starts + picture + 1) - start
    k1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 64], wide.layout)
    k2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 16], narrow.layout)
    v1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 64], wide.layout)
    v2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 16], narrow.layout)
    outgrown = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    outgrown.store(gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    # a stage is full, a stage is free again, everybody has said whether weights outgrew
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(STAGES + i), count=GROUPS)
    mbarrier.init(bars.index(2 * STAGES), count=GROUPS)
    fence_async_shared()
    shared = (k1, k2, v1, v2, bars, outgrown)
    place = (start, length, first)
    sizes: gl.constexpr = (DIM, KEYS, STAGES)
    if first < length:
        if GROUPS == 2:
            gl.warp_specialize(
                [
                    (_consume, (shared, qkv, out, scale, place, 0, sizes)),
                    (_consume, (shared, qkv, out, scale, place, 1, sizes)),
                    (_produce, (shared, wide, narrow, place, sizes)),
                ],
                [4, 1],
                [240, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (_consume, (shared, qkv, out, scale, place, 0, sizes)),
                    (_consume, (shared, qkv, out, scale, place, 1, sizes)),
                    (_consume, (shared, qkv, out, scale, place, 2, sizes)),
                    (_produce, (shared, wide, narrow, place, sizes)),
                ],
                [4, 4, 1],
                [160, 160, 24],
            )


# --- the producer -------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(
    shared: gl.tuple, wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor, place: gl.tuple, sizes: gl.constexpr
) -> None:
    stage, phase = _copy_all(shared, wide, narrow, place, gl.to_tensor(0), gl.to_tensor(0), sizes)
    if _has_outgrown(shared, 1, sizes):
        _copy_all(shared, wide, narrow, place, stage, phase, sizes)


@gluon.jit
def _copy_all(
    shared: gl.tuple, wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor, place: gl.tuple,
    stage: gl.tensor, phase: gl.tensor, sizes: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """The tiles of keys, each with the values of the tile before.

    The first tile is the picture's last rows, however many of them the other tiles have, too: no tile ever reaches into
    the next picture.
    """
    DIM: gl.constexpr = sizes[0]
    KEYS: gl.constexpr = sizes[1]
    STAGES: gl.constexpr = sizes[2]
    k1, k2, v1, v2, bars, _ = shared
    start, length, _ = place
    heads = gl.num_programs(1)
    key = (heads + gl.program_id(1)) * DIM
    value = key + heads * DIM
    tiles = (length + KEYS - 1) // KEYS
    before = start
    for j in range(tiles + 1):
        at = start + gl.where(j == 0, length - KEYS, (j - 1) * KEYS)
        full = bars.index(stage)
        mbarrier.wait(bars.index(STAGES + stage), phase ^ 1)
        mbarrier.expect(full, KEYS * 160, pred=(j == 0) | (j == tiles))
        mbarrier.expect(full, KEYS * 320, pred=(j > 0) & (j < tiles))
        _copy(wide, [at, key], full, k1.index(stage), pred=j < tiles)
        _copy(narrow, [at, key + 64], full, k2.index(stage), pred=j < tiles)
        _copy(wide, [before, value], full, v1.index(stage), pred=j > 0)
        _copy(narrow, [before, value + 64], full, v2.index(stage), pred=j > 0)
        before = at
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def following(stage: gl.tensor, phase: gl.tensor, STAGES: gl.constexpr) -> gl.tuple:
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


# --- the groups of rows -------------------------------------------------------------------------------------------


@gluon.jit
def _consume(
    shared: gl.tuple, qkv: gl.tensor, out: gl.tensor, scale: gl.tensor, place: gl.tuple,
    GROUP: gl.constexpr, sizes: gl.constexpr,
) -> None:  # fmt: skip
    DIM: gl.constexpr = sizes[0]
    STAGES: gl.constexpr = sizes[2]
    _, _, _, _, bars, outgrown = shared
    start, length, first = place
    mine = first + GROUP * 64
    q = _queries(qkv, start, length, mine, sizes)
    acc1, acc2, total, stage, phase = _attend(shared, q, scale, length, gl.to_tensor(0), gl.to_tensor(0), False, sizes)
    if gl.max(total, 0) > _MOST:
        outgrown.store(gl.full([128], 1, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(bars.index(2 * STAGES), count=1)
    if _has_outgrown(shared, 4, sizes):
        acc1, acc2, total, stage, phase = _attend(shared, q, scale, length, stage, phase, True, sizes)
    _write(out, acc1, total, start, length, mine, DIM, 0)
    _write(out, acc2, total, start, length, mine, DIM, 64)


@gluon.jit
def _has_outgrown(shared: gl.tuple, WARPS: gl.constexpr, sizes: gl.constexpr) -> gl.tensor:
    """Whether any group's weights did, once all have said so."""
    STAGES: gl.constexpr = sizes[2]
    _, _, _, _, bars, outgrown = shared
    mbarrier.wait(bars.index(2 * STAGES), 0)
    return gl.max(outgrown.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0) > 0


@gluon.jit
def _queries(qkv: gl.tensor, start: gl.tensor, length: gl.tensor, mine: gl.tensor, sizes: gl.constexpr) -> gl.tuple:
    """[64, 64] and [64, 16], the latter zero behind the head's end: where keys belong to the next head."""
    DIM: gl.constexpr = sizes[0]
    Q: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes[1], 16]), 2)
    heads = gl.num_programs(1)
    rows = mine + gl.arange(0, 64, layout=gl.SliceLayout(1, Q))
    here = qkv + (start + rows).to(gl.int64)[:, None] * (3 * heads * DIM) + gl.program_id(1) * DIM
    known = (rows < length)[:, None]
    dims = gl.arange(0, 64, layout=gl.SliceLayout(0, Q))[None, :]
    more = 64 + gl.arange(0, 16, layout=gl.SliceLayout(0, Q))[None, :]
    return gl.load(here + dims, mask=known, other=0.0), gl.load(here + more, mask=known & (more < DIM), other=0.0)


@gluon.jit
def _attend(
    shared: gl.tuple, q: gl.tuple, scale: gl.tensor, length: gl.tensor, stage: gl.tensor, phase: gl.tensor,
    IS_CAREFUL: gl.constexpr, sizes: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Sums of values [64, 64] and [64, 16], of weights [64], and where the ring stands then."""
    KEYS: gl.constexpr = sizes[1]
    STAGES: gl.constexpr = sizes[2]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    k1, k2, v1, v2, bars, _ = shared
    acc1 = gl.zeros([64, 64], gl.float32, layout=_SUMS1)
    acc2 = gl.zeros([64, 16], gl.float32, layout=_SUMS2)
    tiles = (length + KEYS - 1) // KEYS
    mbarrier.wait(bars.index(stage), phase)
    scores = warpgroup_mma_wait(0, deps=(_scores(q, k1.index(stage), k2.index(stage), KEYS),))
    mbarrier.arrive(bars.index(STAGES + stage), count=1)
    again = tiles * KEYS - length  # keys of this tile that others have, too
    scores = gl.where(gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))[None, :] >= again, scores, float("-inf"))
    level = gl.max(scores, 1) * scale
    if not IS_CAREFUL:
        level += _HEADROOM
    weights = gl.exp2(scores * scale - level[:, None])
    total = _partial_sums(weights, KEYS)
    ready = weights.to(gl.bfloat16)
    stage, phase = following(stage, phase, STAGES)
    for _ in range(1, tiles):
        mbarrier.wait(bars.index(stage), phase)
        scores = _scores(q, k1.index(stage), k2.index(stage), KEYS)
        acc1, acc2, ready1, ready2 = _add_values(ready, v1.index(stage), v2.index(stage), acc1, acc2)
        scores = warpgroup_mma_wait(2, deps=(scores,))
        shrink = level
        if IS_CAREFUL:
            larger = gl.maximum(level, gl.max(scores, 1) * scale)
            shrink = gl.exp2(level - larger)
            level = larger
            total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]
        weights = gl.exp2(scores * scale - level[:, None])
        total = before_waiting(total + _partial_sums(weights, KEYS))
        acc1, acc2, ready1, ready2 = warpgroup_mma_wait(0, deps=(acc1, acc2, ready1, ready2))
        ready = weights.to(gl.bfloat16)
        if IS_CAREFUL:
            acc1 = acc1 * gl.convert_layout(shrink, gl.SliceLayout(1, _SUMS1))[:, None]
            acc2 = acc2 * gl.convert_layout(shrink, gl.SliceLayout(1, _SUMS2))[:, None]
        mbarrier.arrive(bars.index(STAGES + stage), count=1)
        stage, phase = following(stage, phase, STAGES)
    mbarrier.wait(bars.index(stage), phase)
    acc1, acc2, ready1, ready2 = _add_values(ready, v1.index(stage), v2.index(stage), acc1, acc2)
    acc1, acc2, ready1, ready2 = warpgroup_mma_wait(0, deps=(acc1, acc2, ready1, ready2))
    mbarrier.arrive(bars.index(STAGES + stage), count=1)
    stage, phase = following(stage, phase, STAGES)
    return acc1, acc2, gl.sum(total, 1), stage, phase


@gluon.jit
def _scores(
    q: gl.tuple, k1: gl.shared_memory_descriptor, k2: gl.shared_memory_descriptor, KEYS: gl.constexpr
) -> gl.tensor:
    """On their way, in two groups of products."""
    none = gl.zeros([64, KEYS], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
    scores = warpgroup_mma(q[0], k1.permute((1, 0)), none, use_acc=False, is_async=True)
    return warpgroup_mma(q[1], k2.permute((1, 0)), scores, is_async=True)


@gluon.jit
def _add_values(
    ready: gl.tensor, v1: gl.shared_memory_descriptor, v2: gl.shared_memory_descriptor,
    acc1: gl.tensor, acc2: gl.tensor,
) -> gl.tuple:  # fmt: skip
    """On their way, in two groups of products. The weights come back: their registers must last as long."""
    ready1 = gl.convert_layout(ready, gl.DotOperandLayout(0, _SUMS1, 2), assert_trivial=True)
    ready2 = gl.convert_layout(ready, gl.DotOperandLayout(0, _SUMS2, 2), assert_trivial=True)
    acc1 = warpgroup_mma(ready1, v1, acc1, is_async=True)
    acc2 = warpgroup_mma(ready2, v2, acc2, is_async=True)
    return acc1, acc2, ready1, ready2


@gluon.jit
def _partial_sums(weights: gl.tensor, KEYS: gl.constexpr) -> gl.tensor:
    """[64, KEYS] -> [64, 8]: what a thread can add up alone, so that threads need not meet in every tile."""
    return gl.sum(gl.reshape(weights, [64, KEYS // 8, 8]), 1)


@gluon.jit
def before_waiting(total: gl.tensor) -> gl.tensor:
    """The same sums, and a promise that their weights exist before whatever follows.

    Without it the assembler moves the exponentials behind the wait for the products they are to be hidden by. Threads
    of a warp meet under a mask that only a negative sum could change, and there is none.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 sum; .reg .b32 mask; .reg .pred never;
        add.f32 sum, $4, $5; add.f32 sum, sum, $6; add.f32 sum, sum, $7;
        setp.lt.f32 never, sum, 0f00000000; selp.b32 mask, 1, 0xffffffff, never; bar.warp.sync mask;
        mov.f32 $0, $4; mov.f32 $1, $5; mov.f32 $2, $6; mov.f32 $3, $7;
        }""",
        "=f,=f,=f,=f,f,f,f,f", [total], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _write(
    out: gl.tensor, acc: gl.tensor, total: gl.tensor, start: gl.tensor, length: gl.tensor, mine: gl.tensor,
    DIM: gl.constexpr, FIRST: gl.constexpr,
) -> None:  # fmt: skip
    A: gl.constexpr = acc.type.layout
    rows = mine + gl.arange(0, 64, layout=gl.SliceLayout(1, A))
    dims = FIRST + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, A))[None, :]
    place = out + ((start + rows).to(gl.int64)[:, None] * gl.num_programs(1) + gl.program_id(1)) * DIM + dims
    result = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, A))[:, None]
    gl.store(place, result.to(gl.bfloat16), mask=(rows < length)[:, None] & (dims < DIM))
