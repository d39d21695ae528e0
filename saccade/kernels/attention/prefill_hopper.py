"""Prefill attention (windows of new tokens) over the paged KV cache for Hopper GPUs, in Gluon.

Computes what `paged_prefill` does, which stays the reference. The exponentials of a tile overlap with the WGMMA of the
values of the tile before it; softmax weights are relative to a fixed level (`fixed_max_softmax`).

    producers, 4 of 1 warp   TMA loads of KV blocks, half a head each,   | K0 . | K1 V0 | K2 V1 | .. | . Vn |
                             into a ring of stages; one warp is too slow
    2 groups of 4 warps,     WGMMA; only tiles on the diagonal are masked
    64 rows each

Every row sees the first key of its program's first tile, so the level exists. Where all keys of a split come after a
row, its partial result is NaN and is never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.attention import fixed_max_softmax as softmax
from saccade.kernels.attention.decode_hopper import KV_LAYOUT, block_slots, kv_descriptor
from saccade.kernels.attention.online_softmax import LOG2_E
from saccade.kernels.attention.prefill_combine import MAX_SPLITS, Partials, combine, new_partials
from saccade.kernels.launch import gluon_compat as hopper
from saccade.kernels.launch.device import num_sms
from saccade.kernels.launch.gluon_compat import aggregate, gl, gluon, mbarrier, tma
from saccade.kernels.launch.hopper_pipeline import Barriers, next_stage
from saccade.kernels.launch.varlen_tiles import Tiles

ROWS = 128  # of a tile: two groups of 64
_DIM = 128
_KEYS = 128
_STAGES = 3
_REGISTERS = 168  # per thread, on average over all roles
_BLOCK_SIZES = (16, 32, 64, 128)  # that fill a tile and are whole swizzles
_MIN_SHARE = 512  # keys of a split: shorter ones cost more than they save
_MIN_SPLITS = 4  # fewer do not pay for the combine where contexts are short
_HEAD = gl.constexpr(_DIM)
_TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # of scores and of the accumulator


def suits(dim: int, dtype: torch.dtype, block_size: int) -> bool:
    """Float16 has too small a range for weights without a running maximum."""
    return dim == _DIM and dtype == torch.bfloat16 and block_size in _BLOCK_SIZES


def choose_splits(tokens: int, heads: int, num_sms: int) -> int:
    """As many as give each SM at most one program; 1 where that would be only a few."""
    wanted = num_sms // (heads * -(-tokens // ROWS))
    return min(wanted, MAX_SPLITS) if wanted >= _MIN_SPLITS else 1


def hopper_prefill(
    q: Tensor,  # [T, heads, 128], last dimension dense
    k_cache: Tensor,  # [slots, kv_heads, 128]
    v_cache: Tensor,
    block_tables: Tensor,  # int32 [requests, max_blocks]
    seq_lens: Tensor,  # int32 [requests], on the device; the new tokens included
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
    partials = new_partials(splits, out) if splits > 1 else _no_partials(out)
    _prefill_kernel[(heads, len(tiles.index), splits)](
        kv_descriptor(k_cache, block_size), kv_descriptor(v_cache, block_size), q, block_tables, seq_lens,
        tiles.starts, tiles.index, out, *partials, tokens * heads,
        scale * LOG2_E, q.stride(0), block_tables.stride(0),
        Q_HEAD=q.stride(1), GROUP=heads // k_cache.shape[1], BLOCK=block_size, KEYS=_KEYS, STAGES=_STAGES,
        MIN_SHARE=_MIN_SHARE // _KEYS, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip
    if splits > 1:
        combine(partials, out)
    return out


def _no_partials(out: Tensor) -> Partials:
    """Never written, but of the right types: without them another variant of the kernel would be compiled."""
    unused = out.view(torch.float32)
    return Partials(unused, unused, unused, out.view(torch.int32))


@aggregate
class _Sizes:
    BLOCK: gl.constexpr  # tokens of a KV block
    KEYS: gl.constexpr  # of a tile
    STAGES: gl.constexpr
    GROUP: gl.constexpr  # query heads per KV head
    Q_HEAD: gl.constexpr  # stride


@aggregate
class _Shared:
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    bars: Barriers
    overflowed: gl.shared_memory_descriptor


@aggregate
class _Keys:
    """Of a program."""

    low: gl.tensor  # the first tile, and the end
    end: gl.tensor
    seq_len: gl.tensor  # keys that exist


@aggregate
class _Window:
    """A request's new tokens, and the tile of queries among them."""

    start: gl.tensor  # packed row
    length: gl.tensor
    first: gl.tensor  # row of the tile
    share: gl.tensor  # tiles of keys of a split


