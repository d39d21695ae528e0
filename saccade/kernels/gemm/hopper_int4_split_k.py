"""Split-K GEMMs of up to 64 rows with an INT4 weight for Hopper GPUs, in Gluon.

As `hopper_split_k`; `int4_linear` has the layout of the weight. A stage has 256 columns, two chunks of the weight:

    weight   two boxes [64, 32] of units, a chunk each
    x        four boxes [ROWS, 64], of two planes each

A thread reads two neighbouring units as one register. A shift and a mask make two neighbouring columns of a plane of
it, in bfloat16 or float16 and plus a power of two (`int4_tiles`). Less that and the zero point, they are the operand of
an MMA, in the registers where it is read.

    groups of 128 and 64 columns    their sums are scaled, in float32
    groups of 32                    numbers are scaled before the MMA, in the dtype of x

With a gate, a tile has 32 rows of the gate, and below them 32 of `up`: half as many outputs, so all SMs have a share.
`ops.reference` has the same functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.gemm.hopper_split_k import PipelineConfig
from saccade.kernels.gemm.hopper_split_k_parts import Ring, Sizes, box_of, new_ring, produce, store_partial
from saccade.kernels.gemm.int4_linear import Int4Weight
from saccade.kernels.gemm.skinny import choose_splits
from saccade.kernels.launch import gluon_compat as hopper
from saccade.kernels.launch.gluon_compat import gl, gluon, mbarrier, tma
from saccade.kernels.launch.hopper_pipeline import next_stage
from saccade.kernels.launch.varlen_tiles import power_of_two

MAX_ROWS = 64
_TILE = 64  # weight rows of a program
_INPUTS = 256  # columns of a stage
_UNITS = 32  # of a chunk
_X_COLUMNS = 64  # of a box: 128 bytes, the widest swizzle
_MIN_ROWS = 8  # the fewest columns of an MMA


def suits(rows: int, outputs: int, inputs: int) -> bool:
    """Whole tiles, so that none reaches from a gate into `up`."""
    return rows <= MAX_ROWS and outputs % _TILE == 0 and inputs % 128 == 0


def choose_split_k(rows: int, outputs: int, inputs: int, group: int) -> PipelineConfig:
    """Programs unpack most of the time, so as many share an SM as have registers there (docs/experiments/059)."""
    splits = choose_splits(outputs, inputs, _TILE, _INPUTS, per_sm=3 if registers(rows, group) == 80 else 2)
    return PipelineConfig(min(-(-inputs // (_INPUTS * splits)), _stages(rows)), splits)


def choose_gated(rows: int) -> PipelineConfig:
    return PipelineConfig(_stages(rows))


def _stages(rows: int) -> int:
    return 3 if rows <= 16 else 2


def registers(rows: int, group: int) -> int:
    """Per thread, on average: the consumer has operands, sums and scales, the producer next to nothing."""
    if rows > 32:
        return 128
    return 80 if group == 128 or rows <= _MIN_ROWS else 96


def int4_split_k_linear(x: Tensor, packed: Int4Weight, bias: Tensor | None, config: PipelineConfig) -> Tensor:
    """x [M, K], weight [N, K] -> float32 [splits, M, N], which add up to x @ weight.T + bias."""
    partials = torch.empty((config.splits, len(x), len(packed.weight)), dtype=torch.float32, device=x.device)
    _launch(x, packed, partials, bias, config, gated=False)
    return partials


def int4_linear_into(x: Tensor, packed: Int4Weight, bias: Tensor | None, out: Tensor) -> Tensor:
    """The same without splits, in `out` [M, N], which may be columns of a wider tensor."""
    assert out.shape == (len(x), len(packed.weight)) and out.stride(1) == 1, (out.shape, out.stride())
    _launch(x, packed, out, bias, PipelineConfig(_stages(len(x))), gated=False)
    return out


def int4_split_k_gated_linear(x: Tensor, packed: Int4Weight, config: PipelineConfig) -> Tensor:
    """x [M, K], weight [2 wide, K], the gate's rows first -> silu(x @ gate.T) * (x @ up.T): [M, wide]."""
    wide = len(packed.weight) // 2
    assert wide % _TILE == 0 and config.splits == 1, (wide, config)
    out = torch.empty((len(x), wide), dtype=x.dtype, device=x.device)
    _launch(x, packed, out, None, config, gated=True)
    return out


def _launch(
    x: Tensor, packed: Int4Weight, out: Tensor, bias: Tensor | None, config: PipelineConfig, *, gated: bool
) -> None:
    packed.check(x)
    rows, outputs = power_of_two(len(x), minimum=_MIN_ROWS), _TILE // 2 if gated else _TILE
    _int4_split_k_kernel[(out.shape[-1] // outputs, config.splits)](
        box_of(packed.weight, outputs, _UNITS), box_of(x, rows, _X_COLUMNS), packed.scales, packed.zeros,
        out, bias, len(x), out.shape[-1], out.stride(-2),
        K=packed.inputs, GROUP=packed.group, ROWS=rows, OUTPUTS=outputs,
        STAGES=config.stages, SPLITS=config.splits, GATED=gated, num_warps=4,
        maxnreg=registers(rows, packed.group), launch_pdl=True,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "out_row"])
