"""Steps that the split-K GEMMs for Hopper GPUs share: filling a ring of stages, scales of a weight, partial sums."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels.launch import gluon_compat as hopper
from saccade.kernels.launch.gluon_compat import aggregate, gl, gluon, mbarrier, tma
from saccade.kernels.launch.hopper_pipeline import Barriers, next_stage


def box_of(rows: Tensor, count: int, columns: int) -> hopper.TensorDescriptor:
    """TMA loads or stores so many rows and columns at a time."""
    size = rows.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=size * columns, element_bitwidth=8 * size, rank=2)
    return hopper.TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [count, columns], layout)


@aggregate
class Ring:
    gates: gl.shared_memory_descriptor  # the weight; with a gate, its rows
    ups: gl.shared_memory_descriptor  # the rows of `up`
    stacked: gl.shared_memory_descriptor  # the rows of both, if they are one tile
    x: gl.shared_memory_descriptor
    bars: Barriers


@aggregate
class Sizes:
    OUTPUTS: gl.constexpr
    ROWS: gl.constexpr
    STAGES: gl.constexpr
    GATED: gl.constexpr  # 1: by SiLU, 2: by GELU
    K: gl.constexpr
    BLOCK: gl.constexpr
    COLUMNS: gl.constexpr  # of a box of the weight, which TMA loads at a time
    BOXES: gl.constexpr  # of a stage
    X_COLUMNS: gl.constexpr
    X_BOXES: gl.constexpr
    STACKED: gl.constexpr  # rows of `up` follow those of the gate in one tile


@gluon.jit
def new_ring(weight: tma.tensor_descriptor, x: tma.tensor_descriptor, sizes: Sizes) -> Ring:
    STAGES: gl.constexpr = sizes.STAGES
    PLACES: gl.constexpr = sizes.STAGES * sizes.BOXES
    PARTS: gl.constexpr = 2 if sizes.STACKED else 1  # of a tile
    X_PLACES: gl.constexpr = sizes.STAGES * sizes.X_BOXES
    gates = gl.allocate_shared_memory(weight.dtype, [PLACES * PARTS, sizes.OUTPUTS, sizes.COLUMNS], weight.layout)
    ups = gates
    stacked = gates
    if sizes.STACKED:
        stacked = hopper.reinterpret(gates, weight.dtype, [PLACES, 2 * sizes.OUTPUTS, sizes.COLUMNS], weight.layout)
    elif sizes.GATED:
        ups = gl.allocate_shared_memory(weight.dtype, [PLACES, sizes.OUTPUTS, sizes.COLUMNS], weight.layout)
    few = gl.allocate_shared_memory(x.dtype, [X_PLACES, sizes.ROWS, sizes.X_COLUMNS], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(bars.index(i), count=1)
    hopper.fence_async_shared()
    return Ring(gates, ups, stacked, few, Barriers(bars, STAGES))


@gluon.jit
def produce(
    ring: Ring, weight: tma.tensor_descriptor, x: tma.tensor_descriptor, first: gl.tensor, steps: gl.tensor,
    N: gl.tensor, sizes: Sizes,
) -> None:  # fmt: skip
    STAGES: gl.constexpr = sizes.STAGES
    for i in gl.static_range(STAGES):
        load_weights(ring, weight, N, first + i, i, i < steps, sizes)
    hopper.gdc_launch_dependents()
    hopper.gdc_wait()
    for i in gl.static_range(STAGES):
        load_rows(ring, x, first + i, i, i < steps, sizes)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for step in range(STAGES, steps):
        mbarrier.wait(ring.bars.free(stage), phase)
        load_weights(ring, weight, N, first + step, stage, True, sizes)
        load_rows(ring, x, first + step, stage, True, sizes)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def load_weights(
    ring: Ring, weight: tma.tensor_descriptor, N: gl.tensor, step: gl.tensor, stage: gl.tensor, pred: gl.tensor,
    sizes: Sizes,
) -> None:  # fmt: skip
    """Those of a step. The stage is full when the rows of x, which are loaded elsewhere, have come as well."""
    BOXES: gl.constexpr = sizes.BOXES
    GATED: gl.constexpr = sizes.GATED
    PARTS: gl.constexpr = 2 if sizes.STACKED else 1  # of a tile
    SIZE: gl.constexpr = ring.gates.dtype.primitive_bitwidth // 8
    X_SIZE: gl.constexpr = ring.x.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = (2 if GATED else 1) * sizes.OUTPUTS * SIZE * sizes.COLUMNS * BOXES
    X_BYTES: gl.constexpr = sizes.ROWS * X_SIZE * sizes.X_COLUMNS * sizes.X_BOXES
    full, row = ring.bars.full(stage), gl.program_id(0) * sizes.OUTPUTS
    mbarrier.expect(full, BYTES + X_BYTES, pred=pred)
    for i in gl.static_range(BOXES):
        column = (step * BOXES + i) * sizes.COLUMNS
        place = (stage * BOXES + i) * PARTS
        hopper.tma_load(weight, [row, column], full, ring.gates.index(place), pred=pred)
        if GATED:
            hopper.tma_load(weight, [N + row, column], full, ring.ups.index(place + PARTS - 1), pred=pred)


@gluon.jit
def load_rows(
    ring: Ring, x: tma.tensor_descriptor, step: gl.tensor, stage: gl.tensor, pred: gl.tensor, sizes: Sizes
) -> None:
    BOXES: gl.constexpr = sizes.X_BOXES
    for i in gl.static_range(BOXES):
        column = (step * BOXES + i) * sizes.X_COLUMNS
        hopper.tma_load(x, [0, column], ring.bars.full(stage), ring.x.index(stage * BOXES + i), pred=pred)


@gluon.jit
def block_scales(scales: gl.tensor, step: gl.tensor, N: gl.tensor, sizes: Sizes) -> gl.tuple:
    """Of this program's rows and the columns of a step; 1 where weights have none for blocks."""
    BLOCK: gl.constexpr = sizes.BLOCK
    scale, up = gl.to_tensor(1.0), gl.to_tensor(1.0)
    if BLOCK > 0:
        column = step * (sizes.COLUMNS * sizes.BOXES)
        block = scales + gl.program_id(0) * sizes.OUTPUTS // BLOCK * (sizes.K // BLOCK) + column // BLOCK
        scale = gl.load(block)
        if sizes.GATED:
            up = gl.load(block + N // BLOCK * (sizes.K // BLOCK))
    return scale, up


@gluon.jit
def scale_rows(acc: gl.tensor, up: gl.tensor, scales: gl.tensor, N: gl.tensor, sizes: Sizes) -> gl.tuple:
    """Times the scale of each weight row, if there are such."""
    if scales is not None and sizes.BLOCK == 0:
        rows = gl.arange(0, sizes.OUTPUTS, layout=gl.SliceLayout(1, acc.type.layout))
        row_scales = scales + gl.program_id(0) * sizes.OUTPUTS + rows
        acc *= gl.load(row_scales)[:, None]
        if sizes.GATED:
            up *= gl.load(row_scales + N)[:, None]
    return acc, up


@gluon.jit
def store_partial(
    acc: gl.tensor, out: gl.tensor, bias: gl.tensor, M: gl.tensor, N: gl.tensor, row: gl.tensor,
    OUTPUTS: gl.constexpr,
) -> None:  # fmt: skip
    """[OUTPUTS, ROWS] -> out [splits, M, N], whose rows are `row` elements apart. The first split adds the bias."""
    L: gl.constexpr = acc.type.layout
    columns = gl.program_id(0) * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, L))
    rows, split = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, L)), gl.program_id(1)
    if bias is not None:
        acc += gl.load(bias + columns, mask=(columns < N) & (split == 0), other=0.0).to(gl.float32)[:, None]
    target = out + (split * M + rows).to(gl.int64)[None, :] * row + columns[:, None]
    gl.store(target, acc.to(out.dtype.element_ty), mask=(columns < N)[:, None] & (rows < M)[None, :])
