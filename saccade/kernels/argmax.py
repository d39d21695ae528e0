"""The largest of each row and where it is. Knows numbers, not what they rate.

    logits [T, N]: grid (T, splits)      | split 0 | split 1 | ...       each finds its own largest
    keys [T, splits]                     the last split to arrive at the counter of its row compares them

A value and its place are one integer, so that one comparison serves both: the value's bits, turned so that they order
as the values do, above the place counted backwards. Of equal values the first one wins; not a number is the largest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.early import is_early, overlap, wait_for_turn

_MAX_SPLITS = 64
_PROGRAMS = 1056  # that a launch should have: eight for each multiprocessor of an H100 or H200
_BLOCK = 4096


class ArgmaxWorkspace(NamedTuple):
    """Scratch memory of `argmax`. Two streams need two."""

    keys: Tensor  # int64 [rows, _MAX_SPLITS]
    counters: Tensor  # int32 [rows]: splits that have arrived; zero between launches

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device) -> ArgmaxWorkspace:
        return cls(
            torch.empty(max_rows, _MAX_SPLITS, dtype=torch.int64, device=device),
            torch.zeros(max_rows, dtype=torch.int32, device=device),
        )


class Board(NamedTuple):
    """Where the places found are written down for others as well."""

    latest: Tensor  # int64
    lines: Tensor  # int32 [T]: the line of `latest` that each row writes


def argmax(logits: Tensor, workspace: ArgmaxWorkspace, out: Tensor, board: Board | None = None) -> Tensor:
    """logits [T, N], contiguous -> `out`, int64 [T]."""
    rows, size = logits.shape
    assert logits.is_contiguous() and rows <= len(workspace.counters), (logits.shape, len(workspace.counters))
    wanted = min(_PROGRAMS // rows, triton.cdiv(size, _BLOCK), _MAX_SPLITS)
    splits, early = 1 << (max(wanted, 1).bit_length() - 1), is_early(logits)
    _argmax_kernel[(rows, splits)](
        logits, *workspace, out, *(board or (None, None)), size, SPLITS=splits, BLOCK=_BLOCK, EARLY=early,
        num_warps=8, **overlap(early),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["out", "lines"])
def _argmax_kernel(
    logits: tl.tensor, keys: tl.tensor, counters: tl.tensor, out: tl.tensor, latest: tl.tensor, lines: tl.tensor,
    size: tl.tensor, SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_turn(EARLY)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full([BLOCK], -(2**63), tl.int64)
    for first in range(split * BLOCK, size, SPLITS * BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(logits + row * size + places, mask=places < size, other=float("-inf"))
        best = tl.maximum(best, tl.where(places < size, _key(values.to(tl.float32), places), best))
    found = tl.max(best, 0)
    if SPLITS > 1:
        tl.store(keys + row * SPLITS + split, found)
        tl.debug_barrier()  # stored before it is said so
        if tl.atomic_add(counters + row, 1, sem="acq_rel") == SPLITS - 1:
            every = tl.load(keys + row * SPLITS + tl.arange(0, SPLITS), cache_modifier=".cg")
            _write(out, latest, lines, row, tl.max(every, 0))
            tl.store(counters + row, 0)
    else:
        _write(out, latest, lines, row, found)


@triton.jit
def _write(out: tl.tensor, latest: tl.tensor, lines: tl.tensor, row: tl.tensor, key: tl.tensor) -> None:
    place = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    tl.store(out + row, place)
    if latest is not None:
        tl.store(latest + tl.load(lines + row), place)


@triton.jit
def _key(values: tl.tensor, places: tl.tensor) -> tl.tensor:
    bits = values.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative ones are stored by size: turned round
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)
