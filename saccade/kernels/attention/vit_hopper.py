"""Full attention inside each packed image for Hopper GPUs, in Gluon. Knows rows and where images begin, no tower.

Computes what `packed_vit` does, which stays the reference. A persistent program on each SM runs its work items (see
`vit_schedule`), with four warp-specialized roles:

    producer, 1 warp       TMA loads of keys and values into a ring       | K0 . | K1 V0 | K2 V1 | .. | . Vn | K0 . | ..
    3 groups of 4 warps,   the WGMMA of the scores of tile j and of the values of tile j - 1 are issued together, so
    64 rows each           that the exponentials of tile j overlap with the latter

The ring runs on from item to item: keys and queries of the next one are loaded when the last result is written. Softmax
weights are relative to a fixed level (`fixed_max_softmax`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from saccade.kernels.attention import fixed_max_softmax as softmax
from saccade.kernels.attention.online_softmax import LOG2_E
from saccade.kernels.attention.vit import VisionHeads
from saccade.kernels.attention.vit_combine import CELL, combine
from saccade.kernels.attention.vit_schedule import KEYS, TILE_ROWS, TileSchedule
from saccade.kernels.launch import gluon_compat as hopper
from saccade.kernels.launch.gluon_compat import aggregate, gl, gluon, mbarrier, tma
from saccade.kernels.launch.hopper_pipeline import Barriers, next_stage

_FIRST, _REST = 64, 16  # a head is two GEMMs, as in `packed_vit`
_STAGES = 8
_REGISTERS = 128  # per thread, on average over all roles
_MIN_LENGTH = 256  # for smaller images four roles do not pay

_ACC1 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_ACC2 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
_SPARE = gl.constexpr(CELL)
_QUERIES_FULL = gl.constexpr(1)  # extra barriers
_QUERIES_FREE = gl.constexpr(2)
# The integers of an item (see `vit_schedule`).
_ROW = gl.constexpr(0)
_ROWS = gl.constexpr(1)
_HEAD = gl.constexpr(2)
_IMAGE_START = gl.constexpr(3)
_IMAGE_LENGTH = gl.constexpr(4)
_FIRST_TILE = gl.constexpr(5)
_TILES = gl.constexpr(6)
_SLOT = gl.constexpr(7)


def suits(lengths: Sequence[int], dim: int, dtype: torch.dtype) -> bool:
    """Float16 has too small a range for weights without a running maximum. TMA needs rows of whole 16 bytes."""
    has_heads = _FIRST < dim <= _FIRST + _REST and dim % 8 == 0
    return has_heads and dtype == torch.bfloat16 and min(lengths) >= _MIN_LENGTH


class HopperVit:
    """Attention over one packing, layer after layer.

    After the first layer the compiled kernel is launched directly: Triton's lookup would cost the CPU more than the
    rest of a layer.
    """

    def __init__(self, schedule: TileSchedule) -> None:
        self.schedule = schedule
        self._launches: dict[bool, Callable[..., object]] = {}
        self._combine: Callable[..., object] | None = None

    def __call__(self, qkv: Tensor, scale: float) -> Tensor:
        """Contiguous q, k, v [T, 3, heads, d] -> [T, heads, d]."""
        return self._attend(qkv, scale, is_parted=False)

    def takes_parted(self, heads: VisionHeads) -> bool:
        """Whether queries and keys of such heads may be in the order of `hopper_qkv_rope`."""
        return heads.dim == _FIRST + _REST

    def parted(self, qkv: Tensor, scale: float) -> Tensor:
        """The same, with queries and keys in the order of `hopper_qkv_rope`."""
        return self._attend(qkv, scale, is_parted=True)

    def _attend(self, qkv: Tensor, scale: float, is_parted: bool) -> Tensor:
        tokens, _, heads, dim = qkv.shape
        assert qkv.is_contiguous()
        schedule = self.schedule
        out = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
        parts = torch.empty((max(1, schedule.slots), TILE_ROWS, dim + CELL), dtype=torch.float32, device=qkv.device)
        descriptors = (_descriptor(qkv.view(tokens, -1), columns) for columns in (_FIRST, _REST))
        args = (*descriptors, schedule.offsets, schedule.items, out, parts, scale * LOG2_E, heads)
        sizes = (dim, KEYS, _STAGES, is_parted)
        grid = (schedule.programs, 1, 1)
        launch = self._launches.get(is_parted)
        if launch is None:
            kernel = _vit_kernel[grid](*args, *sizes, num_warps=4, maxnreg=_REGISTERS, launch_pdl=True)
            if kernel is not None:  # None: kernels are only compiled
                self._launches[is_parted] = kernel[grid]
        else:
            launch(*args, *sizes)
        if schedule.slots:
            self._combine = combine(parts, schedule, out, self._combine)
        return out


def _descriptor(rows: Tensor, columns: int) -> hopper.TensorDescriptor:
    return hopper.TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [KEYS, columns], _layout(columns))


@lru_cache
def _layout(columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * columns, element_bitwidth=16, rank=2)


@aggregate
class _Sizes:
    DIM: gl.constexpr
    KEYS: gl.constexpr  # of a tile
    STAGES: gl.constexpr
    IS_PARTED: gl.constexpr  # queries and keys are in the order of `hopper_qkv_rope`


@aggregate
class _Shared:
    """A head is 64 dimensions and up to 16 more, each with buffers of its own."""

    k1: gl.shared_memory_descriptor
    k2: gl.shared_memory_descriptor
    v1: gl.shared_memory_descriptor
    v2: gl.shared_memory_descriptor
    q1: gl.shared_memory_descriptor
    q2: gl.shared_memory_descriptor
    bars: Barriers
    overflowed: gl.shared_memory_descriptor


@aggregate
class _Tensors:
    items: gl.tensor
    out: gl.tensor
    parts: gl.tensor
    heads: gl.tensor


@gluon.jit(do_not_specialize=["heads"], do_not_specialize_on_alignment=["offsets", "items"])
def _vit_kernel(
    wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor,  # of all rows; boxes of 64 and of 16 columns
    offsets: gl.tensor, items: gl.tensor, out: gl.tensor, parts: gl.tensor, scale: gl.tensor,
    heads: gl.tensor, DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, IS_PARTED: gl.constexpr,
) -> None:  # fmt: skip
    hopper.gdc_launch_dependents()  # the combine kernel waits for all partial results, but may take every free SM
    begin, end = gl.load(offsets + gl.program_id(0)), gl.load(offsets + gl.program_id(0) + 1)
    k1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 64], wide.layout)
    k2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 16], narrow.layout)
    v1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 64], wide.layout)
    v2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, 16], narrow.layout)
    q1 = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 64], wide.layout)
    q2 = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 16], narrow.layout)
    overflowed = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    overflowed.store(gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    bars = Barriers(gl.allocate_shared_memory(gl.int64, [2 * STAGES + 3, 1], mbarrier.MBarrierLayout()), STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.full(i), count=1)
        mbarrier.init(bars.free(i), count=3)
    mbarrier.init(bars.extra(softmax.CHECKED), count=3)
    mbarrier.init(bars.extra(_QUERIES_FULL), count=1)
    mbarrier.init(bars.extra(_QUERIES_FREE), count=3)
    hopper.fence_async_shared()
    shared = _Shared(k1, k2, v1, v2, q1, q2, bars, overflowed)
    tensors = _Tensors(items, out, parts, heads)
    sizes = _Sizes(DIM, KEYS, STAGES, IS_PARTED)
    hopper.gdc_wait()  # for queries, keys and values
    if begin < end:
        gl.warp_specialize(
            [
                (_consume, (shared, tensors, scale, begin, end, 0, sizes)),
                (_consume, (shared, tensors, scale, begin, end, 1, sizes)),
                (_consume, (shared, tensors, scale, begin, end, 2, sizes)),
                (_produce, (shared, wide, narrow, items, heads, begin, end, sizes)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


@gluon.jit
def _produce(
    shared: _Shared, wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor, items: gl.tensor, heads: gl.tensor,
    begin: gl.tensor, end: gl.tensor, sizes: _Sizes,
) -> None:  # fmt: skip
    none = gl.to_tensor(0)
    stage, phase, q_phase = _load_all(shared, wide, narrow, items, heads, begin, end, none, none, none, sizes)
    if softmax.has_overflowed(shared.bars, shared.overflowed, 1):
        _load_all(shared, wide, narrow, items, heads, begin, end, stage, phase, q_phase, sizes)


@gluon.jit
def _load_all(
    shared: _Shared, wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor, items: gl.tensor, heads: gl.tensor,
    begin: gl.tensor, end: gl.tensor, stage: gl.tensor, phase: gl.tensor, q_phase: gl.tensor, sizes: _Sizes,
) -> gl.tuple:  # fmt: skip
    for i in range(begin, end):
        _load_queries(shared, wide, narrow, items + 8 * i, heads, q_phase, sizes)
        stage, phase = _load_item(shared, wide, narrow, items + 8 * i, heads, stage, phase, sizes)
        q_phase ^= 1
    return stage, phase, q_phase


@gluon.jit
def _load_queries(
    shared: _Shared, wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor, item: gl.tensor, heads: gl.tensor,
    q_phase: gl.tensor, sizes: _Sizes,
) -> None:  # fmt: skip
    """Of all groups, also rows after the item's last: their results are not written."""
    row = gl.load(item + _ROW)
    first, rest = _columns(gl.load(item + _HEAD), heads, sizes)
    full = shared.bars.extra(_QUERIES_FULL)
    mbarrier.wait(shared.bars.extra(_QUERIES_FREE), q_phase ^ 1)
    mbarrier.expect(full, 192 * 160)
    for group in gl.static_range(3):
        hopper.tma_load(wide, [row + group * 64, first], full, shared.q1.index(group))
        hopper.tma_load(narrow, [row + group * 64, rest], full, shared.q2.index(group))


