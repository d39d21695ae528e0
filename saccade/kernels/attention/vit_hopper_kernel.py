"""What `hopper_vit` runs on the device, in Gluon. Knows items of work, not how they were shared out.

One program on each multiprocessor goes through its items (see `vit_shares`). Four roles run side by side in it and meet
at barriers only:

    producer, 1 warp       copies keys and values into a ring of stages   | K0 . | K1 V0 | K2 V1 | .. | . Vn | K0 . | ..
    3 groups of 4 warps,   scores of tile j and the values of tile j - 1 are multiplied together, so that the
    64 rows each           exponentials of tile j are taken while the tensor cores still work

The ring goes on from item to item: keys and queries of the next one are there when the last result is written.

Weights are powers of two above a level that is fixed by the first tile: nothing already summed is ever rescaled, and no
maximum is looked for. Should a row's weights outgrow float32's range all the same, the program starts over and takes
the careful way, with a maximum that moves.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saccade.kernels.attention.hopper_ring import before_waiting, following
from saccade.kernels.attention.vit_combine import CELL

_SUMS1 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of values, in registers
_SUMS2 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
_HEADROOM = gl.constexpr(32.0)  # the level lies so many powers of two above what the first tile shows
_MOST = gl.constexpr(2.0**90)  # sums of weights beyond this are not trusted
_SPARE = gl.constexpr(CELL)
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name until Triton 3.7


@gluon.jit(do_not_specialize=["heads"], do_not_specialize_on_alignment=["offsets", "items"])
def vit_kernel(
    wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor,  # of all rows, for the parts of a head
    offsets: gl.tensor, items: gl.tensor, out: gl.tensor, parts: gl.tensor, scale: gl.tensor,
    heads: gl.tensor, DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, IS_PARTED: gl.constexpr,
) -> None:  # fmt: skip
    gdc_launch_dependents()  # what adds up parts waits for all of them, but may take every multiprocessor that is free
    share = (gl.load(offsets + gl.program_id(0)), gl.load(offsets + gl.program_id(0) + 1))
    k1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 64], wide.layout)
    k2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 16], narrow.layout)
    v1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 64], wide.layout)
    v2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 16], narrow.layout)
    q1 = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 64], wide.layout)
    q2 = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 16], narrow.layout)
    outgrown = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    outgrown.store(gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    # a stage is full, a stage is free again; everybody has said whether weights outgrew; queries are there, are taken
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(STAGES + i), count=3)
    mbarrier.init(bars.index(2 * STAGES), count=3)
    mbarrier.init(bars.index(2 * STAGES + 1), count=1)
    mbarrier.init(bars.index(2 * STAGES + 2), count=3)
    fence_async_shared()
    shared = (k1, k2, v1, v2, q1, q2, bars, outgrown)
    tensors = (items, out, parts, heads)
    sizes: gl.constexpr = (DIM, KEYS, STAGES, IS_PARTED)
    gdc_wait()  # for the queries, keys and values
    if share[0] < share[1]:
        gl.warp_specialize(
            [
                (_consume, (shared, tensors, scale, share, 0, sizes)),
                (_consume, (shared, tensors, scale, share, 1, sizes)),
                (_consume, (shared, tensors, scale, share, 2, sizes)),
                (_produce, (shared, wide, narrow, (items, heads), share, sizes)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


# --- the producer -------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(
    shared: gl.tuple, wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor, work: gl.tuple, share: gl.tuple,
    sizes: gl.constexpr,
) -> None:  # fmt: skip
    stage, phase, turn = _copy_all(
        shared, wide, narrow, work, share, gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), sizes
    )
    if _has_outgrown(shared, 1, sizes):
        _copy_all(shared, wide, narrow, work, share, stage, phase, turn, sizes)


@gluon.jit
def _copy_all(
    shared: gl.tuple, wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor, work: gl.tuple, share: gl.tuple,
    stage: gl.tensor, phase: gl.tensor, turn: gl.tensor, sizes: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    items, heads = work
    for i in range(share[0], share[1]):
        _copy_queries(shared, wide, narrow, items + 8 * i, heads, turn, sizes)
        stage, phase = _copy_item(shared, wide, narrow, items + 8 * i, heads, stage, phase, sizes)
        turn ^= 1
    return stage, phase, turn


@gluon.jit
def _copy_queries(
    shared: gl.tuple, wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor, item: gl.tensor, heads: gl.tensor,
    turn: gl.tensor, sizes: gl.constexpr,
) -> None:  # fmt: skip
    """Of all groups, also rows that the item does not have: nothing is made of them."""
    STAGES: gl.constexpr = sizes[2]
    _, _, _, _, q1, q2, bars, _ = shared
    row = gl.load(item)
    first, rest = _columns(gl.load(item + 2), heads, sizes)
    full = bars.index(2 * STAGES + 1)
    mbarrier.wait(bars.index(2 * STAGES + 2), turn ^ 1)
    mbarrier.expect(full, 192 * 160)
    for group in gl.static_range(3):
        _copy(wide, [row + group * 64, first], full, q1.index(group))
        _copy(narrow, [row + group * 64, rest], full, q2.index(group))


@gluon.jit
def _columns(head: gl.tensor, heads: gl.tensor, sizes: gl.constexpr) -> gl.tuple:
    """Of a head's two parts among the queries. Parted: first those of 64 of all heads, then those of 16."""
    first, rest = head * sizes[0], head * sizes[0] + 64
    if sizes[3]:
        first, rest = head * 64, heads * 64 + head * 16
    return first, rest