def _int4_split_k_kernel(
    weight: tma.tensor_descriptor, x: tma.tensor_descriptor, scales: gl.tensor, zeros: gl.tensor, out: gl.tensor,
    bias: gl.tensor, M: gl.tensor, N: gl.tensor, out_row: gl.tensor, K: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, GATED: gl.constexpr,
) -> None:  # fmt: skip
    STEPS: gl.constexpr = (K + 255) // 256
    SHARE: gl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    sizes = Sizes(OUTPUTS, ROWS, STAGES, GATED, K, GROUP, 32, 2, 64, 4, GATED)  # BLOCK: a group
    ring = new_ring(weight, x, sizes)
    first = gl.program_id(1) * SHARE
    steps = gl.minimum(SHARE, STEPS - first)  # of this program, 256 columns each
    gl.warp_specialize(
        [
            (_consume, (ring, scales, zeros, out, bias, first, steps, M, N, out_row, sizes)),
            (produce, (ring, weight, x, first, steps, N, sizes)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _consume(
    ring: Ring, scales: gl.tensor, zeros: gl.tensor, out: gl.tensor, bias: gl.tensor, first: gl.tensor,
    steps: gl.tensor, M: gl.tensor, N: gl.tensor, out_row: gl.tensor, sizes: Sizes,
) -> None:  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.ROWS, 16])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    if sizes.GATED:
        rows = rows % sizes.OUTPUTS + rows // sizes.OUTPUTS * N
    rows = (gl.program_id(0) * sizes.OUTPUTS + rows) * (sizes.K // sizes.BLOCK)
    acc = gl.zeros([64, sizes.ROWS], gl.float32, layout=L)
    here = _load_groups(scales, zeros, rows, first, sizes)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for step in range(steps):
        then = _load_groups(scales, zeros, rows, first + step + 1, sizes)
        mbarrier.wait(ring.bars.full(stage), phase)
        chunk = _multiply(ring, stage, here, zeros, 0, L, sizes)
        if sizes.BLOCK == 64:  # has twice the sums: two chunks at a time would spill
            acc = _add_scaled(acc, chunk, here, 0, 0, sizes)
            chunk = _multiply(ring, stage, here, zeros, 1, L, sizes)
        else:
            second = _multiply(ring, stage, here, zeros, 1, L, sizes)
            acc = _add_scaled(acc, chunk, here, 0, 2, sizes)
            chunk = second
        acc = _add_scaled(acc, chunk, here, 1, 0, sizes)
        mbarrier.arrive(ring.bars.free(stage), count=1)
        here = then
        stage, phase = next_stage(stage, phase, sizes.STAGES)
    if sizes.GATED:
        _store_gated(acc, out, M, out_row, sizes)
    else:
        store_partial(acc, out, bias, M, N, out_row, sizes.OUTPUTS)


@gluon.jit
def _load_groups(scales: gl.tensor, zeros: gl.tensor, rows: gl.tensor, step: gl.tensor, sizes: Sizes) -> gl.tuple:
    """Scales of a stage's groups, then their zero points, [64] each. After the last column: those before it."""
    GROUPS: gl.constexpr = 256 // sizes.BLOCK
    groups = ()
    for i in gl.static_range(GROUPS):
        place = gl.minimum(step * GROUPS + i, sizes.K // sizes.BLOCK - 1)
        groups += (gl.load(scales + rows + place),)  # type: ignore[assignment]
    if zeros is not None:
        for i in gl.static_range(GROUPS):
            place = gl.minimum(step * GROUPS + i, sizes.K // sizes.BLOCK - 1)
            groups += (gl.load(zeros + rows + place),)  # type: ignore[assignment]
    return groups


@gluon.jit
def _multiply(
    ring: Ring, stage: gl.tensor, groups: gl.tuple, zeros: gl.tensor, CHUNK: gl.constexpr, L: gl.constexpr,
    sizes: Sizes,
) -> gl.tuple:  # fmt: skip
    """A chunk of the weight * x: the sums of its halves, which are one with groups of other sizes, and both operands.

    Nothing is waited for, so the operands must be kept until that is done.
    """
    units = ring.stacked.index(stage * 2 + CHUNK).load(gl.DotOperandLayout(0, L, 2))  # int16 [64, 32]
    place = stage * 4 + CHUNK * 2
    few, further = ring.x.index(place).permute((1, 0)), ring.x.index(place + 1).permute((1, 0))
    nothing = gl.zeros([64, sizes.ROWS], gl.float32, layout=L)
    low = _two_planes(units, groups, zeros, CHUNK, 0, ring.x.dtype, sizes)
    sums = hopper.warpgroup_mma(low, few, nothing, use_acc=False, is_async=True)
    high = _two_planes(units, groups, zeros, CHUNK, 2, ring.x.dtype, sizes)
    if sizes.BLOCK == 64:
        more = hopper.warpgroup_mma(high, further, nothing, use_acc=False, is_async=True)
    else:
        sums = hopper.warpgroup_mma(high, further, sums, is_async=True)
        more = sums
    return sums, more, low, high


@gluon.jit
def _add_scaled(
    acc: gl.tensor, chunk: gl.tuple, groups: gl.tuple, CHUNK: gl.constexpr, LATER: gl.constexpr, sizes: Sizes
) -> gl.tensor:
    """acc + the sums of a chunk, once its MMAs are done; LATER ones may be under way."""
    sums, more, low, high = chunk
    if sizes.BLOCK == 64:
        sums, more, low, high = hopper.warpgroup_mma_wait(LATER, deps=(sums, more, low, high))
        acc = gl.fma(sums, groups[CHUNK * 2].to(gl.float32)[:, None], acc)
        return gl.fma(more, groups[CHUNK * 2 + 1].to(gl.float32)[:, None], acc)
    sums, low, high = hopper.warpgroup_mma_wait(LATER, deps=(sums, low, high))
    if sizes.BLOCK == 128:
        return gl.fma(sums, groups[CHUNK].to(gl.float32)[:, None], acc)
    return acc + sums


@gluon.jit
def _store_gated(acc: gl.tensor, out: gl.tensor, M: gl.tensor, out_row: gl.tensor, sizes: Sizes) -> None:
    """The upper half of acc [64, ROWS] is the gate's, the lower one that of `up`."""
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, 4, 1], [2, 0, 1])
    halves = acc.reshape((2, sizes.OUTPUTS, sizes.ROWS)).permute((1, 2, 0))
    gate, up = gl.split(gl.convert_layout(halves, WHOLE))
    L: gl.constexpr = gate.type.layout
    columns = gl.program_id(0) * sizes.OUTPUTS + gl.arange(0, sizes.OUTPUTS, layout=gl.SliceLayout(1, L))
    rows = gl.arange(0, sizes.ROWS, layout=gl.SliceLayout(0, L))
    gated = (gate / (1.0 + gl.exp(-gate)) * up).to(out.dtype.element_ty)
    gl.store(out + rows[None, :] * out_row + columns[:, None], gated, mask=(rows < M)[None, :])


@gluon.jit
def _two_planes(
    units: gl.tensor, groups: gl.tuple, zeros: gl.tensor, CHUNK: gl.constexpr, PLANE: gl.constexpr,
    dtype: gl.constexpr, sizes: Sizes,
) -> gl.tensor:  # fmt: skip
    """Planes PLANE and PLANE + 1 as an operand, [64, 64]."""
    first = _one_plane(units, groups, zeros, CHUNK, PLANE, dtype, sizes)
    second = _one_plane(units, groups, zeros, CHUNK, PLANE + 1, dtype, sizes)
    both = gl.join(first, second).permute((0, 2, 1)).reshape((units.shape[0], 64))
    return gl.convert_layout(both, units.type.layout)


@gluon.jit
def _one_plane(
    units: gl.tensor, groups: gl.tuple, zeros: gl.tensor, CHUNK: gl.constexpr, PLANE: gl.constexpr,
    dtype: gl.constexpr, sizes: Sizes,
) -> gl.tensor:  # fmt: skip
    """Numbers less their zero point; times their scale if they are in groups of 32 columns."""
    L: gl.constexpr = gl.SliceLayout(1, units.type.layout)
    BITS: gl.constexpr = 0x4300 if dtype == gl.bfloat16 else 0x6400
    POWER: gl.constexpr = 128 if dtype == gl.bfloat16 else 1024
    GROUPS: gl.constexpr = 256 // sizes.BLOCK
    GROUP: gl.constexpr = (CHUNK * 128 + PLANE * 32) // sizes.BLOCK
    bits = gl.inline_asm_elementwise(
        f"{{ .reg .b32 s; shr.u32 s, $1, {4 * PLANE}; lop3.b32 $0, s, 0x000F000F, {BITS * 65537}, 0xEA; }}",
        "=r,r", [units], dtype=gl.int16, is_pure=True, pack=2,
    )  # fmt: skip
    zero = gl.full([units.shape[0]], POWER + 8, dtype, layout=L)
    if zeros is not None:
        zero = gl.convert_layout((groups[GROUPS + GROUP].to(gl.float32) + POWER).to(dtype), L)
    numbers = bits.to(dtype, bitcast=True) - zero[:, None]
    if sizes.BLOCK == 32:
        numbers *= gl.convert_layout(groups[GROUP], L).to(dtype)[:, None]
    return numbers
