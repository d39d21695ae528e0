"""All tiles of keys of a decode step, shared out evenly between programs. Knows contexts, not what lies in them.

    tiles of 64 keys       | request 0, head 0 | request 0, head 1 | request 1, head 0 | ..
    shares of programs     | 0 ........... | 1 ........................... | 2 ..

What a share ends with, if others have the rest of it, comes first: all parts of a request and head are then there long
before the last tiles, and are added up while others are read.

    program 1              | the first tiles of request 1, head 0 | the last of request 0, head 0 | request 0, head 1 |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.tiling import power_of_two

KEYS = 64  # of a tile
METADATA = 10  # that tell a program its share


class TileSchedule(NamedTuple):
    """Where programs begin. The first few shares have one tile more than the others."""

    metadata: Tensor  # int32 [programs, NUMBERS]: request, head, tile, tiles; the same; a share's least; larger ones
    requests: int


def plan_schedule(contexts: Tensor, kv_heads: int, programs: int) -> TileSchedule:
    """contexts int32 [requests], on the device. Rows of padding, which have none and come last, have no tile."""
    metadata = torch.empty((programs, METADATA), dtype=torch.int32, device=contexts.device)
    _plan_kernel[(programs,)](
        contexts, metadata, len(contexts), programs,
        HEADS=kv_heads, KEYS=KEYS, METADATA=METADATA, PADDED=power_of_two(len(contexts)), num_warps=4,
    )  # fmt: skip
    return TileSchedule(metadata, len(contexts))


@triton.jit(do_not_specialize=["requests"], do_not_specialize_on_alignment=["contexts"])
def _plan_kernel(
    contexts: tl.tensor, metadata: tl.tensor, requests: tl.tensor, programs: tl.tensor,
    HEADS: tl.constexpr, KEYS: tl.constexpr, METADATA: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    each, program = tl.arange(0, PADDED), tl.program_id(0)
    tiles = tl.cdiv(tl.load(contexts + each, mask=each < requests, other=0), KEYS)
    ends, total = tl.cumsum(tiles, 0) * HEADS, tl.sum(tiles, 0) * HEADS
    share, larger = total // programs, total % programs
    first = program * share + tl.minimum(program, larger)
    count = share + (program < larger).to(tl.int32)
    request, head, tile = _whose(first, each, tiles, ends, requests, HEADS)
    other, other_head, cut = _whose(first + count, each, tiles, ends, requests, HEADS)
    ahead = tl.where((cut < count) & (first + count < total), cut, 0)  # of what others go on with
    place = metadata + program * METADATA
    one = tl.where(ahead > 0, 4, 0)  # then the rest is the second
    _store(place + one, request, head, tile, count - ahead)
    _store(place + 4 - one, other, other_head, 0, ahead)
    tl.store(place + 8, share)
    tl.store(place + 9, larger)


@triton.jit
def _whose(
    place: tl.tensor, each: tl.tensor, tiles: tl.tensor, ends: tl.tensor, requests: tl.tensor, HEADS: tl.constexpr
) -> tl.tuple:
    """The request, head and tile that stand at this place of all; behind the last one, nothing that counts."""
    request = tl.minimum(tl.sum((ends <= place).to(tl.int32), 0), requests - 1)
    inside = place - tl.sum(tl.where(each < request, tiles, 0), 0) * HEADS
    own = tl.maximum(tl.sum(tl.where(each == request, tiles, 0), 0), 1)
    return request, inside // own, inside % own


@triton.jit
def _store(place: tl.tensor, request: tl.tensor, head: tl.tensor, tile: tl.tensor, count: tl.tensor) -> None:
    tl.store(place, request)
    tl.store(place + 1, head)
    tl.store(place + 2, tile)
    tl.store(place + 3, count)