@gluon.jit
def _columns(head: gl.tensor, heads: gl.tensor, sizes: _Sizes) -> gl.tuple:
    """Where a head's two parts are among the queries. Parted: the 64 columns of all heads, then the 16 of all."""
    first, rest = head * sizes.DIM, head * sizes.DIM + 64
    if sizes.IS_PARTED:
        first, rest = head * 64, heads * 64 + head * 16
    return first, rest


@gluon.jit
def _load_item(
    shared: _Shared, wide: tma.tensor_descriptor, narrow: tma.tensor_descriptor, item: gl.tensor, heads: gl.tensor,
    stage: gl.tensor, phase: gl.tensor, sizes: _Sizes,
) -> gl.tuple:  # fmt: skip
    """The tiles of keys, each with the values of the tile before.

    An image's first tile is its last rows, even if other tiles have some of them, too: no tile reaches into the next
    image.
    """
    DIM: gl.constexpr = sizes.DIM
    KEYS: gl.constexpr = sizes.KEYS
    bars = shared.bars
    key, rest = _columns(gl.load(item + _HEAD), heads, sizes)
    key, rest = key + heads * DIM, rest + heads * DIM
    value = (2 * heads + gl.load(item + _HEAD)) * DIM
    start, length = gl.load(item + _IMAGE_START), gl.load(item + _IMAGE_LENGTH)
    first, tiles = gl.load(item + _FIRST_TILE), gl.load(item + _TILES)
    at = start + gl.where(first == 0, length - KEYS, (first - 1) * KEYS)
    next_at = start + first * KEYS
    before = start  # a name of its own for the compiler: nothing reads it
    for j in range(tiles + 1):
        full = bars.full(stage)
        mbarrier.wait(bars.free(stage), phase ^ 1)
        mbarrier.expect(full, KEYS * 160, pred=(j == 0) | (j == tiles))
        mbarrier.expect(full, KEYS * 320, pred=(j > 0) & (j < tiles))
        hopper.tma_load(wide, [at, key], full, shared.k1.index(stage), pred=j < tiles)
        hopper.tma_load(narrow, [at, rest], full, shared.k2.index(stage), pred=j < tiles)
        hopper.tma_load(wide, [before, value], full, shared.v1.index(stage), pred=j > 0)
        hopper.tma_load(narrow, [before, value + 64], full, shared.v2.index(stage), pred=j > 0)
        before, at, next_at = at, next_at, next_at + KEYS
        stage, phase = next_stage(stage, phase, sizes.STAGES)
    return stage, phase


