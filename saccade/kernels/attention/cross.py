"""Cross-attention to encoded images, in Triton: no mask, and keys and values that lie anywhere. Knows no image.

Rows that attend to the same images are a stretch. A table lists the states of its images, one entry a state.

    packed rows    a a a b b b b c c        stretches a, b, c;  c attends to nothing, its result is zero
    tables         a | 7 3 9 .              states, as indices into keys and values; counts 3, 4, 0
                   b | 0 1 2 8

    grid (kv_heads, splits, tiles)          rows of a tile are (token, head) pairs that share a key head

The states of a stretch are split evenly among programs, by shapes alone, so that a CUDA graph can hold the launch. A
second launch combines the partial results; rows that have only one split are written at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.attention.online_softmax import LOG2_E, divide, new_accumulator, weigh
from saccade.kernels.attention.prefill_combine import combine, new_partials
from saccade.kernels.launch.device import num_sms, precision_of, shared_memory
from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import Launch, Tiles, power_of_two

_MAX_SPLITS = 32
_MIN_SHARE = 128  # states of a split
_PROGRAMS_PER_SM = 2
_MAX_ROWS = 64


class Stretches(NamedTuple):
    tiles: Tiles  # of the stretches, `tile_tokens` rows each
    tables: Tensor  # int32 [table rows, max states]
    rows: Tensor  # int32 [stretches]: of the tables
    counts: Tensor  # int32 [stretches]: states; 0: none


def tile_tokens(tokens: int, heads: int, kv_heads: int) -> int:
    """Tokens of a tile, in a pass of stretches that have up to so many."""
    return max(min(tokens, _MAX_ROWS * kv_heads // heads), 1)


def cross_attention(
    q: Tensor,  # [T, heads, d], last dimension dense
    keys: Tensor,  # [states, kv_heads, d], last dimension dense
    values: Tensor,  # the same
    stretches: Stretches,
    scale: float,
    *,
    splits: int | None = None,
    launch: Launch | None = None,
    out: Tensor | None = None,  # [T, heads, d], contiguous
) -> Tensor:
    """[T, heads, d]. Rows of no stretch are undefined."""
    tokens, heads, dim = q.shape
    kv_heads = keys.shape[1]
    tiles = stretches.tiles
    splits = splits or choose_splits(kv_heads * len(tiles.index), stretches.tables.shape[1], num_sms(q.device))
    launch = launch or launch_for(q, tiles.rows * heads // kv_heads)
    assert q.stride(2) == keys.stride(2) == values.stride(2) == 1
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device) if out is None else out
    parts = new_partials(splits, out) if splits > 1 else None
    pdl = supports_pdl(q)
    _cross_kernel[(kv_heads, splits, len(tiles.index))](
        q, keys, values, stretches.tables, stretches.rows, stretches.counts, tiles.starts, tiles.index, out,
        *(parts or (None,) * 4), tokens * heads, scale * LOG2_E,
        q.stride(0), keys.stride(0), values.stride(0), stretches.tables.stride(0),
        Q_HEAD=q.stride(1), K_HEAD=keys.stride(1), V_HEAD=values.stride(1), GROUP=heads // kv_heads, TOKENS=tiles.rows,
        DIM=dim, PADDED_DIM=power_of_two(dim, minimum=16), ROWS=launch.rows, KEYS=launch.keys, IS_SPLIT=splits > 1,
        MIN_SHARE=triton.cdiv(_MIN_SHARE, launch.keys), PRECISION=precision_of(q), PDL=pdl,
        num_warps=launch.warps, num_stages=launch.stages, **pdl_options(pdl),
    )  # fmt: skip
    if parts is not None:
        combine(parts, out)
    return out


def choose_splits(programs: int, max_states: int, sms: int) -> int:
    """Enough for two programs per SM, where tiles and heads alone give fewer."""
    return max(min(_PROGRAMS_PER_SM * sms // programs, max_states // _MIN_SHARE, _MAX_SPLITS), 1)


def launch_for(q: Tensor, rows: int) -> Launch:
    rows = power_of_two(rows, minimum=16)
    if q.element_size() == 4:
        return Launch(rows, keys=32, warps=4, stages=1)
    return Launch(rows, keys=64, warps=4, stages=3 if shared_memory(q.device) > 160 << 10 else 2)


# Step metadata changes alignment and width from step to step: each variant would be compiled anew.
@triton.jit(
    do_not_specialize=["table_row", "cells"],
    do_not_specialize_on_alignment=["tables", "table_rows", "counts", "starts", "index"],
)
def _cross_kernel(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, tables: tl.tensor, table_rows: tl.tensor, counts: tl.tensor,
    starts: tl.tensor, index: tl.tensor, out: tl.tensor,
    mixed: tl.tensor, maxima: tl.tensor, sums: tl.tensor, active: tl.tensor, cells: tl.tensor, scale: tl.tensor,
    q_row: tl.tensor, k_state: tl.tensor, v_state: tl.tensor, table_row: tl.tensor,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, IS_SPLIT: tl.constexpr,
    MIN_SHARE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    stretch = tl.load(index + 2 * tl.program_id(2))
    first = tl.load(index + 2 * tl.program_id(2) + 1)
    start = tl.load(starts + stretch)
    length = tl.load(starts + stretch + 1) - start
    count = tl.load(counts + stretch)
    share = count
    if IS_SPLIT:
        share = tl.maximum(tl.cdiv(tl.cdiv(count, KEYS), tl.num_programs(1)), MIN_SHARE) * KEYS  # in whole tiles
    low = split * share
    pdl_release_then_wait(PDL)
    if first >= length or (split > 0 and low >= count):  # split 0 also writes for rows that attend to nothing
        return
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)[None, :]
    token = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    known = (token < length) & (rows < TOKENS * GROUP)
    packed = (start + token).to(tl.int64)
    inside = known[:, None] & (dims < DIM)
    queries = tl.load(q + packed[:, None] * q_row + head[:, None] * Q_HEAD + dims, mask=inside, other=0.0)
    table = tables + tl.load(table_rows + stretch).to(tl.int64) * table_row
    acc, largest, total = _attend_states(
        queries, k_cache + kv_head * K_HEAD, v_cache + kv_head * V_HEAD, table, low, tl.minimum(count, low + share),
        count, scale, k_state, v_state, DIM, KEYS, PRECISION,
    )  # fmt: skip
    cell = packed * (tl.num_programs(0) * GROUP) + head
    if count <= share or count == 0:
        tl.store(out + cell[:, None] * DIM + dims, divide(acc, total).to(out.dtype.element_ty), mask=inside)
        if IS_SPLIT:  # nothing to combine; every head writes it
            tl.store(active + packed, tl.zeros_like(rows), mask=known)
    elif IS_SPLIT:
        part = split.to(tl.int64) * cells + cell
        tl.store(mixed + part[:, None] * DIM + dims, acc, mask=inside)
        tl.store(maxima + part, largest, mask=known)
        tl.store(sums + part, total, mask=known)
        if split == 0:
            tl.store(active + packed, tl.zeros_like(rows) + tl.cdiv(count, share), mask=known)


@triton.jit
def _attend_states(
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, table: tl.tensor, low: tl.tensor, high: tl.tensor,
    count: tl.tensor, scale: tl.tensor, k_state: tl.tensor, v_state: tl.tensor,
    DIM: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The states from `low` to `high`, tile by tile; `count` of the table are this stretch's."""
    ROWS: tl.constexpr = queries.shape[0]
    PADDED_DIM: tl.constexpr = queries.shape[1]
    dims = tl.arange(0, PADDED_DIM)[None, :]
    largest, total, acc = new_accumulator(ROWS, PADDED_DIM)
    for tile in range(low, high, KEYS):
        own = tile + tl.arange(0, KEYS)
        seen = own < count
        states = tl.load(table + own, mask=seen, other=0).to(tl.int64)[:, None]
        readable = seen[:, None] & (dims < DIM)
        k = tl.load(keys + states * k_state + dims, mask=readable, other=0.0)
        v = tl.load(values + states * v_state + dims, mask=readable, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)  # [ROWS, KEYS]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        weights, shrink, largest, total = weigh(scores, scale, largest, total)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, largest, total
