"""Attention of new tokens over paged keys and values for Hopper GPUs, in Gluon. Knows blocks and windows, no model.

The same work as `paged_prefill`, which stays the reference, with the tricks of `hopper_vit`: a level for the weights
that the first tile fixes, and the exponentials of a tile while values of the one before it are still multiplied.

    producers, 4 of 1 warp   copy blocks of 16 tokens, half a head each,   | K0 . | K1 V0 | K2 V1 | .. | . Vn |
                             into a ring of stages; one would be too slow
    2 groups of 4 warps,     multiply; a tile that only later rows see whole is masked, all others are not
    64 rows each

Every row sees the first key of its program's first tile, so that the level exists; where a split's keys are all behind
a row, what it leaves is not a number, and nobody reads it.
"""

from __future__ import annotations

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

from saccade.kernels.attention.hopper_ring import before_waiting, following
from saccade.kernels.attention.online_softmax import LOG2_E
from saccade.kernels.attention.prefill_combine import MAX_SPLITS, Parts, combine, new_parts
from saccade.kernels.launch.device import num_sms
from saccade.kernels.launch.tiling import Tiles

ROWS = 128  # of a tile: two groups of 64
_DIM = 128
_KEYS, _STAGES, _REGISTERS = 128, 3, 168  # registers of a thread on average over all roles
_HALF = 64  # numbers of a head that a copy takes: as wide as shared memory is swizzled
_BLOCK_SIZES = (16, 32, 64, 128)  # that fill a tile and are whole swizzles
_MIN_SHARE = 512  # keys of a split: fewer are done before it has begun
_MIN_SPLITS = 4  # fewer do not pay for their sum where contexts are short
_HEAD = gl.constexpr(_DIM)
_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # scores, and sums of values alike
_HEADROOM = gl.constexpr(32.0)  # the level lies so many powers of two above what the first tile shows
_MOST = gl.constexpr(2.0**90)  # sums of weights beyond this are not trusted
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name until Triton 3.7
_room = gl.shared_memory_descriptor
_seen_as = _room.reinterpret if hasattr(_room, "reinterpret") else _room._reinterpret  # its name in Triton 3.6


def suits(dim: int, dtype: torch.dtype, block_size: int) -> bool:
    """Float16 has too small a range for weights without a maximum."""
    return dim == _DIM and dtype == torch.bfloat16 and block_size in _BLOCK_SIZES


def choose_splits(tokens: int, heads: int, num_sms: int) -> int:
    """As many as give each multiprocessor at most one program, where those are more than a few."""
    wanted = num_sms // (heads * -(-tokens // ROWS))
    return min(wanted, MAX_SPLITS) if wanted >= _MIN_SPLITS else 1


def hopper_prefill(
    q: Tensor,  # [T, heads, 128], last dimension dense
    k_cache: Tensor,  # [slots, kv_heads, 128]
    v_cache: Tensor,
    block_tables: Tensor,  # int32 [requests, max_blocks]
    context_lens: Tensor,  # int32 [requests], on the device; the new tokens included
    tiles: Tiles,  # of the windows' lengths
    block_size: int,
    scale: float,
    *,
    splits: int | None = None,
    out: Tensor | None = None,  # contiguous
) -> Tensor:
    """[T, heads, 128]"""
    tokens, heads, dim = q.shape
    assert tiles.rows == ROWS and suits(dim, q.dtype, block_size)
    splits = splits or choose_splits(tokens, heads, num_sms(q.device))
    out = q.new_empty(tokens, heads, dim) if out is None else out
    parts = new_parts(splits, out) if splits > 1 else _no_parts(out)
    _prefill_kernel[(heads, len(tiles.index), splits)](
        _descriptor(k_cache, block_size), _descriptor(v_cache, block_size), q, block_tables, context_lens,
        tiles.starts, tiles.index, out, *parts, tokens * heads,
        scale * LOG2_E, q.stride(0), block_tables.stride(0),
        Q_HEAD=q.stride(1), HEADS=heads // k_cache.shape[1], BLOCK=block_size, KEYS=_KEYS, STAGES=_STAGES,
        MIN_SHARE=_MIN_SHARE // _KEYS, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip
    if splits > 1:
        combine(parts, out)
    return out


def _no_parts(out: Tensor) -> Parts:
    """Never written, and of the right types: a kernel without them would be another one to compile."""
    return Parts(*(out.view(torch.float32),) * 3, out.view(torch.int32))


def _descriptor(cache: Tensor, block_size: int) -> TensorDescriptor:
    rows = cache.view(len(cache), -1)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [block_size, _HALF], _LAYOUT.value)


