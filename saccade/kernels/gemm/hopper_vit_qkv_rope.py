"""QKV projection with RoPE as its epilogue for Hopper GPUs, in Gluon. Knows rows and heads, no tower.

Roles and tiles are those of `hopper_act`. Dimensions i and i + d / 2 of a head rotate as a pair: rows of the weight are
loaded so that the two become neighbouring columns, which one thread has. Attention does not depend on the order of a
head's dimensions as long as queries and keys share it, so whole gemm.boxes are stored as they come:

    a row    | q: 64 of each head, 32 pairs | 16 of each head, the other 8 pairs | k: the same | v: head by head |

`vit_hopper` reads a head in the same two parts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from saccade.kernels.gemm import hopper_mainloop as gemm
from saccade.kernels.launch import gluon_compat as hopper
from saccade.kernels.launch.gluon_compat import aggregate, gl, gluon, mbarrier, tma
from saccade.kernels.launch.hopper_pipeline import next_stage
from saccade.kernels.launch.launch_cache import launch_for_any_size

DIM = 80  # of a head: 64 and 16
_DIM = gl.constexpr(DIM)
_SHORT_HEADS = 16  # heads of a tile of short parts
_OPTIONS = {"num_warps": 4, "maxnreg": 168, "launch_pdl": True}
_MIN_UTILIZATION = 0.78  # of the SMs; below, two launches with smaller tiles are faster
_PAIRS = gl.NVMMASharedLayout(swizzle_byte_width=2 * gemm.BOX, element_bitwidth=16, rank=4)


def hopper_qkv_rope(
    x: Tensor,  # [T, K], contiguous as all that follow
    weight: Tensor,  # [3 * heads * d, K]
    bias: Tensor,  # [3 * heads * d]
    rotary: Tensor,  # float32 [T, d]: cosine and sine of each pair
    heads: int,
    programs: int,  # one per SM
) -> Tensor:
    """x @ weight.T + bias with RoPE applied to queries and keys, in the order above: [T, 3, heads, d]."""
    rows, inputs = x.shape
    outputs = len(weight)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tiles = gemm.num_tiles(rows, outputs, False)
    whole = gemm.num_whole(tiles, programs)
    args = (
        gemm.boxes(x), gemm.boxes(weight), *_pair_boxes(weight), gemm.boxes(out),
        bias, rotary, rows, inputs, whole, 2 * (tiles - whole),
    )  # fmt: skip
    grid = (min(programs, 2 * tiles - whole), 1, 1)
    key = (x.dtype, x.device)
    launch_for_any_size(_qkv_kernel, grid, args, partial(_like, *key), key, (heads,), **_OPTIONS)
    return out.view(rows, 3, heads, -1)


def suits(rows: int, inputs: int, heads: int, dim: int, programs: int) -> bool:
    """Whether tiles divide such heads, and it is faster than a GEMM and RoPE in two launches."""
    is_divided = heads % _SHORT_HEADS == 0 and dim == DIM and inputs % gemm.ALIGNED == 0
    return is_divided and gemm.utilization(rows, 3 * heads * dim, False, programs) >= _MIN_UTILIZATION


def _like(dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    box = torch.empty((gemm.BOX, gemm.BOX), dtype=dtype, device=device)
    rotary = torch.empty(gemm.BOX, dtype=torch.float32, device=device)
    boxes = (gemm.boxes(box), gemm.boxes(box), *_pair_boxes(box), gemm.boxes(box))
    return *boxes, box, rotary, gemm.BOX, gemm.BOX, 0, 0


def _pair_boxes(weight: Tensor) -> tuple[hopper.TensorDescriptor, hopper.TensorDescriptor]:
    """32 pairs of a head, 8 pairs of 4 heads: the two of a pair are next to each other."""
    outputs, inputs = weight.shape
    shape = (outputs // DIM, DIM // 2, 2, inputs)
    strides = (DIM * inputs, inputs, DIM // 2 * inputs, 1)
    long = gemm.Unchecked(weight, shape, strides, [1, 32, 2, gemm.BOX], _PAIRS)
    return long, gemm.Unchecked(weight, shape, strides, [4, 8, 2, gemm.BOX], _PAIRS)


@aggregate
class _Sources:
    x: tma.tensor_descriptor
    weight: tma.tensor_descriptor
    long: tma.tensor_descriptor  # the weight, in gemm.boxes of pairs
    short: tma.tensor_descriptor


@aggregate
class _Epilogue:
    out: tma.tensor_descriptor
    bias: gl.tensor
    rotary: gl.tensor


@gluon.jit(do_not_specialize=["M", "whole", "halves"])
def _qkv_kernel(
    x: tma.tensor_descriptor, weight: tma.tensor_descriptor,
    long: tma.tensor_descriptor, short: tma.tensor_descriptor, out: tma.tensor_descriptor,
    bias: gl.tensor, rotary: gl.tensor,
    M: gl.tensor, K: gl.tensor, whole: gl.tensor, halves: gl.tensor, HEADS: gl.constexpr,
) -> None:  # fmt: skip
    ring = gemm.new_ring(x)
    shape = gemm.Shape(M, gl.to_tensor(3 * HEADS * _DIM), K, whole, halves)
    epilogue = _Epilogue(out, bias, rotary)
    hopper.gdc_wait()  # before the release: dependents that do not wait may read what was written before this launch
    hopper.gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (ring, epilogue, shape, 0, HEADS)),
            (_consume, (ring, epilogue, shape, 1, HEADS)),
            (_produce, (ring, _Sources(x, weight, long, short), shape, HEADS)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _columns_at(output: gl.tensor, HEADS: gl.constexpr) -> gl.tuple:
    """Of a tile that begins there: has it values, has it short parts, its first head (keys follow queries)."""
    kind = output // (HEADS * _DIM)  # 0: queries, 1: keys, 2: values
    inside = output - kind * (HEADS * _DIM)
    is_short = inside >= HEADS * 64
    head = kind * HEADS + gl.where(is_short, (inside - HEADS * 64) // 16, inside // 64)
    return kind == 2, is_short, head


@gluon.jit
def _produce(ring: gemm.Ring, sources: _Sources, shape: gemm.Shape, HEADS: gl.constexpr) -> None:
    stage, phase = _load_tiles(ring, sources, shape, shape.whole, gl.to_tensor(0), gl.to_tensor(0), 256, HEADS)
    _load_tiles(ring, sources, shape, shape.halves, stage, phase, 128, HEADS)


@gluon.jit
def _load_tiles(
    ring: gemm.Ring, sources: _Sources, shape: gemm.Shape, units: gl.tensor, stage: gl.tensor, phase: gl.tensor,
    WIDE: gl.constexpr, HEADS: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    weights = ring.weights
    longs = hopper.reinterpret(weights, weights.dtype, [4 * gemm.STAGES, 1, 32, 2, 64], sources.long.layout)
    shorts = hopper.reinterpret(weights, weights.dtype, [4 * gemm.STAGES, 4, 8, 2, 64], sources.short.layout)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, output = gemm.tile_start(unit, shape, WIDE, False)
        is_value, is_short, head = _columns_at(output, HEADS)
        for k in range(0, shape.K, 64):
            full = ring.bars.full(stage)
            mbarrier.wait(ring.bars.free(stage), phase ^ 1)
            mbarrier.expect(full, (gemm.GROUPS * 64 + WIDE) * 64 * 2)
            for i in gl.static_range(WIDE // 64):
                if is_value:
                    hopper.tma_load(sources.weight, [output + i * 64, k], full, weights.index(4 * stage + i))
                elif is_short:
                    hopper.tma_load(sources.short, [head + 4 * i, 32, 0, k], full, shorts.index(4 * stage + i))
                else:
                    hopper.tma_load(sources.long, [head + i, 0, 0, k], full, longs.index(4 * stage + i))
            for i in gl.static_range(gemm.GROUPS):
                hopper.tma_load(sources.x, [row + i * 64, k], full, ring.rows.index(gemm.GROUPS * stage + i))
            stage, phase = next_stage(stage, phase, gemm.STAGES)
    return stage, phase


@gluon.jit
def _consume(ring: gemm.Ring, epilogue: _Epilogue, shape: gemm.Shape, GROUP: gl.constexpr, HEADS: gl.constexpr) -> None:
    cursor = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))  # stage, phase, buffer for the next result
    cursor = _compute_tiles(ring, epilogue, shape, shape.whole, cursor, 256, GROUP, HEADS)
    _compute_tiles(ring, epilogue, shape, shape.halves, cursor, 128, GROUP, HEADS)
    tma.store_wait(0)


@gluon.jit
def _compute_tiles(
    ring: gemm.Ring, epilogue: _Epilogue, shape: gemm.Shape, units: gl.tensor, cursor: gl.tuple,
    WIDE: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
) -> gl.tuple:  # fmt: skip
    results, out = ring.results, epilogue.out
    stage, phase, buffer = cursor
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, output = gemm.tile_start(unit, shape, WIDE, False)
        is_value, is_short, head = _columns_at(output, HEADS)
        acc, stage, phase = gemm.multiply(ring, shape, stage, phase, WIDE, GROUP)
        SUMS: gl.constexpr = acc.type.layout
        # both are loaded while the last WGMMA runs
        more = _biases(epilogue.bias, output, is_value, is_short, head, SUMS, WIDE)
        cos, sin = _cos_sin(epilogue.rotary, row + GROUP * 64, shape.M, is_value, is_short)
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(ring.bars.free(gemm.previous_stage(stage)), count=1)
        acc += more.to(gl.float32)
        if is_value:
            buffer = _finish(results, out, acc, cos, sin, row + GROUP * 64, output, buffer, GROUP, False)
        else:
            buffer = _finish(results, out, acc, cos, sin, row + GROUP * 64, output, buffer, GROUP, True)
    return stage, phase, buffer


@gluon.jit
def _biases(
    bias: gl.tensor, output: gl.tensor, is_value: gl.tensor, is_short: gl.tensor, head: gl.tensor,
    SUMS: gl.constexpr, WIDE: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Of a tile's columns: [1, WIDE]."""
    columns = gl.arange(0, WIDE, layout=gl.SliceLayout(0, SUMS))
    box, heads, pairs, which = columns // 64, columns // 16 % 4, columns // 2 % 8, columns % 2
    first, next_box, next_head = head * _DIM, _DIM, 8
    next_pair, next_half = 1, _DIM // 2
    if is_value:
        first, next_box, next_head, next_pair, next_half = output, 64, 16, 2, 1
    elif is_short:
        first, next_box, next_head, next_pair, next_half = head * _DIM + 32, 4 * _DIM, _DIM, 1, _DIM // 2
    places = first + box * next_box + heads * next_head + pairs * next_pair + which * next_half
    return gl.load(bias + places)[None, :]