@aggregate
class _Output:
    out: gl.tensor
    mixed: gl.tensor  # partial results, as in `Partials`
    maxima: gl.tensor
    sums: gl.tensor
    active: gl.tensor
    cells: gl.tensor


@aggregate
class _State:
    """Between two tiles."""

    acc: gl.tensor  # [64, 128]: sums of values
    level: gl.tensor  # [64]: what weights are relative to
    total: gl.tensor  # [64, 8]: sums of weights, by thread
    ready: gl.tensor  # [64, 128]: weights of the last tile, whose values are still to be added


# Step metadata changes alignment and width from step to step: each variant would be compiled anew.
@gluon.jit(
    do_not_specialize=["table_row", "cells"],
    do_not_specialize_on_alignment=["tables", "seq_lens", "starts", "index", "maxima", "sums"],
)
def _prefill_kernel(
    keys: tma.tensor_descriptor, values: tma.tensor_descriptor,  # of all slots; boxes of a block by half a head
    q: gl.tensor, tables: gl.tensor, seq_lens: gl.tensor, starts: gl.tensor, index: gl.tensor, out: gl.tensor,
    mixed: gl.tensor, maxima: gl.tensor, sums: gl.tensor, active: gl.tensor, cells: gl.tensor,
    scale: gl.tensor, q_row: gl.tensor, table_row: gl.tensor,
    Q_HEAD: gl.constexpr, GROUP: gl.constexpr,
    BLOCK: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, MIN_SHARE: gl.constexpr,
) -> None:  # fmt: skip
    request, first = gl.load(index + 2 * gl.program_id(1)), gl.load(index + 2 * gl.program_id(1) + 1)
    start, seq_len = gl.load(starts + request), gl.load(seq_lens + request)
    length = gl.load(starts + request + 1) - start
    share = gl.maximum(MIN_SHARE, gl.cdiv(gl.cdiv(seq_len, KEYS), gl.num_programs(2)))  # of a split, in tiles
    low = gl.program_id(2) * share
    end = gl.minimum(low + share, gl.cdiv(gl.minimum(seq_len, seq_len - length + first + 128), KEYS))
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 128], KV_LAYOUT)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 128], KV_LAYOUT)
    overflowed = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    overflowed.store(gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    bars = Barriers(gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout()), STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.full(i), count=4)
        mbarrier.init(bars.free(i), count=2)
    mbarrier.init(bars.extra(softmax.CHECKED), count=2)
    hopper.fence_async_shared()
    shared = _Shared(k, v, bars, overflowed)
    span = _Keys(low, end, seq_len)
    output = _Output(out, mixed, maxima, sums, active, cells)
    window = _Window(start, length, first, share)
    table = tables + request.to(gl.int64) * table_row
    sizes = _Sizes(BLOCK, KEYS, STAGES, GROUP, Q_HEAD)
    if (first < length) & (low < end):
        gl.warp_specialize(
            [
                (_consume, (shared, q, q_row, output, scale, span, window, 0, sizes)),
                (_consume, (shared, q, q_row, output, scale, span, window, 1, sizes)),
                (_produce, (shared, keys, k, table, span, 0, 0, sizes)),
                (_produce, (shared, keys, k, table, span, 0, 1, sizes)),
                (_produce, (shared, values, v, table, span, 1, 0, sizes)),
                (_produce, (shared, values, v, table, span, 1, 1, sizes)),
            ],
            [4, 1, 1, 1, 1],
            [232, 40, 40, 40, 40],
        )


