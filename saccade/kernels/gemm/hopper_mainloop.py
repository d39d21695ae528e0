"""The main loop of large GEMMs on Hopper GPUs, in Gluon: tile order and WGMMA. Knows no epilogue.

A persistent program on each SM runs tile after tile: 128 rows of x, in two groups, by 256 rows of the weight. A
producer loads stages of 64 columns into a ring, the groups multiply them. If the last wave would leave half of the SMs
idle, its tiles are halved.
"""

from __future__ import annotations

from torch import Tensor

from saccade.kernels.launch import gluon_compat as hopper
from saccade.kernels.launch.gluon_compat import aggregate, gl, gluon, mbarrier, tma
from saccade.kernels.launch.hopper_pipeline import Barriers, next_stage

GROUPS = gl.constexpr(2)
STAGES = gl.constexpr(4)  # with the buffers for results, all of shared memory
_BAND = gl.constexpr(12)  # rows of tiles that run column by column, so that a wave reads few rows of x and weight
_ROWS = 128  # of x in a tile
_WIDE = 256  # rows of the weight in a tile
_MIN_ROWS = 256  # fewer take as long as reading the weight does
ALIGNED = 16  # elements that sizes are multiples of: TMA needs it, and one compiled kernel then fits all sizes
BOX = 64  # rows and columns of a TMA box
_BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=2 * BOX, element_bitwidth=16, rank=2)


def utilization(rows: int, outputs: int, is_gated: bool, programs: int) -> float:
    """The share of all SMs' time that is spent on outputs; 0 for too few rows."""
    if rows < _MIN_ROWS:
        return 0.0
    tiles = num_tiles(rows, outputs, is_gated)
    whole = num_whole(tiles, programs)
    waves = -(-whole // programs) + (0.5 if tiles > whole else 0)
    sums = rows * outputs * (2 if is_gated else 1)
    return sums / (waves * programs * _ROWS * _WIDE)


def num_tiles(rows: int, outputs: int, is_gated: bool) -> int:
    return -(-rows // _ROWS) * -(-outputs // (_WIDE // 2 if is_gated else _WIDE))


def num_whole(tiles: int, programs: int) -> int:
    """Tiles that are not halved: all, unless the last wave has SMs for both halves of each of its tiles."""
    last = tiles % programs
    return tiles - last if 2 * last <= programs else tiles


class Unchecked(hopper.TensorDescriptor):  # type: ignore[misc]
    """Of a tensor that is known to be dense and aligned: the checks cost the CPU more than the launch."""

    def __post_init__(self) -> None:
        pass


def boxes(rows: Tensor) -> hopper.TensorDescriptor:
    return Unchecked(rows, rows.shape, rows.stride(), [BOX, BOX], _BOX_LAYOUT)


@aggregate
class Ring:
    rows: gl.shared_memory_descriptor  # stages, in boxes
    weights: gl.shared_memory_descriptor
    results: gl.shared_memory_descriptor  # two boxes for each group
    bars: Barriers


@aggregate
class Shape:
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    whole: gl.tensor  # tiles that are not halved
    halves: gl.tensor


@gluon.jit
def new_ring(x: tma.tensor_descriptor) -> Ring:
    rows = gl.allocate_shared_memory(x.dtype, [GROUPS * STAGES, 64, 64], x.layout)
    weights = gl.allocate_shared_memory(x.dtype, [4 * STAGES, 64, 64], x.layout)
    results = gl.allocate_shared_memory(x.dtype, [2 * GROUPS, 64, 64], x.layout)
    bars = Barriers(gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout()), STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.full(i), count=1)
        mbarrier.init(bars.free(i), count=GROUPS)
    hopper.fence_async_shared()
    return Ring(rows, weights, results, bars)


@gluon.jit
def previous_stage(stage: gl.tensor) -> gl.tensor:
    """Computed, not carried: a loop cannot carry two names for one value."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def tile_start(unit: gl.tensor, shape: Shape, WIDE: gl.constexpr, IS_GATED: gl.constexpr) -> gl.tuple:
    """First row and first output of a tile or, if WIDE is 128, of half a tile after the whole ones."""
    OUTPUTS: gl.constexpr = 128 if IS_GATED else 256
    down, across = (shape.M + 127) // 128, (shape.N + OUTPUTS - 1) // OUTPUTS
    tile, further = unit, 0
    if WIDE == 128:
        tile, further = shape.whole + unit // 2, unit % 2 * (OUTPUTS // 2)
    band = tile // (_BAND * across)
    inside = tile - band * (_BAND * across)
    height = gl.minimum(down - band * _BAND, _BAND)
    return (band * _BAND + inside % height) * 128, inside // height * OUTPUTS + further


@gluon.jit
def multiply(
    ring: Ring, shape: Shape, stage: gl.tensor, phase: gl.tensor, WIDE: gl.constexpr, GROUP: gl.constexpr
) -> gl.tuple:
    """One WGMMA is always in flight, the last one on return; a stage is freed when the next one has been issued."""
    acc = gl.zeros([64, WIDE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16]))
    weights = ring.weights
    joined = hopper.reinterpret(weights, weights.dtype, [1024 // WIDE, WIDE, 64], weights.layout)
    STEP: gl.constexpr = 256 // WIDE
    for k in range(0, shape.K, 64):
        mbarrier.wait(ring.bars.full(stage), phase)
        columns = joined.index(STEP * stage).permute((1, 0))
        acc = hopper.warpgroup_mma(ring.rows.index(GROUPS * stage + GROUP), columns, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(ring.bars.free(previous_stage(stage)), count=1, pred=k > 0)
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def left_right(acc: gl.tensor) -> gl.tuple:
    """The left columns and the right ones."""
    WIDE: gl.constexpr = acc.shape[1] // 2
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    left, right = gl.split(gl.permute(gl.reshape(acc, [64, 2, WIDE]), (0, 2, 1)))
    return gl.convert_layout(left, HALF, assert_trivial=True), gl.convert_layout(right, HALF, assert_trivial=True)