@gluon.jit
def _cos_sin(rotary: gl.tensor, row: gl.tensor, M: gl.tensor, is_value: gl.tensor, is_short: gl.tensor) -> gl.tuple:
    """Cosines and sines of a box's pairs: [64, 32] each."""
    BOX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, BOX))[:, None]
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, BOX))[None, :]
    columns = gl.where(is_short, 64 + columns % 16, columns)
    mask = (rows < M) & (columns >= 0) & (is_value == 0)
    return gl.split(gl.reshape(gl.load(rotary + rows * _DIM + columns, mask=mask, other=0.0), [64, 32, 2]))


@gluon.jit
def _finish(
    results: gl.shared_memory_descriptor, out: tma.tensor_descriptor, sums: gl.tensor, cos: gl.tensor, sin: gl.tensor,
    row: gl.tensor, output: gl.tensor, buffer: gl.tensor, GROUP: gl.constexpr, IS_ROTATED: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Rotate and store sums [64, 64 to 256]."""
    WIDE: gl.constexpr = sums.shape[1]
    if WIDE > 64:
        left, right = gemm.left_right(sums)
        buffer = _finish(results, out, left, cos, sin, row, output, buffer, GROUP, IS_ROTATED)
        buffer = _finish(results, out, right, cos, sin, row, output + WIDE // 2, buffer, GROUP, IS_ROTATED)
    else:
        tma.store_wait(1)  # the last store may still read from the other buffer
        here = results.index(2 * GROUP + buffer)
        if IS_ROTATED:
            sums = _rotate(sums, cos, sin)
        here.store(sums.to(results.dtype))
        hopper.fence_async_shared()
        hopper.tma_store(out, [row, output], here)
        buffer = buffer ^ 1
    return buffer


@gluon.jit
def _rotate(sums: gl.tensor, cos: gl.tensor, sin: gl.tensor) -> gl.tensor:
    low, high = gl.split(gl.reshape(sums, [64, 32, 2]))
    rotated = gl.join(low * cos - high * sin, high * cos + low * sin)
    return gl.convert_layout(gl.reshape(rotated, [64, 64]), sums.type.layout, assert_trivial=True)