@gluon.jit
def _produce(
    shared: _Shared, source: tma.tensor_descriptor, target: gl.shared_memory_descriptor, table: gl.tensor,
    span: _Keys, DELAY: gl.constexpr, HALF: gl.constexpr, sizes: _Sizes,
) -> None:  # fmt: skip
    none = gl.to_tensor(0)
    stage, phase = _load_all(shared, source, target, table, span, none, none, DELAY, HALF, sizes)
    if softmax.has_overflowed(shared.bars, shared.overflowed, 1):
        _load_all(shared, source, target, table, span, stage, phase, DELAY, HALF, sizes)


@gluon.jit
def _load_all(
    shared: _Shared, source: tma.tensor_descriptor, target: gl.shared_memory_descriptor, table: gl.tensor,
    span: _Keys, stage: gl.tensor, phase: gl.tensor, DELAY: gl.constexpr, HALF: gl.constexpr, sizes: _Sizes,
) -> gl.tuple:  # fmt: skip
    """One half of the head's dimensions, of keys or, one stage later, of values.

    a tile in shared memory   | block 0 | block 1 | .. the first half | block 0 | block 1 | .. the second half |
    """
    BLOCK: gl.constexpr = sizes.BLOCK
    BLOCKS: gl.constexpr = sizes.KEYS // BLOCK
    STAGES: gl.constexpr = sizes.STAGES
    column = gl.program_id(0) // sizes.GROUP * _HEAD + HALF * 64
    boxes = hopper.reinterpret(target, gl.bfloat16, [STAGES * 2 * BLOCKS, BLOCK, 64], KV_LAYOUT)
    for j in range(span.low, span.end + 1):
        tile = j - DELAY
        is_loaded = (tile >= span.low) & (tile < span.end)
        slots = block_slots(table, gl.maximum(tile, 0) * BLOCKS, span.seq_len, BLOCK, BLOCKS)
        full = shared.bars.full(stage)
        mbarrier.wait(shared.bars.free(stage), phase ^ 1)
        mbarrier.expect(full, BLOCKS * BLOCK * 128, pred=is_loaded)
        mbarrier.arrive(full, count=1, pred=~is_loaded)
        for i in gl.static_range(BLOCKS):
            box = boxes.index((stage * 2 + HALF) * BLOCKS + i)
            hopper.tma_load(source, [slots[i], column], full, box, pred=is_loaded)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _consume(
    shared: _Shared, q: gl.tensor, q_row: gl.tensor, output: _Output, scale: gl.tensor, keys: _Keys, window: _Window,
    ROW_GROUP: gl.constexpr, sizes: _Sizes,
) -> None:  # fmt: skip
    mine = window.first + ROW_GROUP * 64
    past = keys.seq_len - window.length + mine  # keys before the first row's own
    queries = _queries(q, q_row, window.start + mine, window.length - mine, sizes)
    none = gl.to_tensor(0)
    acc, level, total, stage, phase = _attend(shared, queries, scale, keys, past, none, none, False, sizes)
    softmax.report_overflow(shared.bars, shared.overflowed, total)
    if softmax.has_overflowed(shared.bars, shared.overflowed, 4):
        acc, level, total, stage, phase = _attend(shared, queries, scale, keys, past, stage, phase, True, sizes)
    if window.share * sizes.KEYS >= keys.seq_len:
        _write(output, acc, total, window.start + mine, window.length - mine)
    else:
        share = window.share * sizes.KEYS
        _write_partial(output, acc, level, total, window.start + mine, window.length - mine, past, share)


