"""Schedules a decode step: all tiles of keys, divided evenly among programs. Knows contexts, no keys.

    tiles of 64 keys       | request 0, head 0 | request 0, head 1 | request 1, head 0 | ..
    programs               | 0 ........... | 1 ........................... | 2 ..

If the request and head at the end of a share go on in the next one, these tiles come first: all partial results are
then written long before the last tiles, and are combined while other keys are read.

    program 1              | the first tiles of request 1, head 0 | the last of request 0, head 0 | request 0, head 1 |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.varlen_tiles import power_of_two

KEYS = 64  # of a tile
METADATA = 10  # integers of a program


class TileSchedule(NamedTuple):
    """Where programs begin. The first few shares have one tile more than the others."""

    metadata: Tensor  # int32 [programs, METADATA]: two sections (request, head, tile, tiles); tiles of a share; how
    # many shares have one more
    requests: int


def plan_schedule(seq_lens: Tensor, kv_heads: int, programs: int) -> TileSchedule:
    """seq_lens int32 [requests], on the device. Padding rows, which have none and come last, have no tile."""
    metadata = torch.empty((programs, METADATA), dtype=torch.int32, device=seq_lens.device)
    _plan_kernel[(programs,)](
        seq_lens, metadata, len(seq_lens), programs,
        HEADS=kv_heads, KEYS=KEYS, METADATA=METADATA, PADDED=power_of_two(len(seq_lens)), num_warps=4,
    )  # fmt: skip
    return TileSchedule(metadata, len(seq_lens))


@triton.jit(do_not_specialize=["requests"], do_not_specialize_on_alignment=["seq_lens"])
def _plan_kernel(
    seq_lens: tl.tensor, metadata: tl.tensor, requests: tl.tensor, programs: tl.tensor,
    HEADS: tl.constexpr, KEYS: tl.constexpr, METADATA: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    each, program = tl.arange(0, PADDED), tl.program_id(0)
    tiles = tl.cdiv(tl.load(seq_lens + each, mask=each < requests, other=0), KEYS)
    ends, total = tl.cumsum(tiles, 0) * HEADS, tl.sum(tiles, 0) * HEADS
    share, larger = total // programs, total % programs
    first = program * share + tl.minimum(program, larger)
    count = share + (program < larger).to(tl.int32)
    request, head, tile = _locate(first, each, tiles, ends, requests, HEADS)
    other, other_head, cut = _locate(first + count, each, tiles, ends, requests, HEADS)
    ahead = tl.where((cut < count) & (first + count < total), cut, 0)  # tiles of what the next program goes on with
    target = metadata + program * METADATA
    one = tl.where(ahead > 0, 4, 0)  # then the rest is the second section
    _store(target + one, request, head, tile, count - ahead)
    _store(target + 4 - one, other, other_head, 0, ahead)
    tl.store(target + 8, share)
    tl.store(target + 9, larger)


@triton.jit
def _locate(
    index: tl.tensor, each: tl.tensor, tiles: tl.tensor, ends: tl.tensor, requests: tl.tensor, HEADS: tl.constexpr
) -> tl.tuple:
    """Request, head and tile of the tile with this index; undefined after the last one."""
    request = tl.minimum(tl.sum((ends <= index).to(tl.int32), 0), requests - 1)
    inside = index - tl.sum(tl.where(each < request, tiles, 0), 0) * HEADS
    own = tl.maximum(tl.sum(tl.where(each == request, tiles, 0), 0), 1)
    return request, inside // own, inside % own


@triton.jit
def _store(target: tl.tensor, request: tl.tensor, head: tl.tensor, tile: tl.tensor, count: tl.tensor) -> None:
    tl.store(target, request)
    tl.store(target + 1, head)
    tl.store(target + 2, tile)
    tl.store(target + 3, count)
