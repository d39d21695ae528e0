"""Sorts (token, slot) pairs by expert and cuts each expert's pairs into blocks, on the device. Knows no weights.

    experts [T, slots]     2 0 | 0 1 | 2 0            pair = token * slots + slot
    order   [pairs]        1 2 5 | 3 | 0 4            pairs sorted by expert; stable
    blocks  [3, capacity]  expert  0 0 1 2 . .        with 2 rows a block
                           first   0 2 3 4 . .        in `order`
                           rows    2 1 1 2 0 0        0: no block; its programs end at once

The position of a pair is the first position of its expert + equal pairs in earlier chunks + equal pairs before it in
its own chunk. Few pairs: each program counts all pairs itself, one launch. Many: three launches.

    count   a program per chunk     counts [E, chunks + 1]   2 1 0 .     pairs of each expert in each chunk
    scan    a program per expert    in place                 0 2 3 3     those in earlier chunks; all of them
    sort    a program per chunk     order, blocks

No atomics: the order, and with it every later sum, is the same in each run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import power_of_two

MAX_COUNTED_PAIRS = 2048  # that every program counts by itself
_FEW_CHUNK = 64
_MANY_CHUNK = 256
_COMPARED = 32  # pairs of a chunk that are compared with all others at a time


class SortedPairs(NamedTuple):
    order: Tensor  # int32 [pairs]: pair indices by expert
    blocks: Tensor  # int32 [3, capacity]: expert, first position in `order`, rows; no rows after the last block
    slots: int  # experts of a token: pair // slots is the token
    rows: int  # of a block at most


def sort_by_expert(experts: Tensor, num_experts: int, rows: int, *, max_counted: int | None = None) -> SortedPairs:
    """experts, int32 [T, slots], contiguous; `rows` of a block. `max_counted` is for tests."""
    assert experts.dtype == torch.int32 and experts.is_contiguous()
    pairs = experts.numel()
    is_few = pairs <= (MAX_COUNTED_PAIRS if max_counted is None else max_counted)
    chunk = _FEW_CHUNK if is_few else _MANY_CHUNK
    chunks = triton.cdiv(pairs, chunk)
    bins = power_of_two(num_experts, minimum=16)
    capacity = max_blocks(pairs, num_experts, rows)
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    blocks = torch.empty((3, capacity), dtype=torch.int32, device=experts.device)
    pdl = supports_pdl(experts)
    counts = None if is_few else _count(experts, num_experts, chunk, chunks, bins, pdl)
    _sort_kernel[(chunks,)](
        experts, counts, order, blocks, pairs, capacity, chunks, num_experts,
        CHUNK=chunk, COMPARED=_COMPARED, BINS=bins, PAIRS=power_of_two(pairs, minimum=chunk) if is_few else 0,
        OWN_BLOCKS=power_of_two(triton.cdiv(capacity, chunks)), ROWS=rows, PDL=pdl,
        num_warps=4 if pairs <= 256 else 8, **pdl_options(pdl),
    )  # fmt: skip
    return SortedPairs(order, blocks, experts.shape[1], rows)


def _count(experts: Tensor, num_experts: int, chunk: int, chunks: int, bins: int, pdl: bool) -> Tensor:
    """int32 [E, chunks + 1]: pairs of each expert before each chunk, and all of them."""
    counts = torch.empty((num_experts, chunks + 1), dtype=torch.int32, device=experts.device)
    _count_kernel[(chunks,)](
        experts, counts, experts.numel(), chunks, num_experts, CHUNK=chunk, BINS=bins, PDL=pdl, **pdl_options(pdl)
    )
    _scan_kernel[(num_experts,)](
        counts, chunks, CHUNKS=power_of_two(chunks, minimum=32), PDL=pdl, num_warps=1, **pdl_options(pdl)
    )
    return counts


def max_blocks(pairs: int, num_experts: int, rows: int) -> int:
    """Of any routing: each expert with pairs fills all its blocks but the last."""
    return max(1, (pairs + min(num_experts, pairs) * (rows - 1)) // rows)


@triton.jit(do_not_specialize=["pairs", "chunks", "num_experts"])
def _count_kernel(
    experts: tl.tensor, counts: tl.tensor, pairs: tl.tensor, chunks: tl.tensor, num_experts: tl.tensor,
    CHUNK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, BINS)
    pdl_release_then_wait(PDL)
    expert_of_pair = tl.load(experts + pair, mask=pair < pairs, other=0)
    counted = tl.histogram(expert_of_pair, BINS, mask=pair < pairs)
    tl.store(counts + expert * (chunks + 1) + chunk, counted, mask=expert < num_experts)


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(counts: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr, PDL: tl.constexpr) -> None:
    row = counts + tl.program_id(0) * (chunks + 1)
    chunk = tl.arange(0, CHUNKS)
    pdl_release_then_wait(PDL)
    chunk_counts = tl.load(row + chunk, mask=chunk < chunks, other=0)
    tl.store(row + chunk, tl.cumsum(chunk_counts, 0) - chunk_counts, mask=chunk < chunks)
    tl.store(row + chunks, tl.sum(chunk_counts, 0))


@triton.jit(do_not_specialize=["pairs", "capacity", "chunks", "num_experts"])
def _sort_kernel(
    experts: tl.tensor, counts: tl.tensor, order: tl.tensor, blocks: tl.tensor,
    pairs: tl.tensor, capacity: tl.tensor, chunks: tl.tensor, num_experts: tl.tensor,
    CHUNK: tl.constexpr, COMPARED: tl.constexpr, BINS: tl.constexpr, PAIRS: tl.constexpr, OWN_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    chunk = tl.program_id(0)
    pdl_release_then_wait(PDL)
    if counts is None:
        each = tl.arange(0, PAIRS)
        every = tl.load(experts + each, mask=each < pairs, other=0)
        total = tl.histogram(every, BINS, mask=each < pairs)
        earlier = tl.histogram(every, BINS, mask=each < chunk * CHUNK)
    else:
        expert = tl.arange(0, BINS)
        row = counts + expert * (chunks + 1)
        total = tl.load(row + chunks, mask=expert < num_experts, other=0)
        earlier = tl.load(row + chunk, mask=expert < num_experts, other=0)
    ends = tl.cumsum(total, 0)  # [BINS]
    _place(experts, order, ends - total + earlier, chunk, pairs, CHUNK, COMPARED)
    _cut(blocks, total, ends, chunk, chunks, capacity, BINS, OWN_BLOCKS, ROWS)


@triton.jit
def _place(
    experts: tl.tensor, order: tl.tensor, starts: tl.tensor, chunk: tl.tensor, pairs: tl.tensor,
    CHUNK: tl.constexpr, COMPARED: tl.constexpr,
) -> None:  # fmt: skip
    """Write this chunk's pairs to their positions; `starts` [BINS] is where its pairs of each expert begin."""
    local = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + local
    expert = tl.load(experts + pair, mask=pair < pairs, other=0)
    before = tl.zeros([CHUNK], tl.int32)  # equal pairs before each
    for first in range(0, CHUNK, COMPARED):
        other = first + tl.arange(0, COMPARED)
        theirs = tl.load(experts + chunk * CHUNK + other, mask=chunk * CHUNK + other < pairs, other=-1)
        # A thread has all others of its own pairs, so the sum needs no shuffles.
        is_before = (theirs[:, None] == expert[None, :]) & (other[:, None] < local[None, :])
        before += tl.sum(is_before.to(tl.int32), 0)
    tl.store(order + tl.gather(starts, expert, 0) + before, pair, mask=pair < pairs)


@triton.jit
def _cut(
    blocks: tl.tensor, total: tl.tensor, ends: tl.tensor, chunk: tl.tensor, chunks: tl.tensor, capacity: tl.tensor,
    BINS: tl.constexpr, OWN_BLOCKS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Write this program's share of the block table: the i-th block of each expert, and entries after the last."""
    of_expert = (total + ROWS - 1) // ROWS
    block_ends = tl.cumsum(of_expert, 0)  # [BINS]
    for i in range(chunk, tl.max(of_expert, 0), chunks):
        mask = i < of_expert
        block = block_ends - of_expert + i
        first = ends - total + i * ROWS
        tl.store(blocks + block, tl.arange(0, BINS), mask=mask)
        tl.store(blocks + capacity + block, first, mask=mask)
        tl.store(blocks + 2 * capacity + block, tl.minimum(ends - first, ROWS), mask=mask)
    unused = chunk * OWN_BLOCKS + tl.arange(0, OWN_BLOCKS)
    mask = (unused >= tl.max(block_ends, 0)) & (unused < capacity)
    tl.store(blocks + unused, 0, mask=mask)
    tl.store(blocks + capacity + unused, 0, mask=mask)
    tl.store(blocks + 2 * capacity + unused, 0, mask=mask)
