"""Attention of one new token per request over paged keys and values for Hopper GPUs, in Gluon. Knows no model.

The same work as `paged_decode`, which stays the reference, but for rows of padding: nobody reads these, and they are
left as they are. As many programs as there are multiprocessors share all tiles of 64 keys evenly (`schedule`), so that
they end together and the memory never rests. In each:

    2 of 1 warp     copy keys and values into rings, the first ones before the projection has ended
    1 of 2 warps    turns queries and the new key, stores it, and hands both over
    1 of 4 warps    multiplies: scores^T = K q^T and sums^T = V^T weights^T, so that a tile fills the tensor cores

The new token stands in its tile as if it had been copied. Who has only a part of a request's tiles leaves its sums; the
last one to arrive adds them up.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saccade.kernels.attention.decode_combine import finish
from saccade.kernels.attention.decode_schedule import TileSchedule
from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens
from saccade.kernels.attention.hopper_ring import following
from saccade.kernels.attention.online_softmax import LOG2_E
from saccade.kernels.launch.tiling import power_of_two

_DIM = 128
_MAX_GROUP = 16
_BLOCK_SIZES = (16, 32, 64)
_REGISTERS = 144  # of a thread on average: a second program finds no room beside the first, one of a product does
_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name until Triton 3.7
_room = gl.shared_memory_descriptor
_seen_as = _room.reinterpret if hasattr(_room, "reinterpret") else _room._reinterpret  # its name in Triton 3.6


def suits(dim: int, group: int, dtype: torch.dtype, block_size: int) -> bool:
    """`group`: query heads that share one of keys."""
    return dim == _DIM and group <= _MAX_GROUP and dtype.itemsize == 2 and block_size in _BLOCK_SIZES


def choose_stages(group: int) -> int:
    """Two leave room for the rings of the products ahead and behind; where keys outweigh all else, depth counts."""
    return 3 if group == 1 else 2


def hopper_decode(
    new: NewTokens,
    k_cache: Tensor,  # [slots, kv_heads, 128], contiguous; so is v_cache
    v_cache: Tensor,
    block_tables: Tensor,  # int32 [requests, max_blocks]
    context_lens: Tensor,  # int32 [requests], the new token included; 0 for rows of padding, which come last
    schedule: TileSchedule,
    block_size: int,
    scale: float,
    workspace: DecodeWorkspace,
    out: Tensor | None = None,  # contiguous
) -> Tensor:  # [requests, heads, 128]; rows of padding hold whatever was there
    (requests, all_heads, dim), kv_heads = new.qkv.shape[-3:], k_cache.shape[1]
    heads, whole = all_heads - 2 * kv_heads, requests * all_heads * dim
    group, programs = heads // kv_heads, len(schedule.metadata)
    assert suits(dim, group, k_cache.dtype, block_size) and new.qkv.is_contiguous() and requests == schedule.requests
    assert 2 * programs * group * dim <= workspace.mixed.numel() and requests * kv_heads <= workspace.counters.numel()
    out = k_cache.new_empty(requests, heads, dim) if out is None else out
    _decode_kernel[(programs,)](
        _descriptor(k_cache, block_size), _descriptor(v_cache, block_size), *new, k_cache, v_cache, block_tables,
        context_lens, schedule.metadata, out, *workspace, scale * LOG2_E, block_tables.stride(0), whole,
        HEADS=kv_heads, GROUP=group, ROWS=power_of_two(group, least=8), BLOCK=block_size, STAGES=choose_stages(group),
        PARTS=new.qkv.numel() // whole, num_warps=4, maxnreg=_REGISTERS, launch_pdl=True,
    )  # fmt: skip
    return out


def _descriptor(cache: Tensor, block_size: int) -> TensorDescriptor:
    rows = cache.view(len(cache), -1)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [block_size, 64], _LAYOUT.value)


# Tables and numbers of a step change place and width from step to step; a variant for each would compile anew.
@gluon.jit(
    do_not_specialize=["table_row", "part"], do_not_specialize_on_alignment=["slots", "tables", "contexts", "schedule"]
)
def _decode_kernel(
    keys: tma.tensor_descriptor, values: tma.tensor_descriptor,  # of all slots, for half a head of a block
    qkv: gl.tensor, cos: gl.tensor, sin: gl.tensor, slots: gl.tensor, k_cache: gl.tensor, v_cache: gl.tensor,
    tables: gl.tensor, contexts: gl.tensor, schedule: gl.tensor, out: gl.tensor,
    mixed: gl.tensor, maxima: gl.tensor, sums: gl.tensor, counters: gl.tensor,
    scale: gl.tensor, table_row: gl.tensor, part: gl.tensor,
    HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr,
) -> None:  # fmt: skip
    k = gl.allocate_shared_memory(keys.dtype, [STAGES, 64, 128], _LAYOUT)
    v = gl.allocate_shared_memory(keys.dtype, [STAGES, 64, 128], _LAYOUT)
    q = gl.allocate_shared_memory(keys.dtype, [2, ROWS, 128], _LAYOUT)
    weights = gl.allocate_shared_memory(keys.dtype, [ROWS, 64], _LAYOUT)
    new = gl.allocate_shared_memory(keys.dtype, [4, 128], _PLAIN)  # key, value, and those of the next request
    # keys full, values full, keys free, values free; queries handed over, taken
    bars = gl.allocate_shared_memory(gl.int64, [4 * STAGES + 4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4 * STAGES + 4):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    mine = schedule + gl.program_id(0) * 10
    one, two = _section(mine, contexts), _section(mine + 4, contexts)
    cut = (gl.load(mine + 8), gl.load(mine + 9))
    walk = (contexts, one, two)
    sizes: gl.constexpr = (HEADS, GROUP, ROWS, BLOCK, STAGES, PARTS)
    shared = (k, v, q, weights, new, bars)
    found = (out, mixed, maxima, sums, counters)
    gl.warp_specialize(
        [
            (_multiply, (shared, walk, cut, found, scale, sizes)),
            (_rotate, (shared, walk, (qkv, cos, sin, slots, k_cache, v_cache), part, sizes)),
            (_produce, (keys, k, bars, walk, tables, table_row, 0, sizes)),
            (_produce, (values, v, bars, walk, tables, table_row, 1, sizes)),
        ],
        [2, 1, 1],
        [128, 40, 40],
    )


@gluon.jit
def _section(metadata: gl.tensor, contexts: gl.tensor) -> gl.tuple:
    """One of a share's two: request, head, tile and number of tiles, and the request's context."""
    request = gl.load(metadata)
    return request, gl.load(metadata + 1), gl.load(metadata + 2), gl.load(metadata + 3), gl.load(contexts + request)


@gluon.jit
def _enter(walk: gl.tuple, section: gl.tensor) -> gl.tuple:
    _, one, two = walk
    is_first = section == 0
    request, head = gl.where(is_first, one[0], two[0]), gl.where(is_first, one[1], two[1])
    tile, left = gl.where(is_first, one[2], two[2]), gl.where(is_first, one[3], two[3])
    return request, head, tile, left, gl.where(is_first, one[4], two[4])


@gluon.jit
def _stretch(context: gl.tensor, tile: gl.tensor, left: gl.tensor) -> gl.tuple:
    """A request's tiles, and how many of them from `tile` on are this program's."""
    tiles = gl.maximum(gl.cdiv(context, 64), 1)  # without one, those who copy and those who multiply would part ways
    return tiles, gl.minimum(tiles - tile, left)


@gluon.jit
def _look_ahead(
    contexts: gl.tensor, request: gl.tensor, head: gl.tensor, is_more: gl.tensor, HEADS: gl.constexpr
) -> gl.tuple:
    """The next request and head, and the context there, which is thus known when it is needed."""
    is_last = head == HEADS - 1
    request = gl.where(is_last & is_more, request + 1, request)
    return request, gl.where(is_last, 0, head + 1), gl.load(contexts + request)


# --- copying ------------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(
    source: tma.tensor_descriptor, target: gl.shared_memory_descriptor, bars: gl.shared_memory_descriptor,
    walk: gl.tuple, tables: gl.tensor, table_row: gl.tensor, KIND: gl.constexpr, sizes: gl.constexpr,
) -> None:  # fmt: skip
    """a tile in shared memory   | block 0 | block 1 | .. the first half | block 0 | block 1 | .. the second half |"""
    BLOCK: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    BLOCKS: gl.constexpr = 64 // BLOCK
    boxes = _seen_as(target, target.dtype, [STAGES * 2 * BLOCKS, BLOCK, 64], _LAYOUT)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for section in range(2):
        request, head, tile, left, context = _enter(walk, section)
        while left > 0:
            _, count = _stretch(context, tile, left)
            upcoming, other, coming = _look_ahead(walk[0], request, head, count < left, sizes[0])
            table = tables + request.to(gl.int64) * table_row
            for j in range(tile, tile + count):
                slots = _slots(table, j * BLOCKS, context, BLOCK, BLOCKS)
                full = bars.index(KIND * STAGES + stage)
                mbarrier.wait(bars.index((2 + KIND) * STAGES + stage), phase ^ 1)
                mbarrier.expect(full, 64 * 128 * 2)
                for i in gl.static_range(BLOCKS):
                    for half in gl.static_range(2):
                        box = boxes.index((stage * 2 + half) * BLOCKS + i)
                        _copy(source, [slots[i], head * 128 + half * 64], full, box)
                stage, phase = following(stage, phase, STAGES)
            left -= count
            request, head, context, tile = upcoming, other, coming, gl.to_tensor(0)


@gluon.jit
def _slots(
    table: gl.tensor, first: gl.tensor, context: gl.tensor, BLOCK: gl.constexpr, BLOCKS: gl.constexpr
) -> gl.tuple:
    """Where a tile's blocks begin. Behind the context's last block the table may say anything: that one again."""
    found: gl.tuple = ()
    for i in gl.static_range(BLOCKS):
        found = found + (gl.load(table + gl.minimum(first + i, (context - 1) // BLOCK)) * BLOCK,)  # noqa: RUF005
    return found


# --- what is new --------------------------------------------------------------------------------------------------


@gluon.jit
def _rotate(shared: gl.tuple, walk: gl.tuple, token: gl.tuple, part: gl.tensor, sizes: gl.constexpr) -> None:
    """Queries of one request and head after the other and, for the last tile, the new key and its value."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [2, 1], [1, 0])
    HEADS: gl.constexpr = sizes[0]
    GROUP: gl.constexpr = sizes[1]
    STAGES: gl.constexpr = sizes[4]
    q, bars = shared[2], shared[5]
    qkv, cos, sin = token[0], token[1], token[2]
    rows = gl.arange(0, sizes[2], layout=gl.SliceLayout(1, L))
    dims = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    inside = (rows < GROUP)[:, None] & (dims >= 0)[None, :]
    along, across = gl.load(cos + walk[1][0] * 128 + dims), gl.load(sin + walk[1][0] * 128 + dims)
    buffer, phase = gl.to_tensor(0), gl.to_tensor(0)
    gdc_launch_dependents()
    gdc_wait()
    for section in range(2):
        request, head, tile, left, context = _enter(walk, section)
        while left > 0:
            tiles, count = _stretch(context, tile, left)
            upcoming, other, coming = _look_ahead(walk[0], request, head, count < left, HEADS)
            own = qkv + request.to(gl.int64) * ((GROUP + 2) * HEADS * 128)
            first, angles = own + (head * GROUP + rows)[:, None] * 128, (along.to(gl.float32), across.to(gl.float32))
            queries = _rotated(
                first, dims[None, :], inside, angles[0][None, :], angles[1][None, :], part, q.dtype, sizes
            )
            mbarrier.wait(bars.index(4 * STAGES + 2 + buffer), phase ^ 1)
            q.index(buffer).store(queries)
            if tile + count == tiles:
                _hand_over(shared, token, own, angles, (request, head, context, buffer), dims, part, sizes)
            fence_async_shared()
            mbarrier.arrive(bars.index(4 * STAGES + buffer), count=1)
            buffer, phase = following(buffer, phase, 2)
            soon = gl.where(count < left, upcoming, walk[2][0])
            along, across = gl.load(cos + soon * 128 + dims), gl.load(sin + soon * 128 + dims)
            left -= count
            request, head, context, tile = upcoming, other, coming, gl.to_tensor(0)


