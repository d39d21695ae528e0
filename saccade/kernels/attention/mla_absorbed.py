"""MLA attention in its absorbed form over the paged KV cache, in Triton: decode, and windows of a few tokens.

All heads share the cached vectors, so rows of a GEMM are (token, head) pairs. A cached vector is key and value at once:
a tile of them is read once, for the scores and for the sum of values.

    queries [T, heads, 512 + 64]      cache of a layer [slots, 1, 512 + 64]     out [T, heads, 512]

    tile of keys [keys, 512 | 64]     scores  [keys, rows]  =  keys . queries^T
    queries      [rows, 512 | 64]     acc     [512, rows]  +=  latents^T . weights

Both GEMMs have the keys on the side that is at least 64 long: the few rows of a decode step then fit tensor cores, and
queries stay in shared memory.

    grid (tiles of heads, splits, tiles of tokens)      16 heads, 64 rows: a tile has 4 tokens
    decode: one token a tile                            16 heads, 16 rows

The keys of a context are split evenly among programs, by shapes alone, so that a CUDA graph can hold the launch. A
second launch combines the partial results; rows that have only one split are written at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.attention.decode_triton import slots_of
from saccade.kernels.attention.online_softmax import LOG2_E
from saccade.kernels.attention.prefill_combine import MAX_SPLITS, combine, new_partials
from saccade.kernels.launch.device import is_hopper, num_sms, precision_of
from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import Launch, Tiles, power_of_two

_MAX_SPLITS = 64
_MIN_SHARE = 64  # keys of a split: reading fewer takes as long
_MAX_DECODE_ROWS = 32
_TYPICAL_CONTEXT = 2048  # what `choose_splits` weighs partial results against
_KEYS_PER_PARTIAL = 57  # that are as many bytes as writing and reading a partial result of 16 heads


def mla_decode(
    queries: Tensor,  # [requests, heads, rank + rope], contiguous
    cache: Tensor,  # [slots, 1, rank + rope], contiguous; it holds the new tokens already
    block_tables: Tensor,  # int32 [requests, max_blocks]
    seq_lens: Tensor,  # int32 [requests], the new token included; 0 for a padding row, whose result is zero
    rank: int,
    block_size: int,
    scale: float,
    *,
    splits: int | None = None,
    launch: Launch | None = None,
    out: Tensor | None = None,  # [requests, heads, rank], contiguous
) -> Tensor:
    """[requests, heads, rank]. The grid depends on shapes alone: batch size, and the longest context of the tables."""
    requests, heads, _ = queries.shape
    launch = launch or decode_launch(cache, heads)
    head_tiles = triton.cdiv(heads, launch.rows)
    max_context = block_tables.shape[1] * block_size
    splits = splits or choose_splits(requests * head_tiles, max_context, num_sms(cache.device))
    grid = (head_tiles, splits, requests)
    return _attend(queries, cache, block_tables, seq_lens, None, grid, rank, block_size, scale, _MIN_SHARE, launch, out)


def mla_prefill(
    queries: Tensor,  # [T, heads, rank + rope], contiguous
    cache: Tensor,  # [slots, 1, rank + rope], contiguous; it holds the new tokens already
    block_tables: Tensor,  # int32 [requests, max_blocks]
    seq_lens: Tensor,  # int32 [requests], on the device; the new tokens included
    tiles: Tiles,  # of the windows' lengths, `tile_tokens` rows each
    rank: int,
    block_size: int,
    scale: float,
    *,
    splits: int | None = None,
    min_share: int = 256,
    launch: Launch | None = None,
    out: Tensor | None = None,  # [T, heads, rank], contiguous
) -> Tensor:
    """[T, heads, rank]: causal inside a window, full over its past. For windows of many tokens see `mla_expanded`."""
    heads = queries.shape[1]
    launch = launch or prefill_launch(cache)
    assert tiles.rows == tile_tokens(heads, launch), f"tiles of {tiles.rows} tokens, a launch of {launch.rows} rows"
    head_tiles = triton.cdiv(heads, launch.rows)
    splits = splits or choose_prefill_splits(len(tiles.index), heads, launch, cache.device)
    grid = (head_tiles, splits, len(tiles.index))
    return _attend(queries, cache, block_tables, seq_lens, tiles, grid, rank, block_size, scale, min_share, launch, out)


def choose_prefill_splits(tiles: int, heads: int, launch: Launch, device: torch.device, *, share: int = 1) -> int:
    """As many as one wave holds. `share`: 2 for half of the device, beside decode."""
    programs = max(-(-heads // launch.rows) * tiles, 1)
    return max(min(num_sms(device) // share // programs, MAX_SPLITS), 1)


def tile_tokens(heads: int, launch: Launch) -> int:
    """Tokens of a tile: its rows are all heads of them."""
    return max(launch.rows // heads, 1)


def choose_splits(programs: int, max_context: int, slots: int) -> int:
    """How many splits take least time, where `programs` of one split run `slots` at a time.

    In keys that a program reads one after the other: its share of the context in each wave, and the partial results.
    """

    def cost(splits: int) -> float:
        waves = -(-programs * splits // slots)
        partials = programs * splits * _KEYS_PER_PARTIAL / slots if splits > 1 else 0
        return waves / splits * _TYPICAL_CONTEXT + partials

    return min(range(1, min(max_context // _MIN_SHARE, _MAX_SPLITS) + 1), key=cost, default=1)


def decode_launch(cache: Tensor, heads: int) -> Launch:
    """On Hopper tiles are made for WGMMA, which reads queries from shared memory; elsewhere they fit 99 KiB of it."""
    if cache.element_size() == 4:
        return Launch(rows=8, keys=16, warps=4, stages=1, one_loop=True)
    if not is_hopper(cache.device):
        return Launch(rows=16, keys=32, warps=4, stages=2, one_loop=True)
    rows = min(power_of_two(heads, minimum=16), _MAX_DECODE_ROWS)
    return Launch(rows, keys=64, warps=4 if rows == 16 else 8, stages=2, one_loop=True)


def prefill_launch(cache: Tensor) -> Launch:
    """Before Hopper the queries of more rows would not fit registers."""
    if cache.element_size() == 4 or not is_hopper(cache.device):
        return decode_launch(cache, 16)
    return Launch(rows=64, keys=64, warps=8, stages=2, one_loop=True)


def _attend(
    queries: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor, tiles: Tiles | None,
    grid: tuple[int, int, int], rank: int, block_size: int, scale: float, min_share: int, launch: Launch,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    tokens, heads, dim = queries.shape
    assert queries.is_contiguous() and cache.is_contiguous() and cache.shape[1:] == (1, dim)
    out = queries.new_empty(tokens, heads, rank) if out is None else out
    parts = new_partials(grid[1], out) if grid[1] > 1 else None
    pdl = supports_pdl(cache)
    _attention_kernel[grid](
        queries, cache, block_tables, seq_lens, *((tiles.starts, tiles.index) if tiles else (None, None)), out,
        *(parts or (None,) * 4), tokens * heads, scale * LOG2_E, block_tables.stride(0),
        BLOCK_SIZE=block_size, HEADS=heads, TOKENS=tiles.rows if tiles else 1, RANK=rank, ROPE=dim - rank,
        PADDED_RANK=power_of_two(rank, minimum=16), PADDED_ROPE=power_of_two(dim - rank, minimum=16),
        ROWS=launch.rows, KEYS=launch.keys, IS_SPLIT=parts is not None, MIN_SHARE=triton.cdiv(min_share, launch.keys),
        PRECISION=precision_of(cache), PDL=pdl, ONE_LOOP=launch.one_loop,
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers, **pdl_options(pdl),
    )  # fmt: skip
    if parts is not None:
        combine(parts, out)
    return out


# Step metadata changes alignment and width from step to step: each variant would be compiled anew.
@triton.jit(
    do_not_specialize=["table_row", "cells"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "starts", "index"],
)
def _attention_kernel(
    queries: tl.tensor, cache: tl.tensor, block_tables: tl.tensor, seq_lens: tl.tensor,
    starts: tl.tensor, index: tl.tensor, out: tl.tensor,
    mixed: tl.tensor, maxima: tl.tensor, sums: tl.tensor, active: tl.tensor, cells: tl.tensor,
    scale: tl.tensor, table_row: tl.tensor,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    PADDED_RANK: tl.constexpr, PADDED_ROPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr, MIN_SHARE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    ONE_LOOP: tl.constexpr,
) -> None:  # fmt: skip
    request, first, start, length = _tile(starts, index)
    seq_len = tl.load(seq_lens + request)
    end = tl.minimum(seq_len, seq_len - length + first + TOKENS)
    split = tl.program_id(1)
    share = end
    if IS_SPLIT:
        share = tl.maximum(tl.cdiv(tl.cdiv(seq_len, KEYS), tl.num_programs(1)), MIN_SHARE) * KEYS  # in whole tiles
    low = split * share
    pdl_release_then_wait(PDL)
    if first >= length or (split > 0 and low >= end):  # split 0 also writes for an empty context
        return
    token, head, known = _rows(first, length, HEADS, TOKENS, ROWS)
    cell = (start + token).to(tl.int64) * HEADS + head
    q_latent, q_rope = _load_queries(queries, cell, known, RANK, ROPE, PADDED_RANK, PADDED_ROPE)
    positions = seq_len - length + token  # of each row in its context
    table = block_tables + request.to(tl.int64) * table_row
    acc = tl.zeros([PADDED_RANK, ROWS], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    high = tl.minimum(end, low + share)
    masked = low
    if not ONE_LOOP:  # first the keys that all rows see
        masked = tl.minimum(tl.maximum(low, (seq_len - length + first + 1) // KEYS * KEYS), high)
        acc, largest, total = _attend_keys(
            q_latent, q_rope, cache, table, positions, low, masked, end, scale, acc, largest, total,
            BLOCK_SIZE, RANK, ROPE, KEYS, PRECISION, False,
        )  # fmt: skip
    acc, largest, total = _attend_keys(
        q_latent, q_rope, cache, table, positions, masked, high, end, scale, acc, largest, total,
        BLOCK_SIZE, RANK, ROPE, KEYS, PRECISION, True,
    )  # fmt: skip
    if end <= share:
        result = (acc / tl.where(total > 0, total, 1.0)[None, :]).to(out.dtype.element_ty)
        _write(out, result, cell, known, RANK)
    elif IS_SPLIT:
        _write_partial((mixed, maxima, sums), acc, largest, total, split.to(tl.int64) * cells + cell, known, RANK)
    if IS_SPLIT and split == 0:
        to_combine = tl.where(end <= share, 0, positions // share + 1)
        tl.store(active + start + token, to_combine, mask=known & (head == 0))


@triton.jit
def _tile(starts: tl.tensor, index: tl.tensor) -> tl.tuple:
    """The request of this program's tile, its first token in the window, and the window's start and length."""
    request = tl.program_id(2)
    first = request * 0
    start = request
    length = first + 1
    if index is not None:
        tile = tl.program_id(2)
        request = tl.load(index + 2 * tile)
        first = tl.load(index + 2 * tile + 1)
        start = tl.load(starts + request)
        length = tl.load(starts + request + 1) - start
    return request, first, start, length


@triton.jit
def _rows(
    first: tl.tensor, length: tl.tensor, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr
) -> tl.tuple:
    """Of each row the token in its window, its head, and whether it has both. A tile has all heads, or what fits."""
    TILE_HEADS: tl.constexpr = min(HEADS, ROWS)
    rows = tl.arange(0, ROWS)
    token = first + rows // TILE_HEADS
    head = tl.program_id(0) * TILE_HEADS + rows % TILE_HEADS
    return token, head, (token < length) & (rows // TILE_HEADS < TOKENS) & (head < HEADS)


@triton.jit
def _load_queries(
    queries: tl.tensor, cell: tl.tensor, known: tl.tensor, RANK: tl.constexpr, ROPE: tl.constexpr,
    PADDED_RANK: tl.constexpr, PADDED_ROPE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    dims = tl.arange(0, PADDED_RANK)[None, :]
    rope_dims = tl.arange(0, PADDED_ROPE)[None, :]
    source = queries + cell[:, None] * (RANK + ROPE)
    latent = tl.load(source + dims, mask=known[:, None] & (dims < RANK), other=0.0)
    return latent, tl.load(source + RANK + rope_dims, mask=known[:, None] & (rope_dims < ROPE), other=0.0)


@triton.jit
def _attend_keys(
    q_latent: tl.tensor, q_rope: tl.tensor, cache: tl.tensor, table: tl.tensor, positions: tl.tensor,
    low: tl.tensor, high: tl.tensor, end: tl.tensor, scale: tl.tensor,
    acc: tl.tensor, largest: tl.tensor, total: tl.tensor,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The keys from `low` to `high`, tile by tile. What lies after `end` may be another request's, or NaN.

    Slots are looked up one tile ahead: the compiler can then pipeline the loads of several tiles.
    """
    dims = tl.arange(0, q_latent.shape[1])[None, :]
    rope_dims = tl.arange(0, q_rope.shape[1])[None, :]
    readable = low + tl.arange(0, KEYS) < end
    slots = slots_of(table, low + tl.arange(0, KEYS), readable, BLOCK_SIZE)
    for first in range(low, high, KEYS):
        own = first + tl.arange(0, KEYS)
        vectors = cache + slots[:, None] * (RANK + ROPE)
        is_latent = dims < RANK
        is_rope = rope_dims < ROPE
        if IS_MASKED:
            is_latent = is_latent & readable[:, None]
            is_rope = is_rope & readable[:, None]
        latents = tl.load(vectors + dims, mask=is_latent, other=0.0)  # [KEYS, rank]
        ropes = tl.load(vectors + RANK + rope_dims, mask=is_rope, other=0.0)
        readable = own + KEYS < end
        slots = slots_of(table, own + KEYS, readable, BLOCK_SIZE)
        scores = tl.dot(ropes, tl.trans(q_rope), input_precision=PRECISION)
        scores = tl.dot(latents, tl.trans(q_latent), scores, input_precision=PRECISION)  # [KEYS, ROWS]
        if IS_MASKED:
            seen = (own[:, None] <= positions[None, :]) & (own < end)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 0) * scale)
        shrink = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores * scale - new_largest[None, :])
        total = total * shrink + tl.sum(weights, 0)
        largest = new_largest
        acc = tl.dot(tl.trans(latents), weights.to(latents.dtype), acc * shrink[None, :], input_precision=PRECISION)
    return acc, largest, total


@triton.jit
def _write(target: tl.tensor, values: tl.tensor, cell: tl.tensor, known: tl.tensor, RANK: tl.constexpr) -> None:
    dims = tl.arange(0, values.shape[0])[:, None]
    tl.store(target + cell[None, :] * RANK + dims, values, mask=known[None, :] & (dims < RANK))


@triton.jit
def _write_partial(
    parts: tl.tuple, acc: tl.tensor, largest: tl.tensor, total: tl.tensor, part: tl.tensor, known: tl.tensor,
    RANK: tl.constexpr,
) -> None:  # fmt: skip
    """A split's sums. Those of a row that has no key in it are undefined, and never read."""
    mixed, maxima, sums = parts
    _write(mixed, acc, part, known, RANK)
    tl.store(maxima + part, largest, mask=known)
    tl.store(sums + part, total, mask=known)
