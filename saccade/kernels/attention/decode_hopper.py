"""Decode attention (one new token per request) over the paged KV cache for Hopper GPUs, in Gluon.

Computes what `paged_decode` does, which stays the reference, except that padding rows of `out` are left as they are.
One program per SM takes an even share of all tiles of 64 keys (`decode_hopper_schedule`), so all end together and
memory is always busy. Each has four warp-specialized roles:

    2 of 1 warp     TMA loads of keys and values into rings; the first ones start before the QKV projection has ended
    1 of 2 warps    applies RoPE to queries and the new key, stores key and value, passes them on
    1 of 4 warps    WGMMA: scores^T = K q^T and acc^T = V^T weights^T, so that a tile of keys fills the tensor cores

The new token takes its slot in its tile as if it had been loaded. A program that has only some of a request's tiles
writes a partial result; the last one to arrive combines them (`decode_hopper_combine`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.attention.decode_hopper_combine import Accumulator, Output, Partition, Sizes, finish
from saccade.kernels.attention.decode_hopper_schedule import TileSchedule
from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, num_parts
from saccade.kernels.attention.online_softmax import LOG2_E
from saccade.kernels.launch import gluon_compat as hopper
from saccade.kernels.launch.gluon_compat import aggregate, gl, gluon, mbarrier, tma
from saccade.kernels.launch.hopper_pipeline import next_stage
from saccade.kernels.launch.varlen_tiles import power_of_two

_DIMS = (128, 256)
_MAX_GROUP = 16
_BLOCK_SIZES = (16, 32, 64)
_REGISTERS = 144  # per thread on average: an SM has no space for a second program, but for one of a GEMM
KV_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_UNSWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def suits(dim: int, group: int, dtype: torch.dtype, block_size: int) -> bool:
    """`group`: query heads per KV head."""
    return dim in _DIMS and group <= _MAX_GROUP and dtype.itemsize == 2 and block_size in _BLOCK_SIZES


def choose_stages(group: int, dim: int) -> int:
    """Two leave shared memory for the rings of the GEMMs before and after; with one query head, depth counts more."""
    return 3 if group == 1 and dim == 128 else 2


def hopper_decode(
    new: NewTokens,
    k_cache: Tensor,  # [slots, kv_heads, d], contiguous; so is v_cache
    v_cache: Tensor,
    block_tables: Tensor,  # int32 [requests, max_blocks]
    seq_lens: Tensor,  # int32 [requests], the new token included; 0 for padding rows, which come last
    block_size: int,
    scale: float,
    workspace: DecodeWorkspace,
    *,
    schedule: TileSchedule,
    out: Tensor | None = None,  # contiguous
    norm_eps: float = 0.0,
) -> Tensor:  # [requests, heads, d]; padding rows are not written
    requests, all_heads, dim = new.qkv.shape[-3:]
    kv_heads = k_cache.shape[1]
    heads = all_heads - 2 * kv_heads
    group = heads // kv_heads
    programs = len(schedule.metadata)
    assert suits(dim, group, k_cache.dtype, block_size) and requests == schedule.requests
    assert new.qkv.stride()[-2:] == (dim, 1)
    assert 2 * programs * group * dim <= workspace.mixed.numel() and requests * kv_heads <= workspace.counters.numel()
    out = k_cache.new_empty(requests, heads, dim) if out is None else out
    _decode_kernel[(programs,)](
        kv_descriptor(k_cache, block_size), kv_descriptor(v_cache, block_size), *new, k_cache, v_cache, block_tables,
        seq_lens, schedule.metadata, out, *workspace, scale * LOG2_E, block_tables.stride(0), new.qkv.stride(0),
        HEADS=kv_heads, GROUP=group, ROWS=power_of_two(group, minimum=8), BLOCK=block_size,
        STAGES=choose_stages(group, dim), PARTS=num_parts(new.qkv), DIM=dim, ROTARY=new.cos.shape[-1],
        QKV_ROW=new.qkv.stride(-3), EPS=norm_eps,
        num_warps=4, maxnreg=_REGISTERS, launch_pdl=True,
    )  # fmt: skip
    return out


def kv_descriptor(cache: Tensor, block_size: int) -> hopper.TensorDescriptor:
    rows = cache.view(len(cache), -1)
    return hopper.TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [block_size, 64], KV_LAYOUT.value)


@aggregate
class _Barriers:
    """Of two rings, 0 for keys and 1 for values, and of the two buffers of queries."""

    bars: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def full(self, RING: gl.constexpr, stage: gl.tensor) -> gl.shared_memory_descriptor:
        return self.bars.index(RING * self.STAGES + stage)

    @gluon.jit
    def free(self, RING: gl.constexpr, stage: gl.tensor) -> gl.shared_memory_descriptor:
        return self.bars.index((2 + RING) * self.STAGES + stage)

    @gluon.jit
    def queries_full(self, buffer: gl.tensor) -> gl.shared_memory_descriptor:
        return self.bars.index(4 * self.STAGES + buffer)

    @gluon.jit
    def queries_free(self, buffer: gl.tensor) -> gl.shared_memory_descriptor:
        return self.bars.index(4 * self.STAGES + 2 + buffer)


@aggregate
class _Shared:
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    new: gl.shared_memory_descriptor
    bars: _Barriers


@aggregate
class _Section:
    """Consecutive tiles of a program. It begins with this request, head and tile; later ones follow in order."""

    request: gl.tensor
    head: gl.tensor
    tile: gl.tensor
    count: gl.tensor  # tiles
    seq_len: gl.tensor  # of the request


@aggregate
class _Walk:
    """A program's work."""

    seq_lens: gl.tensor
    first: _Section
    second: _Section