@gluon.jit
def _consume(
    shared: _Shared, tensors: _Tensors, scale: gl.tensor, begin: gl.tensor, end: gl.tensor, GROUP: gl.constexpr,
    sizes: _Sizes,
) -> None:  # fmt: skip
    none = gl.to_tensor(0)
    largest, stage, phase, q_phase = _attend_items(
        shared, tensors, scale, begin, end, none, none, none, False, GROUP, sizes
    )
    softmax.report_overflow(shared.bars, shared.overflowed, largest)
    if softmax.has_overflowed(shared.bars, shared.overflowed, 4):
        _attend_items(shared, tensors, scale, begin, end, stage, phase, q_phase, True, GROUP, sizes)


@gluon.jit
def _attend_items(
    shared: _Shared, tensors: _Tensors, scale: gl.tensor, begin: gl.tensor, end: gl.tensor, stage: gl.tensor,
    phase: gl.tensor, q_phase: gl.tensor, HAS_MAXIMUM: gl.constexpr, GROUP: gl.constexpr, sizes: _Sizes,
) -> gl.tuple:  # fmt: skip
    """All items. Returns the largest sums of weights [64], and the stage and phases after that."""
    bars = shared.bars
    largest = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, _ACC1))
    for i in range(begin, end):
        item = tensors.items + 8 * i
        mbarrier.wait(bars.extra(_QUERIES_FULL), q_phase)
        if gl.load(item + _ROWS) > GROUP * 64:
            q = _queries(shared, GROUP, sizes)
            acc, total, level, ready, stage, phase = _attend(shared, q, scale, item, stage, phase, HAS_MAXIMUM, sizes)
            acc1, acc2, stage, phase = _last_values(shared, ready, acc, stage, phase, sizes)
            total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, _ACC1))
            rows = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _ACC1))
            largest = gl.maximum(largest, gl.where(rows < gl.load(item + _ROWS), total, 0.0))
            _write_result(tensors, item, acc1, acc2, total, level, GROUP, sizes)
        else:
            mbarrier.arrive(bars.extra(_QUERIES_FREE), count=1)
            stage, phase = _skip(bars, gl.load(item + _TILES) + 1, stage, phase, sizes)
        q_phase ^= 1
    return largest, stage, phase, q_phase