# Tables and numbers of a step change place and width from step to step; a variant for each would compile anew.
@gluon.jit(
    do_not_specialize=["table_row", "cells"],
    do_not_specialize_on_alignment=["tables", "contexts", "starts", "index", "maxima", "sums"],
)
def _prefill_kernel(
    keys: tma.tensor_descriptor, values: tma.tensor_descriptor,  # of all slots, for half a head of a block
    q: gl.tensor, tables: gl.tensor, contexts: gl.tensor, starts: gl.tensor, index: gl.tensor, out: gl.tensor,
    mixed: gl.tensor, maxima: gl.tensor, sums: gl.tensor, active: gl.tensor, cells: gl.tensor,
    scale: gl.tensor, q_row: gl.tensor, table_row: gl.tensor,
    Q_HEAD: gl.constexpr, HEADS: gl.constexpr,  # that share one of keys
    BLOCK: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, MIN_SHARE: gl.constexpr,
) -> None:  # fmt: skip
    request, first = gl.load(index + 2 * gl.program_id(1)), gl.load(index + 2 * gl.program_id(1) + 1)
    start, context = gl.load(starts + request), gl.load(contexts + request)
    length = gl.load(starts + request + 1) - start
    share = gl.maximum(MIN_SHARE, gl.cdiv(gl.cdiv(context, KEYS), gl.num_programs(2)))  # of a split, in tiles
    low = gl.program_id(2) * share
    end = gl.minimum(low + share, gl.cdiv(gl.minimum(context, context - length + first + 128), KEYS))
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 128], _LAYOUT)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 128], _LAYOUT)
    outgrown = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    outgrown.store(gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    # a stage is full, a stage is free again, everybody has said whether weights outgrew
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=4)
        mbarrier.init(bars.index(STAGES + i), count=2)
    mbarrier.init(bars.index(2 * STAGES), count=2)
    fence_async_shared()
    shared = (k, v, bars, outgrown)
    span = (low, end, context)  # tiles, and keys that exist
    work = (q, q_row, (out, mixed, maxima, sums, active, cells), scale, span, (start, length, first, share))
    table = tables + request.to(gl.int64) * table_row
    sizes: gl.constexpr = (BLOCK, KEYS, STAGES, HEADS, Q_HEAD)
    if (first < length) & (low < end):
        gl.warp_specialize(
            [
                (_consume, (shared, work, 0, sizes)),
                (_consume, (shared, work, 1, sizes)),
                (_produce, (shared, keys, k, table, span, 0, 0, sizes)),
                (_produce, (shared, keys, k, table, span, 0, 1, sizes)),
                (_produce, (shared, values, v, table, span, 1, 0, sizes)),
                (_produce, (shared, values, v, table, span, 1, 1, sizes)),
            ],
            [4, 1, 1, 1, 1],
            [232, 40, 40, 40, 40],
        )


# --- the producers ------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(
    shared: gl.tuple, source: tma.tensor_descriptor, target: gl.shared_memory_descriptor, table: gl.tensor,
    span: gl.tuple, BEHIND: gl.constexpr, HALF: gl.constexpr, sizes: gl.constexpr,
) -> None:  # fmt: skip
    none = gl.to_tensor(0)
    stage, phase = _copy_all(shared, source, target, table, span, none, none, BEHIND, HALF, sizes)
    if _has_outgrown(shared, 1, sizes):
        _copy_all(shared, source, target, table, span, stage, phase, BEHIND, HALF, sizes)