@aggregate
class _NewToken:
    qkv: gl.tensor
    cos: gl.tensor
    sin: gl.tensor
    slots: gl.tensor
    k_cache: gl.tensor
    v_cache: gl.tensor


# Step metadata changes alignment and width from step to step: each variant would be compiled anew.
@gluon.jit(
    do_not_specialize=["table_row", "part"], do_not_specialize_on_alignment=["slots", "tables", "seq_lens", "schedule"]
)
def _decode_kernel(
    keys: tma.tensor_descriptor, values: tma.tensor_descriptor,  # of all slots; boxes of a block by 64 dimensions
    qkv: gl.tensor, cos: gl.tensor, sin: gl.tensor, slots: gl.tensor, query_scales: gl.tensor,
    q_norm: gl.tensor, k_norm: gl.tensor,
    k_cache: gl.tensor, v_cache: gl.tensor,
    tables: gl.tensor, seq_lens: gl.tensor, schedule: gl.tensor, out: gl.tensor,
    mixed: gl.tensor, maxima: gl.tensor, sums: gl.tensor, counters: gl.tensor,
    scale: gl.tensor, table_row: gl.tensor, part: gl.tensor,
    HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, DIM: gl.constexpr, ROTARY: gl.constexpr, QKV_ROW: gl.constexpr, EPS: gl.constexpr,
) -> None:  # fmt: skip
    k = gl.allocate_shared_memory(keys.dtype, [STAGES, 64, DIM], KV_LAYOUT)
    v = gl.allocate_shared_memory(keys.dtype, [STAGES, 64, DIM], KV_LAYOUT)
    q = gl.allocate_shared_memory(keys.dtype, [2, ROWS, DIM], KV_LAYOUT)
    weights = gl.allocate_shared_memory(keys.dtype, [ROWS, 64], KV_LAYOUT)
    new = gl.allocate_shared_memory(keys.dtype, [4, DIM], _UNSWIZZLED)  # key and value, double-buffered
    bars = gl.allocate_shared_memory(gl.int64, [4 * STAGES + 4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4 * STAGES + 4):
        mbarrier.init(bars.index(i), count=1)
    hopper.fence_async_shared()
    mine = schedule + gl.program_id(0) * 10
    walk = _Walk(seq_lens, _section(mine, seq_lens), _section(mine + 4, seq_lens))
    partition = Partition(gl.load(mine + 8), gl.load(mine + 9))
    sizes = Sizes(HEADS, GROUP, ROWS, BLOCK, STAGES, PARTS, DIM, ROTARY, QKV_ROW, EPS)
    barriers = _Barriers(bars, STAGES)
    shared = _Shared(k, v, q, weights, new, barriers)
    output = Output(out, mixed, maxima, sums, counters)
    token = _NewToken(qkv, cos, sin, slots, k_cache, v_cache)
    gl.warp_specialize(
        [
            (_multiply, (shared, walk, partition, output, scale, query_scales, sizes)),
            (_rotate, (shared, walk, token, q_norm, k_norm, part, sizes)),
            (_produce, (keys, k, barriers, walk, tables, table_row, 0, sizes)),
            (_produce, (values, v, barriers, walk, tables, table_row, 1, sizes)),
        ],
        [2, 1, 1],
        [128, 40, 40],
    )


@gluon.jit
def _section(metadata: gl.tensor, seq_lens: gl.tensor) -> _Section:
    request = gl.load(metadata)
    head = gl.load(metadata + 1)
    tile = gl.load(metadata + 2)
    return _Section(request, head, tile, gl.load(metadata + 3), gl.load(seq_lens + request))


@gluon.jit
def _enter(walk: _Walk, section: gl.tensor) -> gl.tuple:
    """Request, head, tile, tiles left and context where this section begins."""
    is_first = section == 0
    request = gl.where(is_first, walk.first.request, walk.second.request)
    head = gl.where(is_first, walk.first.head, walk.second.head)
    tile = gl.where(is_first, walk.first.tile, walk.second.tile)
    left = gl.where(is_first, walk.first.count, walk.second.count)
    return request, head, tile, left, gl.where(is_first, walk.first.seq_len, walk.second.seq_len)


@gluon.jit
def _own_tiles(seq_len: gl.tensor, tile: gl.tensor, left: gl.tensor) -> gl.tuple:
    """A request's tiles, and how many of them from `tile` on are this program's."""
    tiles = gl.maximum(gl.cdiv(seq_len, 64), 1)  # with none, producers and consumer would wait for each other
    return tiles, gl.minimum(tiles - tile, left)


@gluon.jit
def _prefetch_next(
    seq_lens: gl.tensor, request: gl.tensor, head: gl.tensor, is_more: gl.tensor, HEADS: gl.constexpr
) -> gl.tuple:
    """The next request and head, and its context, loaded before it is needed."""
    is_last = head == HEADS - 1
    request = gl.where(is_last & is_more, request + 1, request)
    return request, gl.where(is_last, 0, head + 1), gl.load(seq_lens + request)


@gluon.jit
def _produce(
    source: tma.tensor_descriptor, target: gl.shared_memory_descriptor, bars: _Barriers,
    walk: _Walk, tables: gl.tensor, table_row: gl.tensor, RING: gl.constexpr, sizes: Sizes,
) -> None:  # fmt: skip
    """a tile in shared memory   | block 0 | block 1 | .. 64 dimensions | block 0 | block 1 | .. the next 64 | .."""
    BLOCK: gl.constexpr = sizes.BLOCK
    STAGES: gl.constexpr = sizes.STAGES
    BLOCKS: gl.constexpr = 64 // BLOCK
    SLICES: gl.constexpr = sizes.DIM // 64
    boxes = hopper.reinterpret(target, target.dtype, [STAGES * SLICES * BLOCKS, BLOCK, 64], KV_LAYOUT)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for section in range(2):
        request, head, tile, left, seq_len = _enter(walk, section)
        while left > 0:
            _, count = _own_tiles(seq_len, tile, left)
            next_request, next_head, next_seq_len = _prefetch_next(
                walk.seq_lens, request, head, count < left, sizes.HEADS
            )
            table = tables + request.to(gl.int64) * table_row
            for mine in range(tile, tile + count):
                slots = block_slots(table, mine * BLOCKS, seq_len, BLOCK, BLOCKS)
                full = bars.full(RING, stage)
                mbarrier.wait(bars.free(RING, stage), phase ^ 1)
                mbarrier.expect(full, 64 * sizes.DIM * 2)
                for i in gl.static_range(BLOCKS):
                    for j in gl.static_range(SLICES):
                        box = boxes.index((stage * SLICES + j) * BLOCKS + i)
                        hopper.tma_load(source, [slots[i], head * sizes.DIM + j * 64], full, box)
                stage, phase = next_stage(stage, phase, STAGES)
            left -= count
            request, head, seq_len, tile = next_request, next_head, next_seq_len, gl.to_tensor(0)


@gluon.jit
def block_slots(
    table: gl.tensor, first: gl.tensor, seq_len: gl.tensor, BLOCK: gl.constexpr, BLOCKS: gl.constexpr
) -> gl.tuple:
    """The first slot of each block of a tile. After the context's last block the table is undefined: that one again."""
    found: gl.tuple = ()
    for i in gl.static_range(BLOCKS):
        found = found + (gl.load(table + gl.minimum(first + i, (seq_len - 1) // BLOCK)) * BLOCK,)  # noqa: RUF005
    return found


@gluon.jit
def _rotate(
    shared: _Shared, walk: _Walk, token: _NewToken, q_norm: gl.tensor, k_norm: gl.tensor, part: gl.tensor, sizes: Sizes
) -> None:
    """Norms of heads and RoPE of the queries of each request and head and, for its last tile, of the new key."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [2, 1], [1, 0])
    HEADS: gl.constexpr = sizes.HEADS
    GROUP: gl.constexpr = sizes.GROUP
    DIM: gl.constexpr = sizes.DIM
    q = shared.q
    rows = gl.arange(0, sizes.ROWS, layout=gl.SliceLayout(1, L))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, L))
    inside = (rows < GROUP)[:, None] & (dims >= 0)[None, :]
    cos, sin = _cos_sin(token, walk.first.request, dims, sizes)
    buffer, phase = gl.to_tensor(0), gl.to_tensor(0)
    hopper.gdc_launch_dependents()
    hopper.gdc_wait()
    for section in range(2):
        request, head, tile, left, seq_len = _enter(walk, section)
        while left > 0:
            tiles, count = _own_tiles(seq_len, tile, left)
            next_request, next_head, next_seq_len = _prefetch_next(walk.seq_lens, request, head, count < left, HEADS)
            own = token.qkv + request.to(gl.int64) * sizes.QKV_ROW
            first = own + (head * GROUP + rows)[:, None] * DIM
            cos32 = cos.to(gl.float32)
            sin32 = sin.to(gl.float32)
            rotation = (cos32[None, :], sin32[None, :])
            queries = _rotated(first, dims[None, :], inside, rotation, q_norm, part, q.dtype, sizes)
            mbarrier.wait(shared.bars.queries_free(buffer), phase ^ 1)
            q.index(buffer).store(queries)
            if tile + count == tiles:
                target = shared.new
                angles = (cos32, sin32)
                _store_new(target, token, own, angles, k_norm, request, head, seq_len, buffer, dims, part, sizes)
            hopper.fence_async_shared()
            mbarrier.arrive(shared.bars.queries_full(buffer), count=1)
            buffer, phase = next_stage(buffer, phase, 2)
            soon = gl.where(count < left, next_request, walk.second.request)
            cos, sin = _cos_sin(token, soon, dims, sizes)
            left -= count
            request, head, seq_len, tile = next_request, next_head, next_seq_len, gl.to_tensor(0)


@gluon.jit
def _cos_sin(token: _NewToken, request: gl.tensor, dims: gl.tensor, sizes: Sizes) -> gl.tuple:
    """Of all dimensions of a head: 1 and 0 for those that do not rotate."""
    ROTARY: gl.constexpr = sizes.ROTARY
    if ROTARY == sizes.DIM:
        cos = gl.load(token.cos + request * ROTARY + dims)
        sin = gl.load(token.sin + request * ROTARY + dims)
    else:
        cos = gl.load(token.cos + request * ROTARY + dims, mask=dims < ROTARY, other=1.0)
        sin = gl.load(token.sin + request * ROTARY + dims, mask=dims < ROTARY, other=0.0)
    return cos, sin


@gluon.jit
def _store_new(
    new: gl.shared_memory_descriptor, token: _NewToken, own: gl.tensor, rotation: gl.tuple, norm: gl.tensor,
    request: gl.tensor, head: gl.tensor, seq_len: gl.tensor, buffer: gl.tensor, dims: gl.tensor, part: gl.tensor,
    sizes: Sizes,
) -> None:  # fmt: skip
    """The new key and its value, to shared memory and to the cache."""
    HEADS: gl.constexpr = sizes.HEADS
    DIM: gl.constexpr = sizes.DIM
    keys = own + sizes.GROUP * HEADS * DIM
    key = _rotated(keys + head * DIM, dims, dims >= 0, rotation, norm, part, new.dtype, sizes)
    value = _projected(keys + (HEADS + head) * DIM + dims, dims >= 0, part, new.dtype, sizes)
    new.index(2 * buffer).store(key)
    new.index(2 * buffer + 1).store(value)
    slot = gl.load(token.slots + request).to(gl.int64)
    target = (slot * HEADS + head) * DIM + dims
    is_stored = (dims >= 0) & (slot >= 0) & (seq_len > 0)
    gl.store(token.k_cache + target, key, mask=is_stored)
    gl.store(token.v_cache + target, value, mask=is_stored)


@gluon.jit
def _rotated(
    rows: gl.tensor, dims: gl.tensor, inside: gl.tensor, rotation: gl.tuple, norm: gl.tensor,
    part: gl.tensor, KIND: gl.constexpr, sizes: Sizes,
) -> gl.tensor:  # fmt: skip
    """Rows at these pointers, normed, with RoPE: dimensions i and i + ROTARY / 2 rotate as a pair, the rest stay."""
    ROTARY: gl.constexpr = sizes.ROTARY
    one = _projected(rows + dims, inside, part, KIND, sizes).to(gl.float32)
    paired = inside
    if ROTARY < sizes.DIM:
        paired = inside & (dims < ROTARY)
    pairs = (dims + ROTARY // 2) % ROTARY
    other = _projected(rows + pairs, paired, part, KIND, sizes).to(gl.float32)
    if norm is not None:
        by = gl.rsqrt(_sum_of_head(one * one) / sizes.DIM + sizes.EPS)
        one = (one * by * gl.load(norm + dims).to(gl.float32)).to(KIND).to(gl.float32)
        other = (other * by * gl.load(norm + pairs).to(gl.float32)).to(KIND).to(gl.float32)
    cos, sin = rotation
    return (one * cos + other * sin).to(KIND)


@gluon.jit
def _sum_of_head(x: gl.tensor) -> gl.tensor:
    """[d] -> one number, [rows, d] -> [rows, 1]"""
    return gl.sum(x, 0) if len(x.shape) == 1 else gl.sum(x, 1)[:, None]


@gluon.jit
def _projected(source: gl.tensor, inside: gl.tensor, part: gl.tensor, KIND: gl.constexpr, sizes: Sizes) -> gl.tensor:
    """The projection at these pointers: the sum of its split-K partials, `part` elements apart."""
    found = gl.load(source, mask=inside, other=0.0)
    for i in gl.static_range(1, sizes.PARTS):
        found += gl.load(source + i * part, mask=inside, other=0.0)
    return found.to(KIND)


@gluon.jit
def _multiply(
    shared: _Shared, walk: _Walk, partition: Partition, output: Output, scale: gl.tensor, query_scales: gl.tensor,
    sizes: Sizes,
) -> None:  # fmt: skip
    STAGES: gl.constexpr = sizes.STAGES
    begin = partition.begin(gl.program_id(0))
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    buffer, buffer_phase = gl.to_tensor(0), gl.to_tensor(0)
    for section in range(2):
        request, head, tile, left, seq_len = _enter(walk, section)
        first = gl.where(section == 0, begin + walk.second.count, begin)  # the first section is the share's end
        while left > 0:
            tiles, count = _own_tiles(seq_len, tile, left)
            next_request, next_head, next_seq_len = _prefetch_next(
                walk.seq_lens, request, head, count < left, sizes.HEADS
            )
            state = _new_accumulator(sizes)
            by = scale
            if query_scales is not None:
                by = scale * gl.load(query_scales + request)
            mbarrier.wait(shared.bars.queries_full(buffer), buffer_phase)
            for _ in range(tile, gl.minimum(tile + count, tiles - 1)):
                state = _step(shared, state, stage, phase, buffer, by, seq_len, False, sizes)
                stage, phase = next_stage(stage, phase, STAGES)
            if tile + count == tiles:
                known = seq_len - (tiles - 1) * 64
                state = _step(shared, state, stage, phase, buffer, by, known, True, sizes)
                stage, phase = next_stage(stage, phase, STAGES)
            mbarrier.arrive(shared.bars.queries_free(buffer), count=1)
            ours = Accumulator(state.acc, gl.sum(state.total, 0), state.largest)
            start = first - tile
            cell = request * sizes.HEADS + head
            finish(output, ours, cell, start, tiles, count, partition, (first == begin).to(gl.int32), sizes)
            buffer, buffer_phase = next_stage(buffer, buffer_phase, 2)
            left -= count
            first += count
            request, head, seq_len, tile = next_request, next_head, next_seq_len, gl.to_tensor(0)


@gluon.jit
def _new_accumulator(sizes: Sizes) -> Accumulator:
    """Its `total` is by key and head [64, ROWS]: threads add up their own weights until the end."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.ROWS, 16])
    acc = gl.zeros([sizes.DIM, sizes.ROWS], gl.float32, layout=S)
    total = gl.zeros([64, sizes.ROWS], gl.float32, layout=S)
    return Accumulator(acc, total, gl.full([sizes.ROWS], -1e30, gl.float32, layout=gl.SliceLayout(0, S)))


@gluon.jit
def _step(
    shared: _Shared, state: Accumulator, stage: gl.tensor, phase: gl.tensor, buffer: gl.tensor, scale: gl.tensor,
    known: gl.tensor, IS_LAST: gl.constexpr, sizes: Sizes,
) -> Accumulator:  # fmt: skip
    """One more tile. `known` of its keys count in the last tile; the new one is the last of them."""
    k, q, weights, bars = shared.k, shared.q, shared.weights, shared.bars
    acc = state.acc
    S: gl.constexpr = acc.type.layout
    mbarrier.wait(bars.full(0, stage), phase)
    if IS_LAST:
        _insert_new(k, stage, shared.new, 2 * buffer, known - 1, sizes)
    scores = gl.zeros([64, sizes.ROWS], gl.float32, layout=S)
    scores = hopper.warpgroup_mma(k.index(stage), q.index(buffer).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(bars.free(0, stage), count=1)
    if IS_LAST:
        scores = gl.where((gl.arange(0, 64, layout=gl.SliceLayout(1, S)) < known)[:, None], scores, float("-inf"))
    larger = gl.maximum(state.largest, gl.max(scores, 0) * scale)
    shrink = gl.exp2(state.largest - larger)
    each = gl.exp2(scores * scale - larger[None, :])
    weights.permute((1, 0)).store(each.to(weights.dtype))
    hopper.fence_async_shared()
    acc = acc * shrink[None, :]
    total = state.total * shrink[None, :] + each
    mbarrier.wait(bars.full(1, stage), phase)
    if IS_LAST:
        _insert_new(shared.v, stage, shared.new, 2 * buffer + 1, known - 1, sizes)
    acc = hopper.warpgroup_mma(shared.v.index(stage).permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(bars.free(1, stage), count=1)
    return Accumulator(acc, total, larger)


@gluon.jit
def _insert_new(
    ring: gl.shared_memory_descriptor, stage: gl.tensor, new: gl.shared_memory_descriptor, which: gl.tensor,
    position: gl.tensor, sizes: Sizes,
) -> None:  # fmt: skip
    """The new row into its position, zeros after it: a NaN that lies there would survive a weight of zero."""
    BLOCK: gl.constexpr = sizes.BLOCK
    BLOCKS: gl.constexpr = 64 // BLOCK
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SLICES: gl.constexpr = sizes.DIM // 64
    boxes = hopper.reinterpret(ring, ring.dtype, [sizes.STAGES * SLICES * BLOCKS, BLOCK, 64], KV_LAYOUT)
    slices = hopper.reinterpret(new, new.dtype, [4 * SLICES, 64], _UNSWIZZLED)
    rows = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
    for i in range(position // BLOCK, BLOCKS):
        here = (i * BLOCK + rows)[:, None]
        for j in gl.static_range(SLICES):
            box = boxes.index((stage * SLICES + j) * BLOCKS + i)
            row = slices.index(which * SLICES + j).load(gl.SliceLayout(0, L))[None, :]
            zeros = gl.zeros([BLOCK, 64], ring.dtype, layout=L)
            box.store(gl.where(here < position, box.load(L), gl.where(here == position, row, zeros)))
    hopper.fence_async_shared()
