"""Tiles of products on Hopper GPUs, in Gluon: whose they are, and how they are multiplied. Knows no activations.

One program on each multiprocessor takes tile after tile: 128 rows of x, in two groups, by 256 rows of the weight. What
a producer copies into a ring of stages, 64 columns each, the groups multiply; both meet at barriers only. Tiles of a
last wave that would leave half of the multiprocessors idle are halved.
"""

from __future__ import annotations

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

GROUPS = gl.constexpr(2)
STAGES = gl.constexpr(4)  # with the room for results, all of shared memory
_BAND = gl.constexpr(12)  # rows of tiles that are done column by column, so that a wave reads few rows of x and weight
_ROWS, _WIDE = 128, 256  # of a tile: rows of x, rows of the weight
_MIN_ROWS = 256  # fewer take as long as reading the weight does
ALIGNED = 16  # elements that sizes are multiples of: what is copied in boxes has to, and one kernel then fits all
BOX = 64  # rows and columns of a copy
_BOXES = gl.NVMMASharedLayout(swizzle_byte_width=2 * BOX, element_bitwidth=16, rank=2)
copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name until Triton 3.7
_room = gl.shared_memory_descriptor
seen_as = _room.reinterpret if hasattr(_room, "reinterpret") else _room._reinterpret  # its name in Triton 3.6
write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def fill(rows: int, outputs: int, is_gated: bool, programs: int) -> float:
    """The share of all multiprocessors' time that is spent on what is asked for; 0 for too few rows."""
    tiles = num_tiles(rows, outputs, is_gated)
    whole = num_whole(tiles, programs)
    waves = -(-whole // programs) + (0.5 if tiles > whole else 0)
    sums = rows * outputs * (2 if is_gated else 1)
    return sums / (waves * programs * _ROWS * _WIDE) if rows >= _MIN_ROWS else 0.0


def num_tiles(rows: int, outputs: int, is_gated: bool) -> int:
    return -(-rows // _ROWS) * -(-outputs // (_WIDE // 2 if is_gated else _WIDE))


def num_whole(tiles: int, programs: int) -> int:
    """Tiles that are not halved: all, unless the last wave has room for the halves of its tiles."""
    last = tiles % programs
    return tiles - last if 2 * last <= programs else tiles


class Unchecked(TensorDescriptor):  # type: ignore[misc]
    """Of rows that are known to be dense and aligned: looking at them again takes the host longer than the launch."""

    def __post_init__(self) -> None:
        pass


def boxes(rows: Tensor) -> TensorDescriptor:
    return Unchecked(rows, rows.shape, rows.stride(), [BOX, BOX], _BOXES)


@gluon.jit
def new_ring(x: tma.tensor_descriptor) -> gl.tuple:
    """Rooms of the stages for rows and for weights, rooms for results, and barriers: full stages, then free ones."""
    rows = gl.allocate_shared_memory(x.dtype, [GROUPS * STAGES, 64, 64], x.layout)
    weights = gl.allocate_shared_memory(x.dtype, [4 * STAGES, 64, 64], x.layout)
    results = gl.allocate_shared_memory(x.dtype, [2 * GROUPS, 64, 64], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(STAGES + i), count=GROUPS)
    fence_async_shared()
    return rows, weights, results, bars


@gluon.jit
def following(stage: gl.tensor, phase: gl.tensor) -> gl.tuple:
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def before(stage: gl.tensor) -> gl.tensor:
    """Counted, not carried: a loop does not carry a name that stands for the same value as another one before it."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def place(unit: gl.tensor, shape: gl.tuple, WIDE: gl.constexpr, IS_GATED: gl.constexpr) -> gl.tuple:
    """First row and first output of a tile, or of half a tile behind the whole ones."""
    OUTPUTS: gl.constexpr = 128 if IS_GATED else 256
    M, N, _, whole, _ = shape
    down, across = (M + 127) // 128, (N + OUTPUTS - 1) // OUTPUTS
    tile, further = unit, 0
    if WIDE == 128:
        tile, further = whole + unit // 2, unit % 2 * (OUTPUTS // 2)
    band = tile // (_BAND * across)
    inside = tile - band * (_BAND * across)
    height = gl.minimum(down - band * _BAND, _BAND)
    return (band * _BAND + inside % height) * 128, inside // height * OUTPUTS + further


@gluon.jit
def multiply(
    shared: gl.tuple, acc: gl.tensor, shape: gl.tuple, stage: gl.tensor, phase: gl.tensor,
    WIDE: gl.constexpr, GROUP: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    """One product is always on its way, also behind the last; a stage is given back when the next has been begun."""
    rows, weights, _, bars = shared
    joined = seen_as(weights, weights.dtype, [1024 // WIDE, WIDE, 64], weights.layout)
    STEP: gl.constexpr = 256 // WIDE
    for k in range(0, shape[2], 64):
        mbarrier.wait(bars.index(stage), phase)
        columns = joined.index(STEP * stage).permute((1, 0))
        acc = warpgroup_mma(rows.index(GROUPS * stage + GROUP), columns, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(bars.index(STAGES + before(stage)), count=1, pred=k > 0)
        stage, phase = following(stage, phase)
    return acc, stage, phase


@gluon.jit
def left_right(acc: gl.tensor) -> gl.tuple:
    """The left columns and the right ones."""
    WIDE: gl.constexpr = acc.shape[1] // 2
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    left, right = gl.split(gl.permute(gl.reshape(acc, [64, 2, WIDE]), (0, 2, 1)))
    return gl.convert_layout(left, HALF, assert_trivial=True), gl.convert_layout(right, HALF, assert_trivial=True)