@gluon.jit
def _copy_all(
    shared: gl.tuple, source: tma.tensor_descriptor, target: gl.shared_memory_descriptor, table: gl.tensor,
    span: gl.tuple, stage: gl.tensor, phase: gl.tensor, BEHIND: gl.constexpr, HALF: gl.constexpr, sizes: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """One half of the heads' numbers, of keys or, a stage behind them, of values.

    a tile in shared memory   | block 0 | block 1 | .. the first half | block 0 | block 1 | .. the second half |
    """
    BLOCK: gl.constexpr = sizes[0]
    BLOCKS: gl.constexpr = sizes[1] // BLOCK
    STAGES: gl.constexpr = sizes[2]
    bars = shared[2]
    low, end, context = span
    column = gl.program_id(0) // sizes[3] * _HEAD + HALF * 64
    boxes = _seen_as(target, gl.bfloat16, [STAGES * 2 * BLOCKS, BLOCK, 64], _LAYOUT)
    for j in range(low, end + 1):
        tile = j - BEHIND
        is_copied = (tile >= low) & (tile < end)
        slots = _slots(table, gl.maximum(tile, 0) * BLOCKS, context, BLOCK, BLOCKS)
        full = bars.index(stage)
        mbarrier.wait(bars.index(STAGES + stage), phase ^ 1)
        mbarrier.expect(full, BLOCKS * BLOCK * 128, pred=is_copied)
        mbarrier.arrive(full, count=1, pred=~is_copied)
        for i in gl.static_range(BLOCKS):
            box = boxes.index((stage * 2 + HALF) * BLOCKS + i)
            _copy(source, [slots[i], column], full, box, pred=is_copied)
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _slots(
    table: gl.tensor, first: gl.tensor, context: gl.tensor, BLOCK: gl.constexpr, BLOCKS: gl.constexpr
) -> gl.tuple:
    """Where a tile's blocks begin. Behind the context's last block the table may say anything: that one again."""
    found: gl.tuple = ()
    for i in gl.static_range(BLOCKS):
        found = found + (gl.load(table + gl.minimum(first + i, (context - 1) // BLOCK)) * BLOCK,)  # noqa: RUF005
    return found


# --- the groups of rows -------------------------------------------------------------------------------------------


@gluon.jit
def _consume(shared: gl.tuple, work: gl.tuple, GROUP: gl.constexpr, sizes: gl.constexpr) -> None:
    bars, outgrown = shared[2], shared[3]
    q, q_row, result, scale, span, place = work
    start, length, first, share = place
    mine = first + GROUP * 64
    past = span[2] - length + mine  # keys before the first row's own
    queries = _queries(q, q_row, start + mine, length - mine, sizes)
    none = gl.to_tensor(0)
    acc, level, total, stage, phase = _attend(shared, queries, scale, span, past, none, none, False, sizes)
    if gl.max(total, 0) > _MOST:
        outgrown.store(gl.full([128], 1, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(bars.index(2 * sizes[2]), count=1)
    if _has_outgrown(shared, 4, sizes):
        acc, level, total, stage, phase = _attend(shared, queries, scale, span, past, stage, phase, True, sizes)
    if share * sizes[1] >= span[2]:
        _write(result, acc, total, start + mine, length - mine)
    else:
        _leave(result, acc, level, total, start + mine, length - mine, past, share * sizes[1])


@gluon.jit
def _has_outgrown(shared: gl.tuple, WARPS: gl.constexpr, sizes: gl.constexpr) -> gl.tensor:
    """Whether any group's weights did, once all have said so."""
    mbarrier.wait(shared[2].index(2 * sizes[2]), 0)
    return gl.max(shared[3].load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0) > 0


@gluon.jit
def _queries(q: gl.tensor, q_row: gl.tensor, start: gl.tensor, count: gl.tensor, sizes: gl.constexpr) -> gl.tensor:
    """[64, 128], in registers"""
    Q: gl.constexpr = gl.DotOperandLayout(0, _TILE, 2)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, Q))
    dims = gl.arange(0, 128, layout=gl.SliceLayout(0, Q))[None, :]
    here = q + (start + rows).to(gl.int64)[:, None] * q_row + gl.program_id(0) * sizes[4]
    return gl.load(here + dims, mask=(rows < count)[:, None], other=0.0)


@gluon.jit
def _attend(
    shared: gl.tuple, q: gl.tensor, scale: gl.tensor, span: gl.tuple, past: gl.tensor, stage: gl.tensor,
    phase: gl.tensor, IS_CAREFUL: gl.constexpr, sizes: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Sums of values [64, 128], level and sums of weights [64], and where the ring stands then."""
    KEYS: gl.constexpr = sizes[1]
    STAGES: gl.constexpr = sizes[2]
    k, v, bars, _ = shared
    low, end, context = span
    mbarrier.wait(bars.index(stage), phase)
    scores = warpgroup_mma_wait(0, deps=(_scores(q, k.index(stage)),))
    mbarrier.arrive(bars.index(STAGES + stage), count=1)
    scores = _masked(scores, past - low * KEYS)
    level = gl.max(scores, 1) * scale
    if not IS_CAREFUL:
        level += _HEADROOM
    weights = gl.exp2(scores * scale - level[:, None])
    state = (gl.zeros([64, 128], gl.float32, layout=_TILE), level, _partial_sums(weights), weights.to(gl.bfloat16))
    stage, phase = following(stage, phase, STAGES)
    masked = gl.minimum(end, (past + 1) // KEYS)  # the first tile that not every row sees whole
    if IS_CAREFUL:
        masked = low + 1  # fewer loops to compile, for what hardly ever runs
    for _ in range(low + 1, masked):
        state = _step(shared, q, scale, state, stage, phase, past, False, IS_CAREFUL, sizes)
        stage, phase = following(stage, phase, STAGES)
    for j in range(gl.maximum(low + 1, masked), end):
        state = _step(shared, q, scale, state, stage, phase, past - j * KEYS, True, IS_CAREFUL, sizes)
        stage, phase = following(stage, phase, STAGES)
    acc, level, total, ready = state
    mbarrier.wait(bars.index(stage), phase)
    _forget_strangers(v, stage, context - (end - 1) * KEYS, sizes)
    acc, ready = warpgroup_mma_wait(0, deps=_add_values(ready, v.index(stage), acc))
    mbarrier.arrive(bars.index(STAGES + stage), count=1)
    stage, phase = following(stage, phase, STAGES)
    return acc, level, gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, _TILE)), stage, phase


@gluon.jit
def _step(
    shared: gl.tuple, q: gl.tensor, scale: gl.tensor, state: gl.tuple, stage: gl.tensor, phase: gl.tensor,
    past: gl.tensor, IS_MASKED: gl.constexpr, IS_CAREFUL: gl.constexpr, sizes: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """The scores of a tile, the values of the one before."""
    k, v, bars, _ = shared
    acc, level, total, ready = state
    mbarrier.wait(bars.index(stage), phase)
    scores = _scores(q, k.index(stage))
    acc, ready = _add_values(ready, v.index(stage), acc)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if IS_MASKED:
        scores = _masked(scores, past)
    shrink = level
    if IS_CAREFUL:
        larger = gl.maximum(level, gl.max(scores, 1) * scale)
        shrink = gl.exp2(level - larger)
        level = larger
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]
    weights = gl.exp2(scores * scale - level[:, None])
    total = before_waiting(total + _partial_sums(weights))
    acc, ready = warpgroup_mma_wait(0, deps=(acc, ready))
    ready = weights.to(gl.bfloat16)
    if IS_CAREFUL:
        acc = acc * shrink[:, None]
    mbarrier.arrive(bars.index(sizes[2] + stage), count=1)
    return acc, level, total, ready


@gluon.jit
def _masked(scores: gl.tensor, past: gl.tensor) -> gl.tensor:
    """-inf where a key, counted from the tile's first, is behind the row's own."""
    own = past + gl.arange(0, 64, layout=gl.SliceLayout(1, _TILE))
    return gl.where(gl.arange(0, 128, layout=gl.SliceLayout(0, _TILE))[None, :] <= own[:, None], scores, float("-inf"))


@gluon.jit
def _forget_strangers(v: gl.shared_memory_descriptor, stage: gl.tensor, count: gl.tensor, sizes: gl.constexpr) -> None:
    """Zero in the last tile what is behind the context: a weight of nought cannot undo a NaN left there.

    Both groups do so, neither waits for the other: they write the same.
    """
    BLOCK: gl.constexpr = sizes[0]
    BLOCKS: gl.constexpr = sizes[1] // BLOCK
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    boxes = _seen_as(v, gl.bfloat16, [sizes[2] * 2 * BLOCKS, BLOCK, 64], _LAYOUT)
    rows = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
    for i in range(count // BLOCK, BLOCKS):
        for half in gl.static_range(2):
            box = boxes.index((stage * 2 + half) * BLOCKS + i)
            box.store(gl.where((i * BLOCK + rows < count)[:, None], box.load(L), 0.0))
    fence_async_shared()


@gluon.jit
def _scores(q: gl.tensor, k: gl.shared_memory_descriptor) -> gl.tensor:
    """On their way."""
    none = gl.zeros([64, 128], gl.float32, layout=_TILE)
    return warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _add_values(ready: gl.tensor, v: gl.shared_memory_descriptor, acc: gl.tensor) -> gl.tuple:
    """On their way. The weights come back: their registers must last as long."""
    ready = gl.convert_layout(ready, gl.DotOperandLayout(0, _TILE, 2), assert_trivial=True)
    return warpgroup_mma(ready, v, acc, is_async=True), ready


@gluon.jit
def _partial_sums(weights: gl.tensor) -> gl.tensor:
    """[64, 128] -> [64, 8]: what a thread can add up alone, so that threads need not meet in every tile."""
    return gl.sum(gl.reshape(weights, [64, 16, 8]), 1)


@gluon.jit
def _write(result: gl.tuple, acc: gl.tensor, total: gl.tensor, start: gl.tensor, count: gl.tensor) -> None:
    """What one split has found alone; others of the launch may have something to add up."""
    out, active = result[0], result[4]
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, _TILE))
    known, packed = rows < count, (start + rows).to(gl.int64)
    cell = packed * gl.num_programs(0) + gl.program_id(0)
    place = out + cell[:, None] * _HEAD + gl.arange(0, 128, layout=gl.SliceLayout(0, _TILE))[None, :]
    gl.store(place, (acc * (1.0 / total)[:, None]).to(gl.bfloat16), mask=known[:, None])
    if (gl.program_id(0) == 0) & (gl.num_programs(2) > 1):
        gl.store(active + packed, gl.zeros_like(rows), mask=known)


@gluon.jit
def _leave(
    result: gl.tuple, acc: gl.tensor, level: gl.tensor, total: gl.tensor, start: gl.tensor, count: gl.tensor,
    past: gl.tensor, share: gl.tensor,
) -> None:  # fmt: skip
    """A split's sums, and from its first the number of those that have keys for a row."""
    _, mixed, maxima, sums, active, cells = result
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, _TILE))
    dims = gl.arange(0, 128, layout=gl.SliceLayout(0, _TILE))[None, :]
    known, packed = rows < count, (start + rows).to(gl.int64)
    part = gl.program_id(2).to(gl.int64) * cells + packed * gl.num_programs(0) + gl.program_id(0)
    gl.store(mixed + part[:, None] * _HEAD + dims, acc, mask=known[:, None])
    gl.store(maxima + part, level, mask=known)
    gl.store(sums + part, total, mask=known)
    if (gl.program_id(0) == 0) & (gl.program_id(2) == 0):
        gl.store(active + packed, (past + rows) // share + 1, mask=known)