@gluon.jit
def _hand_over(
    shared: gl.tuple, token: gl.tuple, own: gl.tensor, angles: gl.tuple, place: gl.tuple, dims: gl.tensor,
    part: gl.tensor, sizes: gl.constexpr,
) -> None:  # fmt: skip
    """The new key and its value, to the cache and to those who multiply."""
    HEADS: gl.constexpr = sizes[0]
    new = shared[4]
    _, _, _, slots, k_cache, v_cache = token
    request, head, context, buffer = place
    behind = own + sizes[1] * HEADS * 128
    key = _rotated(behind + head * 128, dims, dims >= 0, angles[0], angles[1], part, new.dtype, sizes)
    value = _projected(behind + (HEADS + head) * 128 + dims, dims >= 0, part, new.dtype, sizes)
    new.index(2 * buffer).store(key)
    new.index(2 * buffer + 1).store(value)
    slot = gl.load(slots + request).to(gl.int64)
    target, is_stored = (slot * HEADS + head) * 128 + dims, (dims >= 0) & (slot >= 0) & (context > 0)
    gl.store(k_cache + target, key, mask=is_stored)
    gl.store(v_cache + target, value, mask=is_stored)


@gluon.jit
def _rotated(
    rows: gl.tensor, dims: gl.tensor, inside: gl.tensor, along: gl.tensor, across: gl.tensor, part: gl.tensor,
    KIND: gl.constexpr, sizes: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Rows at these pointers, dimensions i and i + d / 2 of each turned as a pair."""
    one = _projected(rows + dims, inside, part, KIND, sizes).to(gl.float32)
    other = _projected(rows + (dims + 64) % 128, inside, part, KIND, sizes).to(gl.float32)
    return (one * along + other * across).to(KIND)


@gluon.jit
def _projected(
    place: gl.tensor, inside: gl.tensor, part: gl.tensor, KIND: gl.constexpr, sizes: gl.constexpr
) -> gl.tensor:
    """What was projected to these pointers, and so many elements further for each part."""
    found = gl.load(place, mask=inside, other=0.0)
    for i in gl.static_range(1, sizes[5]):
        found += gl.load(place + i * part, mask=inside, other=0.0)
    return found.to(KIND)


# --- multiplying --------------------------------------------------------------------------------------------------


@gluon.jit
def _multiply(
    shared: gl.tuple, walk: gl.tuple, cut: gl.tuple, found: gl.tuple, scale: gl.tensor, sizes: gl.constexpr
) -> None:
    STAGES: gl.constexpr = sizes[4]
    bars = shared[5]
    program = gl.program_id(0)
    begin = program * cut[0] + gl.minimum(program, cut[1])  # tiles before this share
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    buffer, turn = gl.to_tensor(0), gl.to_tensor(0)
    for section in range(2):
        request, head, tile, left, context = _enter(walk, section)
        first = gl.where(section == 0, begin + walk[2][3], begin)  # what comes first is the share's end
        while left > 0:
            tiles, count = _stretch(context, tile, left)
            upcoming, other, coming = _look_ahead(walk[0], request, head, count < left, sizes[0])
            state = _nothing(sizes)
            mbarrier.wait(bars.index(4 * STAGES + buffer), turn)
            for _ in range(tile, gl.minimum(tile + count, tiles - 1)):
                state = _step(shared, state, stage, phase, buffer, scale, context, False, sizes)
                stage, phase = following(stage, phase, STAGES)
            if tile + count == tiles:
                known = context - (tiles - 1) * 64
                state = _step(shared, state, stage, phase, buffer, scale, known, True, sizes)
                stage, phase = following(stage, phase, STAGES)
            mbarrier.arrive(bars.index(4 * STAGES + 2 + buffer), count=1)
            ours = (state[0], gl.sum(state[1], 0), state[2])
            span = (first - tile, tiles, count)
            finish(found, ours, request * sizes[0] + head, span, cut, (first == begin).to(gl.int32), sizes)
            buffer, turn = following(buffer, turn, 2)
            left -= count
            first += count
            request, head, context, tile = upcoming, other, coming, gl.to_tensor(0)


@gluon.jit
def _nothing(sizes: gl.constexpr) -> gl.tuple:
    """Sums of values, weights by key and head, and the largest score by head."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes[2], 16])
    acc, total = gl.zeros([128, sizes[2]], gl.float32, layout=S), gl.zeros([64, sizes[2]], gl.float32, layout=S)
    return acc, total, gl.full([sizes[2]], -1e30, gl.float32, layout=gl.SliceLayout(0, S))


@gluon.jit
def _step(
    shared: gl.tuple, state: gl.tuple, stage: gl.tensor, phase: gl.tensor, buffer: gl.tensor, scale: gl.tensor,
    known: gl.tensor, IS_LAST: gl.constexpr, sizes: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """One more tile. Of its keys so many are known, the new one included, which stands behind all others."""
    STAGES: gl.constexpr = sizes[4]
    k, v, q, weights, new, bars = shared
    acc, total, largest = state
    S: gl.constexpr = acc.type.layout
    mbarrier.wait(bars.index(stage), phase)
    if IS_LAST:
        _put_new(k, stage, new, 2 * buffer, known - 1, sizes)
    scores = gl.zeros([64, sizes[2]], gl.float32, layout=S)
    scores = warpgroup_mma(k.index(stage), q.index(buffer).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(bars.index(2 * STAGES + stage), count=1)
    if IS_LAST:
        scores = gl.where((gl.arange(0, 64, layout=gl.SliceLayout(1, S)) < known)[:, None], scores, float("-inf"))
    larger = gl.maximum(largest, gl.max(scores, 0) * scale)
    shrink = gl.exp2(largest - larger)
    each = gl.exp2(scores * scale - larger[None, :])
    weights.permute((1, 0)).store(each.to(weights.dtype))
    fence_async_shared()
    acc = acc * shrink[None, :]
    total = total * shrink[None, :] + each
    mbarrier.wait(bars.index(STAGES + stage), phase)
    if IS_LAST:
        _put_new(v, stage, new, 2 * buffer + 1, known - 1, sizes)
    acc = warpgroup_mma(v.index(stage).permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(bars.index(3 * STAGES + stage), count=1)
    return acc, total, larger


@gluon.jit
def _put_new(
    ring: gl.shared_memory_descriptor, stage: gl.tensor, new: gl.shared_memory_descriptor, which: gl.tensor,
    place: gl.tensor, sizes: gl.constexpr,
) -> None:  # fmt: skip
    """The new row into its place, nought behind it: a weight of nought cannot undo a NaN that others left there."""
    BLOCK: gl.constexpr = sizes[3]
    BLOCKS: gl.constexpr = 64 // BLOCK
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    boxes = _seen_as(ring, ring.dtype, [sizes[4] * 2 * BLOCKS, BLOCK, 64], _LAYOUT)
    halves = _seen_as(new, new.dtype, [8, 64], _PLAIN)
    rows = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
    for i in range(place // BLOCK, BLOCKS):
        here = (i * BLOCK + rows)[:, None]
        for half in gl.static_range(2):
            box = boxes.index((stage * 2 + half) * BLOCKS + i)
            row = halves.index(which * 2 + half).load(gl.SliceLayout(0, L))[None, :]
            nought = gl.zeros([BLOCK, 64], ring.dtype, layout=L)
            box.store(gl.where(here < place, box.load(L), gl.where(here == place, row, nought)))
    fence_async_shared()
