"""Full attention inside each of several packed images, in Triton. Knows rows and where images begin.

packed patches [T, heads, d]                    grid (tiles, heads): the tiles of an image share its keys in L2

    image 0         image 1
    | tile | tile | tile |..                    each tile reads every key of its own image, no other

A head size between powers of two is two GEMMs instead of one with padding, 80 = 64 + 16:

    q, k, v row     | 0 ........ 63 | 64 .. 79 |
                      first           rest           scores = first . first + rest . rest
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.attention.online_softmax import LOG2_E, divide, weigh
from saccade.kernels.launch import launch_cache
from saccade.kernels.launch.device import precision_of, shared_memory
from saccade.kernels.launch.varlen_tiles import Launch, Tiles, power_of_two

TILE_ROWS = 128  # for Tiles.of(lengths, TILE_ROWS, device)
_MIN_HEAD_DIM = 16  # of a GEMM; smaller ones are padded with zeros
_RESERVED = 1 << 10  # bytes of an SM's shared memory that each program costs beside its own


def packed_vit(
    q: Tensor,  # [T, heads, d], last dimension dense; k and v the same
    k: Tensor,
    v: Tensor,
    tiles: Tiles,  # of the images' lengths
    scale: float,
    *,
    launch: Launch | None = None,
) -> Tensor:
    """[T, heads, d]"""
    tokens, heads, dim = q.shape
    launch = launch or launch_for(q, tiles.rows)
    assert launch.rows == tiles.rows, f"tiles of {tiles.rows} rows, a launch of {launch.rows}"
    if dim < _MIN_HEAD_DIM:
        q, k, v = (torch.nn.functional.pad(x, (0, _MIN_HEAD_DIM - dim)) for x in (q, k, v))
        return packed_vit(q, k, v, tiles, scale, launch=launch)[..., :dim]
    first = power_of_two(dim + 1) // 2  # the largest power of two that fits
    rest = power_of_two(dim - first, minimum=16) if dim > first else 0
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    args = (q, k, v, tiles.starts, tiles.index, out, scale * LOG2_E, q.stride(0), k.stride(0), v.stride(0))
    head_strides = (q.stride(1), k.stride(1), v.stride(1))
    launch_cache.launch(
        _vit_kernel, (len(tiles.index), heads, 1), args,
        (*head_strides, dim, first, rest, launch.rows, launch.keys, precision_of(q)),
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers,
    )  # fmt: skip
    return out


def launch_for(q: Tensor, rows: int) -> Launch:
    if q.element_size() == 4:
        return Launch(rows, keys=32, warps=8, stages=1)
    if rows < 128:
        return Launch(rows, keys=64, warps=4, stages=3)
    launch = Launch(rows, keys=64, warps=8, stages=3)
    dim = q.shape[2]
    shared = 2 * dim * (2 * launch.keys * (launch.stages - 1) + rows)  # bytes: keys, values and queries
    # With 128 registers two programs share an SM, if both have shared memory; larger heads would spill.
    is_shared = dim <= 96 and 2 * (shared + _RESERVED) <= shared_memory(q.device) + _RESERVED
    return launch._replace(registers=128 if is_shared else None)


# Both are slices of a larger array: each alignment would be compiled anew.
@triton.jit(do_not_specialize_on_alignment=["starts", "index"])
def _vit_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, starts: tl.tensor, index: tl.tensor, out: tl.tensor, scale: tl.tensor,
    q_row: tl.tensor, k_row: tl.tensor, v_row: tl.tensor,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr,  # constants, so that loads of a head are aligned
    DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    image, first = tl.load(index + 2 * tile), tl.load(index + 2 * tile + 1)
    start = tl.load(starts + image)
    length = tl.load(starts + image + 1) - start
    if first >= length:
        return
    rows = first + tl.arange(0, ROWS)
    packed = (start + rows).to(tl.int64)
    own = q + packed[:, None] * q_row + head * Q_HEAD
    q1, q2 = _read(own, (rows < length)[:, None], True, DIM, FIRST, REST)
    keys = k + start.to(tl.int64) * k_row + head * K_HEAD
    values = v + start.to(tl.int64) * v_row + head * V_HEAD
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc1 = tl.zeros([ROWS, FIRST], tl.float32)
    acc2 = tl.zeros([ROWS, REST if REST else 1], tl.float32)
    whole = length // KEYS * KEYS
    for tile_start in range(0, whole, KEYS):
        acc1, acc2, largest, total = _attend(
            q1, q2, keys, values, tile_start, length, scale, acc1, acc2, largest, total,
            k_row, v_row, DIM, FIRST, REST, KEYS, PRECISION, False,
        )  # fmt: skip
    if whole < length:
        acc1, acc2, largest, total = _attend(
            q1, q2, keys, values, whole, length, scale, acc1, acc2, largest, total,
            k_row, v_row, DIM, FIRST, REST, KEYS, PRECISION, True,
        )  # fmt: skip
    result = out + (packed[:, None] * tl.num_programs(1) + head) * DIM
    _write(result, acc1, acc2, total, (rows < length)[:, None], DIM, FIRST, REST)


@triton.jit
def _attend(
    q1: tl.tensor, q2: tl.tensor, keys: tl.tensor, values: tl.tensor, first: tl.tensor, length: tl.tensor,
    scale: tl.tensor,
    acc1: tl.tensor, acc2: tl.tensor, largest: tl.tensor, total: tl.tensor, k_row: tl.tensor, v_row: tl.tensor,
    DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, IS_MASKED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """One more tile of keys, from `first` on."""
    own = first + tl.arange(0, KEYS)
    known = own[:, None] < length
    k1, k2 = _read(keys + own[:, None] * k_row, known, IS_MASKED, DIM, FIRST, REST)
    v1, v2 = _read(values + own[:, None] * v_row, known, IS_MASKED, DIM, FIRST, REST)
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)  # [ROWS, KEYS]
    if REST:
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
    if IS_MASKED:
        scores = tl.where(own[None, :] < length, scores, float("-inf"))
    weights, shrink, largest, total = weigh(scores, scale, largest, total)
    weights = weights.to(v1.dtype)
    acc1 = tl.dot(weights, v1, acc1 * shrink[:, None], input_precision=PRECISION)
    if REST:
        acc2 = tl.dot(weights, v2, acc2 * shrink[:, None], input_precision=PRECISION)
    return acc1, acc2, largest, total


@triton.jit
def _read(
    pointers: tl.tensor, known: tl.tensor,
    IS_MASKED: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Rows [n, d] as [n, FIRST] and [n, REST]; without a rest, the second is the first again."""
    dims = tl.arange(0, FIRST)[None, :]
    one = tl.load(pointers + dims, mask=known, other=0.0) if IS_MASKED else tl.load(pointers + dims)
    two = one
    if REST:
        dims = FIRST + tl.arange(0, REST)[None, :]
        if FIRST + REST > DIM:
            two = tl.load(pointers + dims, mask=known & (dims < DIM), other=0.0)
        else:
            two = tl.load(pointers + dims, mask=known, other=0.0) if IS_MASKED else tl.load(pointers + dims)
    return one, two


@triton.jit
def _write(
    result: tl.tensor, acc1: tl.tensor, acc2: tl.tensor, total: tl.tensor, known: tl.tensor,
    DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
) -> None:  # fmt: skip
    kind = result.dtype.element_ty
    dims = tl.arange(0, FIRST)[None, :]
    tl.store(result + dims, divide(acc1, total).to(kind), mask=known)
    if REST:
        dims = FIRST + tl.arange(0, REST)[None, :]
        tl.store(result + dims, divide(acc2, total).to(kind), mask=known & (dims < DIM))