@gluon.jit
def _queries(shared: _Shared, GROUP: gl.constexpr, sizes: _Sizes) -> gl.tuple:
    """[64, 64] and [64, 16], the latter zero after the head's end: those columns of keys are the next head's."""
    Q: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.KEYS, 16]), 2)
    q1, q2 = shared.q1.index(GROUP).load(Q), shared.q2.index(GROUP).load(Q)
    if sizes.DIM < 80:
        known = gl.arange(0, 16, layout=gl.SliceLayout(0, Q))[None, :] < sizes.DIM - 64
        q2 = gl.where(known, q2, gl.zeros([64, 16], gl.bfloat16, layout=Q))
    return q1, q2


@gluon.jit
def _skip(bars: Barriers, stages: gl.tensor, stage: gl.tensor, phase: gl.tensor, sizes: _Sizes) -> gl.tuple:
    """The stages of an item that has no rows for this group."""
    for _ in range(stages):
        mbarrier.wait(bars.full(stage), phase)
        mbarrier.arrive(bars.free(stage), count=1)
        stage, phase = next_stage(stage, phase, sizes.STAGES)
    return stage, phase


@gluon.jit
def _attend(
    shared: _Shared, q: gl.tuple, scale: gl.tensor, item: gl.tensor, stage: gl.tensor, phase: gl.tensor,
    HAS_MAXIMUM: gl.constexpr, sizes: _Sizes,
) -> gl.tuple:  # fmt: skip
    """Sums of values ([64, 64], [64, 16]) without those of the last tile, sums of weights, their level, the weights of
    the last tile, and the stage and phase of the ring after that.

    HAS_MAXIMUM: the level is a running maximum.
    """
    KEYS: gl.constexpr = sizes.KEYS
    STAGES: gl.constexpr = sizes.STAGES
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    k1, k2, v1, v2, bars = shared.k1, shared.k2, shared.v1, shared.v2, shared.bars
    length, first, tiles = gl.load(item + _IMAGE_LENGTH), gl.load(item + _FIRST_TILE), gl.load(item + _TILES)
    acc1 = gl.zeros([64, 64], gl.float32, layout=_ACC1)
    acc2 = gl.zeros([64, 16], gl.float32, layout=_ACC2)
    mbarrier.wait(bars.full(stage), phase)
    scores = hopper.warpgroup_mma_wait(0, deps=(_scores(q, k1.index(stage), k2.index(stage), KEYS),))
    mbarrier.arrive(bars.free(stage), count=1)
    # Not earlier: loads of queries may still be queued when an arrive directly after them is seen.
    mbarrier.arrive(bars.extra(_QUERIES_FREE), count=1)
    again = gl.where(first == 0, (length + KEYS - 1) // KEYS * KEYS - length, 0)  # keys that another tile has, too
    scores = gl.where(gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))[None, :] >= again, scores, float("-inf"))
    level = gl.max(scores, 1) * scale
    if not HAS_MAXIMUM:
        level += softmax.HEADROOM
    weights = gl.exp2(scores * scale - level[:, None])
    total = softmax.partial_sums(weights)
    ready = weights.to(gl.bfloat16)
    stage, phase = next_stage(stage, phase, STAGES)
    for _ in range(1, tiles):
        mbarrier.wait(bars.full(stage), phase)
        scores = _scores(q, k1.index(stage), k2.index(stage), KEYS)
        acc1, acc2, ready1, ready2 = _add_values(ready, v1.index(stage), v2.index(stage), acc1, acc2)
        scores = hopper.warpgroup_mma_wait(2, deps=(scores,))
        shrink = level
        if HAS_MAXIMUM:
            level, shrink, total = softmax.follow_maximum(scores, scale, level, total)
        weights = gl.exp2(scores * scale - level[:, None])
        total = softmax.before_waiting(total + softmax.partial_sums(weights))
        acc1, acc2, ready1, ready2 = hopper.warpgroup_mma_wait(0, deps=(acc1, acc2, ready1, ready2))
        ready = weights.to(gl.bfloat16)
        if HAS_MAXIMUM:
            acc1 = acc1 * gl.convert_layout(shrink, gl.SliceLayout(1, _ACC1))[:, None]
            acc2 = acc2 * gl.convert_layout(shrink, gl.SliceLayout(1, _ACC2))[:, None]
        mbarrier.arrive(bars.free(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return (acc1, acc2), total, level, ready, stage, phase


@gluon.jit
def _last_values(
    shared: _Shared, ready: gl.tensor, acc: gl.tuple, stage: gl.tensor, phase: gl.tensor, sizes: _Sizes
) -> gl.tuple:
    v1, v2 = shared.v1, shared.v2
    mbarrier.wait(shared.bars.full(stage), phase)
    acc1, acc2, ready1, ready2 = _add_values(ready, v1.index(stage), v2.index(stage), acc[0], acc[1])
    acc1, acc2, ready1, ready2 = hopper.warpgroup_mma_wait(0, deps=(acc1, acc2, ready1, ready2))
    mbarrier.arrive(shared.bars.free(stage), count=1)
    stage, phase = next_stage(stage, phase, sizes.STAGES)
    return acc1, acc2, stage, phase


@gluon.jit
def _scores(
    q: gl.tuple, k1: gl.shared_memory_descriptor, k2: gl.shared_memory_descriptor, KEYS: gl.constexpr
) -> gl.tensor:
    """Asynchronous, in two WGMMA groups."""
    none = gl.zeros([64, KEYS], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
    scores = hopper.warpgroup_mma(q[0], k1.permute((1, 0)), none, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(q[1], k2.permute((1, 0)), scores, is_async=True)


@gluon.jit
def _add_values(
    ready: gl.tensor, v1: gl.shared_memory_descriptor, v2: gl.shared_memory_descriptor,
    acc1: gl.tensor, acc2: gl.tensor,
) -> gl.tuple:  # fmt: skip
    """Asynchronous, in two groups. The weights are returned as well: their registers must last until the wait."""
    ready1 = gl.convert_layout(ready, gl.DotOperandLayout(0, _ACC1, 2), assert_trivial=True)
    ready2 = gl.convert_layout(ready, gl.DotOperandLayout(0, _ACC2, 2), assert_trivial=True)
    acc1 = hopper.warpgroup_mma(ready1, v1, acc1, is_async=True)
    acc2 = hopper.warpgroup_mma(ready2, v2, acc2, is_async=True)
    return acc1, acc2, ready1, ready2


@gluon.jit
def _write_result(
    tensors: _Tensors, item: gl.tensor, acc1: gl.tensor, acc2: gl.tensor, total: gl.tensor, level: gl.tensor,
    GROUP: gl.constexpr, sizes: _Sizes,
) -> None:  # fmt: skip
    """The result or, where an item has only some of the keys, a partial one as `vit_combine` reads it."""
    DIM: gl.constexpr = sizes.DIM
    slot = gl.load(item + _SLOT)
    if slot < 0:
        first, count, head = gl.load(item + _ROW), gl.load(item + _ROWS), gl.load(item + _HEAD)
        _write(tensors, acc1, total, first, count, head, GROUP, sizes, 0)
        _write(tensors, acc2, total, first, count, head, GROUP, sizes, 64)
    else:
        cells = tensors.parts + (slot * 192 + GROUP * 64) * (DIM + _SPARE)
        _write_partial(cells, acc1, sizes, 0)
        _write_partial(cells, acc2, sizes, 64)
        gl.store(cells + gl.arange(0, 64, layout=total.type.layout) * (DIM + _SPARE) + DIM, total)
        gl.store(cells + gl.arange(0, 64, layout=level.type.layout) * (DIM + _SPARE) + DIM + 1, level)


@gluon.jit
def _write(
    tensors: _Tensors, acc: gl.tensor, total: gl.tensor, first: gl.tensor, count: gl.tensor, head: gl.tensor,
    GROUP: gl.constexpr, sizes: _Sizes, FIRST: gl.constexpr,
) -> None:  # fmt: skip
    DIM: gl.constexpr = sizes.DIM
    A: gl.constexpr = acc.type.layout
    rows = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, A))
    dims = FIRST + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, A))[None, :]
    cells = tensors.out + ((first + rows).to(gl.int64)[:, None] * tensors.heads + head) * DIM + dims
    result = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, A))[:, None]
    gl.store(cells, result.to(gl.bfloat16), mask=(rows < count)[:, None] & (dims < DIM))


@gluon.jit
def _write_partial(cells: gl.tensor, acc: gl.tensor, sizes: _Sizes, FIRST: gl.constexpr) -> None:
    DIM: gl.constexpr = sizes.DIM
    A: gl.constexpr = acc.type.layout
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, A))[:, None]
    dims = FIRST + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, A))[None, :]
    gl.store(cells + rows * (DIM + _SPARE) + dims, acc, mask=dims < DIM)
