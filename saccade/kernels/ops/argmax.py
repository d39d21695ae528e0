"""Argmax of each row of logits: greedy sampling.

    logits [T, N]: grid (T, splits)      | split 0 | split 1 | ...       each finds its own largest
    keys [T, splits]                     the last split to arrive at the counter of its row compares them

A value and its index are one integer key, so that one comparison serves both: the value's bits, mapped so that they
order as the values do, above the index counted backwards. Of equal values the first one wins. NaN is the largest, as
in PyTorch; a NaN with its sign bit set, which no arithmetic on a GPU produces, would be the smallest. Inside a split, a
value of 16 bits and its index are 32 bits together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two

_MAX_SPLITS = 64
_MAX_SHARE = 1 << 16  # values of a split whose indices fit 16 bits
_MAX_PROGRAMS = 1056  # of a launch: eight for each SM of an H100 or H200 run at once
_BLOCK = 4096  # values a program reads at a time
_WARPS = 4
_STAGES = 2


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


class TokenSink(NamedTuple):
    """Where sampled tokens are also written: the next step reads its inputs there."""

    last_tokens: Tensor  # int64
    request_rows: Tensor  # int32 [T]: the entry of `last_tokens` that each row writes


def argmax(logits: Tensor, workspace: ArgmaxWorkspace, out: Tensor, sink: TokenSink | None = None) -> Tensor:
    """logits [T, N], contiguous -> `out`, int64 [T]."""
    rows, size = logits.shape
    assert logits.is_contiguous() and rows <= len(workspace.counters), (logits.shape, len(workspace.counters))
    pdl = supports_pdl(logits)
    blocks = triton.cdiv(size, _BLOCK)
    share = triton.cdiv(blocks, max(1, min(blocks, _MAX_PROGRAMS // rows, _MAX_SPLITS))) * _BLOCK
    splits = triton.cdiv(size, share)
    _argmax_kernel[(rows, splits)](
        logits, *workspace, out, *(sink or (None, None)), size, share,
        SPLITS=splits, PADDED=power_of_two(splits), BLOCK=_BLOCK, STAGES=_STAGES,
        IS_SHORT=logits.element_size() == 2 and share <= _MAX_SHARE, PDL=pdl, num_warps=_WARPS, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["out", "request_rows"])
def _argmax_kernel(
    logits: tl.tensor, keys: tl.tensor, counters: tl.tensor, out: tl.tensor, last_tokens: tl.tensor,
    request_rows: tl.tensor, size: tl.tensor, share: tl.tensor, SPLITS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, IS_SHORT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    pdl_release_then_wait(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = split * share
    count = tl.minimum(size - first, share)
    if IS_SHORT:
        largest = _find_short(logits + row * size + first, first, count, BLOCK, STAGES)
    else:
        largest = _find(logits + row * size + first, first, count, BLOCK, STAGES)
    if SPLITS > 1:
        tl.store(keys + row * SPLITS + split, largest)
        tl.debug_barrier()  # stored before this split is counted
        if tl.atomic_add(counters + row, 1, sem="acq_rel") == SPLITS - 1:
            each = tl.arange(0, PADDED)
            every = tl.load(keys + row * SPLITS + each, mask=each < SPLITS, other=-(2**63), cache_modifier=".cg")
            _write(out, last_tokens, request_rows, row, tl.max(every, 0))
            tl.store(counters + row, 0)
    else:
        _write(out, last_tokens, request_rows, row, largest)


@triton.jit
def _find(
    values: tl.tensor, first: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, STAGES: tl.constexpr
) -> tl.tensor:
    """The largest key of so many values, which are those from `first` on of their row."""
    best = tl.full([BLOCK], -(2**63), tl.int64)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        index = start + tl.arange(0, BLOCK)
        here = tl.load(values + index, mask=index < count, other=0.0).to(tl.float32)
        key = _key(_order(here.to(tl.int32, bitcast=True), 31), first + index)
        best = tl.maximum(best, tl.where(index < count, key, best))
    return tl.max(best, 0)


@triton.jit
def _find_short(
    values: tl.tensor, first: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, STAGES: tl.constexpr
) -> tl.tensor:
    """The same for values of 16 bits."""
    best = tl.full([BLOCK], -(2**31), tl.int32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        index = start + tl.arange(0, BLOCK)
        here = tl.load(values + index, mask=index < count, other=0.0).to(tl.int16, bitcast=True)
        short = (_order(here, 15).to(tl.int32) << 16) | (0xFFFF - index)
        best = tl.maximum(best, tl.where(index < count, short, best))
    largest = tl.max(best, 0)
    return _key(largest >> 16, first + 0xFFFF - (largest & 0xFFFF))


@triton.jit
def _write(out: tl.tensor, last_tokens: tl.tensor, request_rows: tl.tensor, row: tl.tensor, key: tl.tensor) -> None:
    token = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    tl.store(out + row, token)
    if last_tokens is not None:
        tl.store(last_tokens + tl.load(request_rows + row), token)


@triton.jit
def _order(bits: tl.tensor, SIGN: tl.constexpr) -> tl.tensor:
    """Integers that order as the values with these bits do: negative floats order backwards, so their bits flip."""
    return bits ^ ((bits >> SIGN) & ((1 << SIGN) - 1))


@triton.jit
def _key(order: tl.tensor, index: tl.tensor) -> tl.tensor:
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