@gluon.jit
def _copy_item(
    shared: gl.tuple, wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor, item: gl.tensor, heads: gl.tensor,
    stage: gl.tensor, phase: gl.tensor, sizes: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """The tiles of keys, each with the values of the tile before.

    A picture's first tile is its last rows, however many of them the other tiles have, too: no tile ever reaches into
    the next picture.
    """
    DIM: gl.constexpr = sizes[0]
    KEYS: gl.constexpr = sizes[1]
    STAGES: gl.constexpr = sizes[2]
    k1, k2, v1, v2, _, _, bars, _ = shared
    key, rest = _columns(gl.load(item + 2), heads, sizes)
    key, rest = key + heads * DIM, rest + heads * DIM
    value = (2 * heads + gl.load(item + 2)) * DIM
    start, length, first, tiles = gl.load(item + 3), gl.load(item + 4), gl.load(item + 5), gl.load(item + 6)
    at = start + gl.where(first == 0, length - KEYS, (first - 1) * KEYS)
    following_at = start + first * KEYS
    before = start  # a name of its own for the compiler: nothing reads it
    for j in range(tiles + 1):
        full = bars.index(stage)
        mbarrier.wait(bars.index(STAGES + stage), phase ^ 1)
        mbarrier.expect(full, KEYS * 160, pred=(j == 0) | (j == tiles))
        mbarrier.expect(full, KEYS * 320, pred=(j > 0) & (j < tiles))
        _copy(wide, [at, key], full, k1.index(stage), pred=j < tiles)
        _copy(narrow, [at, rest], full, k2.index(stage), pred=j < tiles)
        _copy(wide, [before, value], full, v1.index(stage), pred=j > 0)
        _copy(narrow, [before, value + 64], full, v2.index(stage), pred=j > 0)
        before, at, following_at = at, following_at, following_at + KEYS
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


# --- the groups of rows -------------------------------------------------------------------------------------------


@gluon.jit
def _consume(
    shared: gl.tuple, tensors: gl.tuple, scale: gl.tensor, share: gl.tuple, GROUP: gl.constexpr, sizes: gl.constexpr
) -> None:
    STAGES: gl.constexpr = sizes[2]
    _, _, _, _, _, _, bars, outgrown = shared
    largest, stage, phase, turn = _walk(
        shared, tensors, scale, share, gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), False, GROUP, sizes
    )
    if gl.max(largest, 0) > _MOST:
        outgrown.store(gl.full([128], 1, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(bars.index(2 * STAGES), count=1)
    if _has_outgrown(shared, 4, sizes):
        _walk(shared, tensors, scale, share, stage, phase, turn, True, GROUP, sizes)


@gluon.jit
def _has_outgrown(shared: gl.tuple, WARPS: gl.constexpr, sizes: gl.constexpr) -> gl.tensor:
    """Whether any group's weights did, once all have said so."""
    STAGES: gl.constexpr = sizes[2]
    _, _, _, _, _, _, bars, outgrown = shared
    mbarrier.wait(bars.index(2 * STAGES), 0)
    return gl.max(outgrown.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0) > 0


@gluon.jit
def _walk(
    shared: gl.tuple, tensors: gl.tuple, scale: gl.tensor, share: gl.tuple, stage: gl.tensor, phase: gl.tensor,
    turn: gl.tensor, IS_CAREFUL: gl.constexpr, GROUP: gl.constexpr, sizes: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """All items. Returns the largest sums of weights [64], and where ring and queries stand then."""
    items = tensors[0]
    _, _, _, _, _, _, bars, _ = shared
    largest = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, _SUMS1))
    for i in range(share[0], share[1]):
        item = items + 8 * i
        mbarrier.wait(bars.index(2 * sizes[2] + 1), turn)
        if gl.load(item + 1) > GROUP * 64:
            q = _queries(shared, GROUP, sizes)
            acc, total, level, ready, stage, phase = _attend(shared, q, scale, item, stage, phase, IS_CAREFUL, sizes)
            acc1, acc2, stage, phase = _last_values(shared, ready, acc, stage, phase, sizes)
            total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, _SUMS1))
            rows = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _SUMS1))
            largest = gl.maximum(largest, gl.where(rows < gl.load(item + 1), total, 0.0))  # others are nobody's
            _leave(tensors, item, acc1, acc2, total, level, GROUP, sizes)
        else:
            mbarrier.arrive(bars.index(2 * sizes[2] + 2), count=1)
            stage, phase = _pass_over(shared, gl.load(item + 6) + 1, stage, phase, sizes)
        turn ^= 1
    return largest, stage, phase, turn