@gluon.jit
def _queries(q: gl.tensor, q_row: gl.tensor, start: gl.tensor, count: gl.tensor, sizes: _Sizes) -> gl.tensor:
    """[64, 128], in registers."""
    Q: gl.constexpr = gl.DotOperandLayout(0, _TILE, 2)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, Q))
    dims = gl.arange(0, 128, layout=gl.SliceLayout(0, Q))[None, :]
    here = q + (start + rows).to(gl.int64)[:, None] * q_row + gl.program_id(0) * sizes.Q_HEAD
    return gl.load(here + dims, mask=(rows < count)[:, None], other=0.0)


@gluon.jit
def _attend(
    shared: _Shared, q: gl.tensor, scale: gl.tensor, span: _Keys, past: gl.tensor, stage: gl.tensor,
    phase: gl.tensor, HAS_MAXIMUM: gl.constexpr, sizes: _Sizes,
) -> gl.tuple:  # fmt: skip
    """Sums of values [64, 128], level and sums of weights [64], and the stage and phase of the ring after that.

    HAS_MAXIMUM: the level is a running maximum.
    """
    KEYS: gl.constexpr = sizes.KEYS
    STAGES: gl.constexpr = sizes.STAGES
    v, bars = shared.v, shared.bars
    mbarrier.wait(bars.full(stage), phase)
    scores = hopper.warpgroup_mma_wait(0, deps=(_scores(q, shared.k.index(stage)),))
    mbarrier.arrive(bars.free(stage), count=1)
    scores = _masked(scores, past - span.low * KEYS)
    level = gl.max(scores, 1) * scale
    if not HAS_MAXIMUM:
        level += softmax.HEADROOM
    weights = gl.exp2(scores * scale - level[:, None])
    none = gl.zeros([64, 128], gl.float32, layout=_TILE)
    state = _State(none, level, softmax.partial_sums(weights), weights.to(gl.bfloat16))
    stage, phase = next_stage(stage, phase, STAGES)
    masked = gl.minimum(span.end, (past + 1) // KEYS)  # the first tile that some row sees only in part
    if HAS_MAXIMUM:
        masked = span.low + 1  # one loop less to compile: this hardly ever runs
    for _ in range(span.low + 1, masked):
        state = _step(shared, q, scale, state, stage, phase, past, False, HAS_MAXIMUM)
        stage, phase = next_stage(stage, phase, STAGES)
    for j in range(gl.maximum(span.low + 1, masked), span.end):
        state = _step(shared, q, scale, state, stage, phase, past - j * KEYS, True, HAS_MAXIMUM)
        stage, phase = next_stage(stage, phase, STAGES)
    mbarrier.wait(bars.full(stage), phase)
    _zero_after_context(v, stage, span.seq_len - (span.end - 1) * KEYS, sizes)
    acc, _ = hopper.warpgroup_mma_wait(0, deps=_add_values(state.ready, v.index(stage), state.acc))
    mbarrier.arrive(bars.free(stage), count=1)
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, state.level, gl.convert_layout(gl.sum(state.total, 1), gl.SliceLayout(1, _TILE)), stage, phase


@gluon.jit
def _step(
    shared: _Shared, q: gl.tensor, scale: gl.tensor, state: _State, stage: gl.tensor, phase: gl.tensor,
    past: gl.tensor, IS_MASKED: gl.constexpr, HAS_MAXIMUM: gl.constexpr,
) -> _State:  # fmt: skip
    """The scores of a tile, the values of the one before."""
    level, total = state.level, state.total
    mbarrier.wait(shared.bars.full(stage), phase)
    scores = _scores(q, shared.k.index(stage))
    acc, ready = _add_values(state.ready, shared.v.index(stage), state.acc)
    scores = hopper.warpgroup_mma_wait(1, deps=(scores,))
    if IS_MASKED:
        scores = _masked(scores, past)
    shrink = level
    if HAS_MAXIMUM:
        level, shrink, total = softmax.follow_maximum(scores, scale, level, total)
    weights = gl.exp2(scores * scale - level[:, None])
    total = softmax.before_waiting(total + softmax.partial_sums(weights))
    acc, ready = hopper.warpgroup_mma_wait(0, deps=(acc, ready))
    ready = weights.to(gl.bfloat16)
    if HAS_MAXIMUM:
        acc = acc * shrink[:, None]
    mbarrier.arrive(shared.bars.free(stage), count=1)
    return _State(acc, level, total, ready)


@gluon.jit
def _masked(scores: gl.tensor, past: gl.tensor) -> gl.tensor:
    """-inf where a key, counted from the tile's first, comes after the row's own."""
    own = past + gl.arange(0, 64, layout=gl.SliceLayout(1, _TILE))
    return gl.where(gl.arange(0, 128, layout=gl.SliceLayout(0, _TILE))[None, :] <= own[:, None], scores, float("-inf"))


@gluon.jit
def _zero_after_context(v: gl.shared_memory_descriptor, stage: gl.tensor, count: gl.tensor, sizes: _Sizes) -> None:
    """Zero the values after the context in the last tile: a NaN that lies there would survive a weight of zero.

    Both groups do so, neither waits for the other: they write the same.
    """
    BLOCK: gl.constexpr = sizes.BLOCK
    BLOCKS: gl.constexpr = sizes.KEYS // BLOCK
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    boxes = hopper.reinterpret(v, gl.bfloat16, [sizes.STAGES * 2 * BLOCKS, BLOCK, 64], KV_LAYOUT)
    rows = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
    for i in range(count // BLOCK, BLOCKS):
        for half in gl.static_range(2):
            box = boxes.index((stage * 2 + half) * BLOCKS + i)
            box.store(gl.where((i * BLOCK + rows < count)[:, None], box.load(L), 0.0))
    hopper.fence_async_shared()


@gluon.jit
def _scores(q: gl.tensor, k: gl.shared_memory_descriptor) -> gl.tensor:
    """Asynchronous."""
    none = gl.zeros([64, 128], gl.float32, layout=_TILE)
    return hopper.warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _add_values(ready: gl.tensor, v: gl.shared_memory_descriptor, acc: gl.tensor) -> gl.tuple:
    """Asynchronous. The weights are returned as well: their registers must stay allocated until the wait."""
    ready = gl.convert_layout(ready, gl.DotOperandLayout(0, _TILE, 2), assert_trivial=True)
    return hopper.warpgroup_mma(ready, v, acc, is_async=True), ready


@gluon.jit
def _write(output: _Output, acc: gl.tensor, total: gl.tensor, start: gl.tensor, count: gl.tensor) -> None:
    """The result of rows that have one split. Other rows of the launch may have more."""
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, _TILE))
    known, packed = rows < count, (start + rows).to(gl.int64)
    cell = packed * gl.num_programs(0) + gl.program_id(0)
    target = output.out + cell[:, None] * _HEAD + gl.arange(0, 128, layout=gl.SliceLayout(0, _TILE))[None, :]
    gl.store(target, (acc * (1.0 / total)[:, None]).to(gl.bfloat16), mask=known[:, None])
    if (gl.program_id(0) == 0) & (gl.num_programs(2) > 1):
        gl.store(output.active + packed, gl.zeros_like(rows), mask=known)


@gluon.jit
def _write_partial(
    output: _Output, acc: gl.tensor, level: gl.tensor, total: gl.tensor, start: gl.tensor, count: gl.tensor,
    past: gl.tensor, share: gl.tensor,
) -> None:  # fmt: skip
    """A split's sums; the first split also writes how many splits have keys for each row."""
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, _TILE))
    dims = gl.arange(0, 128, layout=gl.SliceLayout(0, _TILE))[None, :]
    known, packed = rows < count, (start + rows).to(gl.int64)
    part = gl.program_id(2).to(gl.int64) * output.cells + packed * gl.num_programs(0) + gl.program_id(0)
    gl.store(output.mixed + part[:, None] * _HEAD + dims, acc, mask=known[:, None])
    gl.store(output.maxima + part, level, mask=known)
    gl.store(output.sums + part, total, mask=known)
    if (gl.program_id(0) == 0) & (gl.program_id(2) == 0):
        gl.store(output.active + packed, (past + rows) // share + 1, mask=known)
