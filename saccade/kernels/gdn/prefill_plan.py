"""Cuts packed windows into chunks, on the device, once per step. Knows where windows begin, nothing in them.

A window is a run of adjacent pieces with one state row. It is cut into pieces where a checkpoint of its state is
saved, so that a chunk never reaches over a checkpoint:

    tokens    | window of row 5 ........................ | window of row 2 .... | padding ... |
    pieces    | 0 (keep 9) ....... | 1 ................. | 2 .................. | rest        |
    chunks    | 0      | 1     | 2 | 3      | 4      | 5 | 6      | 7      | 8  | 9      | 10 |    at most 64 tokens

Pieces that are not in use come last, have the row -1 and no tokens. Tokens after the last piece are padding.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch.varlen_tiles import power_of_two

CHUNK = 64  # tokens
_PROGRAM_CHUNKS = 32  # chunks that a program of the plan writes


class ChunkPlan(NamedTuple):
    starts: Tensor  # int32 [pieces + 1]: packed token where each piece begins, and the end
    rows: Tensor  # int32 [pieces]: state row
    keep: Tensor  # int32 [pieces]: row that gets a copy of the state after the piece, or -1
    chunks: Tensor  # int32 [max chunks, 4]: first token, tokens, first token of its window, state row or -1
    first_chunks: Tensor  # int32 [pieces + 1]: first chunk of each piece, and the end


def max_chunks(tokens: int, pieces: int) -> int:
    """That these packed tokens are cut into, padding included."""
    return (tokens + (CHUNK - 1) * (pieces + 1)) // CHUNK


def plan_chunks(starts: Tensor, rows: Tensor, keep: Tensor, tokens: int) -> ChunkPlan:
    """`tokens`: packed, padding included."""
    pieces = len(rows)
    assert len(starts) == pieces + 1 and len(keep) == pieces
    chunks = starts.new_empty(max_chunks(tokens, pieces), 4)
    first_chunks = starts.new_empty(pieces + 1)
    _plan_kernel[(triton.cdiv(len(chunks), _PROGRAM_CHUNKS),)](
        starts, rows, chunks, first_chunks, pieces, tokens, len(chunks),
        CHUNK=CHUNK, CHUNKS=_PROGRAM_CHUNKS, PIECES=power_of_two(pieces + 1), num_warps=4,
    )  # fmt: skip
    return ChunkPlan(starts, rows, keep, chunks, first_chunks)


@triton.jit(
    do_not_specialize=["pieces", "tokens", "capacity"],
    do_not_specialize_on_alignment=["starts", "rows", "first_chunks"],
)
def _plan_kernel(
    starts: tl.tensor, rows: tl.tensor, chunks: tl.tensor, first_chunks: tl.tensor,
    pieces: tl.tensor, tokens: tl.tensor, capacity: tl.tensor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIECES: tl.constexpr,
) -> None:  # fmt: skip
    piece = tl.arange(0, PIECES)  # the one after the last is padding
    start = tl.load(starts + piece, mask=piece <= pieces, other=0)
    end = tl.load(starts + piece + 1, mask=piece < pieces, other=0)
    end = tl.where(piece == pieces, tokens, end)
    row = tl.load(rows + piece, mask=piece < pieces, other=-1)
    opens = row != tl.load(rows + piece - 1, mask=(piece > 0) & (piece <= pieces), other=-2)  # a window
    count = tl.where(piece <= pieces, tl.cdiv(end - start, CHUNK), 0)
    last = tl.cumsum(count, 0)
    first = last - count
    if tl.program_id(0) == 0:
        tl.store(first_chunks + piece, first, mask=piece <= pieces)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    index = tl.sum((last[None, :] <= chunk[:, None]).to(tl.int32), 1)
    is_piece = piece[None, :] == index[:, None]
    skipped = (chunk - tl.sum(tl.where(is_piece, first[None, :], 0), 1)) * CHUNK  # tokens of its piece before it
    begin = tl.sum(tl.where(is_piece, start[None, :], 0), 1) + skipped
    length = tl.minimum(tl.sum(tl.where(is_piece, end[None, :], 0), 1) - begin, CHUNK)
    is_before = (opens & (piece <= pieces))[None, :] & (piece[None, :] <= index[:, None])
    window = tl.max(tl.where(is_before, start[None, :], 0), 1)
    target = chunks + chunk * 4
    inside = chunk < capacity
    tl.store(target, begin, mask=inside)
    tl.store(target + 1, tl.maximum(length, 0), mask=inside)
    tl.store(target + 2, window, mask=inside)
    tl.store(target + 3, tl.sum(tl.where(is_piece, row[None, :], 0), 1), mask=inside)