@gluon.jit
def _queries(shared: gl.tuple, GROUP: gl.constexpr, sizes: gl.constexpr) -> gl.tuple:
    """[64, 64] and [64, 16], the latter zero behind the head's end: where keys belong to the next head."""
    Q: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes[1], 16]), 2)
    _, _, _, _, first, rest, _, _ = shared
    q1, q2 = first.index(GROUP).load(Q), rest.index(GROUP).load(Q)
    if sizes[0] < 80:
        known = gl.arange(0, 16, layout=gl.SliceLayout(0, Q))[None, :] < sizes[0] - 64
        q2 = gl.where(known, q2, gl.zeros([64, 16], gl.bfloat16, layout=Q))
    return q1, q2


@gluon.jit
def _pass_over(
    shared: gl.tuple, stages: gl.tensor, stage: gl.tensor, phase: gl.tensor, sizes: gl.constexpr
) -> gl.tuple:
    """A group that an item has no rows for leaves its stages to the others."""
    STAGES: gl.constexpr = sizes[2]
    _, _, _, _, _, _, bars, _ = shared
    for _ in range(stages):
        mbarrier.wait(bars.index(stage), phase)
        mbarrier.arrive(bars.index(STAGES + stage), count=1)
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _attend(
    shared: gl.tuple, q: gl.tuple, scale: gl.tensor, item: gl.tensor, stage: gl.tensor, phase: gl.tensor,
    IS_CAREFUL: gl.constexpr, sizes: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """Sums of values ([64, 64], [64, 16]) but for those of the last tile, sums of weights, their level, the weights of
    the last tile, and where the ring stands then."""
    KEYS: gl.constexpr = sizes[1]
    STAGES: gl.constexpr = sizes[2]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    k1, k2, v1, v2, _, _, bars, _ = shared
    length, first, tiles = gl.load(item + 4), gl.load(item + 5), gl.load(item + 6)
    acc1 = gl.zeros([64, 64], gl.float32, layout=_SUMS1)
    acc2 = gl.zeros([64, 16], gl.float32, layout=_SUMS2)
    mbarrier.wait(bars.index(stage), phase)
    scores = warpgroup_mma_wait(0, deps=(_scores(q, k1.index(stage), k2.index(stage), KEYS),))
    mbarrier.arrive(bars.index(STAGES + stage), count=1)
    # Not before: loads of queries may still be queued behind stores when a barrier hears that they were issued.
    mbarrier.arrive(bars.index(2 * STAGES + 2), count=1)
    again = gl.where(first == 0, (length + KEYS - 1) // KEYS * KEYS - length, 0)  # keys that another tile has, too
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
    return (acc1, acc2), total, level, ready, stage, phase


@gluon.jit
def _last_values(
    shared: gl.tuple, ready: gl.tensor, acc: gl.tuple, stage: gl.tensor, phase: gl.tensor, sizes: gl.constexpr
) -> gl.tuple:
    STAGES: gl.constexpr = sizes[2]
    _, _, v1, v2, _, _, bars, _ = shared
    mbarrier.wait(bars.index(stage), phase)
    acc1, acc2, ready1, ready2 = _add_values(ready, v1.index(stage), v2.index(stage), acc[0], acc[1])
    acc1, acc2, ready1, ready2 = warpgroup_mma_wait(0, deps=(acc1, acc2, ready1, ready2))
    mbarrier.arrive(bars.index(STAGES + stage), count=1)
    stage, phase = following(stage, phase, STAGES)
    return acc1, acc2, stage, phase


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
def _leave(
    tensors: gl.tuple, item: gl.tensor, acc1: gl.tensor, acc2: gl.tensor, total: gl.tensor, level: gl.tensor,
    GROUP: gl.constexpr, sizes: gl.constexpr,
) -> None:  # fmt: skip
    """The result, or where an item has only some of the keys, its sums: as `vit_sums` reads them."""
    DIM: gl.constexpr = sizes[0]
    _, _, parts, _ = tensors
    slot = gl.load(item + 7)
    if slot < 0:
        place = (gl.load(item), gl.load(item + 1), gl.load(item + 2))
        _write(tensors, acc1, total, place, GROUP, sizes, 0)
        _write(tensors, acc2, total, place, GROUP, sizes, 64)
    else:
        cells = parts + (slot * 192 + GROUP * 64) * (DIM + _SPARE)
        _keep(cells, acc1, sizes, 0)
        _keep(cells, acc2, sizes, 64)
        gl.store(cells + gl.arange(0, 64, layout=total.type.layout) * (DIM + _SPARE) + DIM, total)
        gl.store(cells + gl.arange(0, 64, layout=level.type.layout) * (DIM + _SPARE) + DIM + 1, level)


@gluon.jit
def _write(
    tensors: gl.tuple, acc: gl.tensor, total: gl.tensor, place: gl.tuple, GROUP: gl.constexpr, sizes: gl.constexpr,
    FIRST: gl.constexpr,
) -> None:  # fmt: skip
    DIM: gl.constexpr = sizes[0]
    A: gl.constexpr = acc.type.layout
    _, out, _, heads = tensors
    first, count, head = place
    rows = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, A))
    dims = FIRST + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, A))[None, :]
    cells = out + ((first + rows).to(gl.int64)[:, None] * heads + head) * DIM + dims
    result = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, A))[:, None]
    gl.store(cells, result.to(gl.bfloat16), mask=(rows < count)[:, None] & (dims < DIM))


@gluon.jit
def _keep(cells: gl.tensor, acc: gl.tensor, sizes: gl.constexpr, FIRST: gl.constexpr) -> None:
    DIM: gl.constexpr = sizes[0]
    A: gl.constexpr = acc.type.layout
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, A))[:, None]
    dims = FIRST + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, A))[None, :]
    gl.store(cells + rows * (DIM + _SPARE) + dims, acc, mask=dims < DIM)
