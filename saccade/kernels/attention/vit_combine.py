"""Combines the partial results of vision attention where tiles were split by keys. Knows slots and tiles, no keys.

    a row of a slot [192, d + 4]    | sums of values, not divided | sum of weights | their level | . | . |

A warp takes a row, and a thread the same columns of all parts: the one reduction is of the sum of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.attention.vit_schedule import SPLIT, TILE_ROWS, TileSchedule
from saccade.kernels.launch.pdl import pdl_options, pdl_wait_then_release, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two

CELL = 4  # elements of a row after its values: two, and two more that keep rows aligned
_PARTS = 8  # that are combined at once
_PROGRAMS = 20  # for each program of the schedule: most have one row


def combine(
    parts: Tensor,  # float32 [slots, TILE_ROWS, d + CELL]
    schedule: TileSchedule,
    out: Tensor,  # [T, heads, d]: rows of tiles that were split are written
    launch: Callable[..., object] | None = None,
) -> Any:
    """Returns the launch of the compiled kernel; passed the next time, it saves Triton's lookup."""
    _, heads, dim = out.shape
    pdl = supports_pdl(out)
    args = (parts, schedule.splits, out, heads)
    sizes = (dim, power_of_two(dim + CELL), TILE_ROWS, dim + CELL, SPLIT, _PARTS, pdl)
    if launch is not None:
        launch(*args, *sizes)
        return launch
    grid = (_PROGRAMS * schedule.programs, 1, 1)
    kernel = _combine_kernel[grid](*args, *sizes, num_warps=1, **pdl_options(pdl))
    return kernel and kernel[grid]


@triton.jit(do_not_specialize=["heads"], do_not_specialize_on_alignment=["splits"])
def _combine_kernel(
    parts: tl.tensor, splits: tl.tensor, out: tl.tensor, heads: tl.tensor,
    DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, PITCH: tl.constexpr,
    SPLIT: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """All rows of the tiles that were split. Where these are was written before the previous kernel."""
    dims, end = tl.arange(0, PADDED), tl.load(splits) * TILE
    i = tl.program_id(0)
    first, count, head, slot, num = _split(splits + 1 + i // TILE * SPLIT, i < end)
    pdl_wait_then_release(PDL)
    while i < end:
        row = i % TILE
        if row < count:
            acc = _merge(parts + (slot.to(tl.int64) * TILE + row) * PITCH, num, dims, DIM, PITCH, TILE, PARTS)
            result = acc / tl.sum(tl.where(dims == DIM, acc, 0.0), 0)
            target = out + ((first + row).to(tl.int64) * heads + head) * DIM
            tl.store(target + dims, result.to(out.dtype.element_ty), mask=dims < DIM)
        i += tl.num_programs(0)
        first, count, head, slot, num = _split(splits + 1 + i // TILE * SPLIT, i < end)


@triton.jit
def _split(at: tl.tensor, known: tl.tensor) -> tl.tuple:
    """Of a tile: its first row, rows, head, first slot, parts."""
    first, count, head = tl.load(at, mask=known), tl.load(at + 1, mask=known), tl.load(at + 2, mask=known)
    return first, count, head, tl.load(at + 3, mask=known), tl.load(at + 4, mask=known)


@triton.jit
def _merge(
    row: tl.tensor, num: tl.tensor, dims: tl.tensor,
    DIM: tl.constexpr, PITCH: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sums of values and, after them, of weights, relative to the same level."""
    largest = float("-inf")
    acc = tl.zeros(dims.shape, tl.float32)
    for begin in range(0, num, PARTS):
        part = begin + tl.arange(0, PARTS)
        level = tl.load(row + part * (TILE * PITCH) + DIM + 1, mask=part < num, other=float("-inf"))
        readable = (part < num)[:, None] & (dims < PITCH)[None, :]  # whole vectors: the last columns are not used
        found = tl.load(row + part[:, None] * (TILE * PITCH) + dims[None, :], mask=readable, other=0.0)
        larger = tl.maximum(largest, tl.max(level, 0))
        acc = acc * tl.exp2(largest - larger) + tl.sum(found * tl.exp2(level - larger)[:, None], 0)
        largest = larger
    return acc
