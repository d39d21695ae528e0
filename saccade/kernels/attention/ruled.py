"""Attention of layers with a rule, over the paged KV cache, in Triton: windows, chunks, blocks, soft caps, sinks.

Where a rule leaves each query an interval of keys (`eager_reason` names those that do not), one kernel is decode
and prefill of any:

    token              0  1  2  3  4  5  6        window 3: 6 sees [4, 7)     chunk 4: 6 sees [4, 7)
    block              0  1  2  2  2  5  6        2, 3 and 4 see [0, 5)

    grid (tiles of a launch and their parts, splits of keys, groups of heads)

Rows of a program are the query heads of one KV head, for some tokens: keys are read once for all of them. Heads may
be of any number and width, and need not be those of other layers. What the splits find is combined as for prefill.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.attention.decode_triton import slots_of
from saccade.kernels.attention.fp8_kv import UNSCALED, as_stored, beside, launched
from saccade.kernels.attention.online_softmax import LOG2_E, divide, weigh
from saccade.kernels.attention.prefill_combine import MAX_SPLITS, combine, new_partials
from saccade.kernels.launch.device import num_sms, precision_of, shared_memory
from saccade.kernels.launch.varlen_tiles import Tiles, power_of_two

_MIN_SHARE = 256  # keys of a split: shorter ones cost more than they save
_MIN_FEW_SHARE = 64  # where programs are few, and each would read many tiles one after the other
_ROWS = 64
_MANY_BYTES = 160 << 10  # of shared memory, which wide heads take
_LOG2_E = tl.constexpr(LOG2_E)


class Interval(NamedTuple):
    """What a rule says, as kernels take it. `blocks`: of `block_ends`."""

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]
    blocks: Tensor | None = None  # int32 [2, T]
    is_block_whole: bool = False


def block_ends(blocks: Tensor) -> Tensor:
    """int32 [2, T] of each packed token's block [T]: the first token, and the packed row where it ends."""
    rows = torch.arange(1, len(blocks) + 1, dtype=torch.int32, device=blocks.device)
    is_last = torch.ones_like(blocks, dtype=torch.bool)
    is_last[:-1] = blocks[1:] != blocks[:-1]
    ends = torch.where(is_last, rows, len(blocks)).flip(0).cummin(0).values.flip(0)
    return torch.stack((blocks.int(), ends.int()))


def ruled_attention(
    q: Tensor,  # [T, heads, d], rows may be apart
    k_cache: Tensor,  # [slots, kv_heads, d], slots may be apart
    v_cache: Tensor,
    block_tables: Tensor,  # int32 [requests, max_blocks]
    seq_lens: Tensor,  # int32 [requests], on the device; the new tokens included; 0: the result is zero
    tiles: Tiles,  # of the new tokens
    block_size: int,
    scale: float,
    rule: Interval,
    *,
    splits: int | None = None,
    out: Tensor | None = None,  # [T, heads, d], contiguous
    scales: tuple[float, float] = UNSCALED,  # of FP8 keys and values
) -> Tensor:
    """[T, heads, d]"""
    tokens, heads, dim = q.shape
    group = heads // k_cache.shape[1]
    share = _share(group)
    rows = _rows(q, share, is_decode=tiles.rows == 1)
    parts = -(-tiles.rows // (rows // share))
    longest = block_tables.shape[1] * block_size
    programs = heads // share * parts * len(tiles.index)
    share_keys = _MIN_FEW_SHARE if 4 * programs < num_sms(q.device) else _MIN_SHARE
    splits = splits or _splits(programs, min(longest, rule.window or longest) // share_keys, num_sms(q.device))
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device) if out is None else out
    partials = new_partials(splits, out) if splits > 1 else None
    keys, stages = _keys(q, rows)
    assert q.stride(2) == k_cache.stride(2) == v_cache.stride(2) == 1
    _ruled_kernel[(parts * len(tiles.index), splits, heads // share)](
        q, k_cache, v_cache, block_tables, seq_lens, tiles.starts, tiles.index, rule.blocks, rule.sinks, out,
        *(partials or (None,) * 4), tokens * heads, scale * scales[0], scales[1], rule.softcap or 1.0,
        q.stride(0), k_cache.stride(0), v_cache.stride(0), block_tables.stride(0),
        HEADS=heads, Q_HEAD=q.stride(1), K_HEAD=k_cache.stride(1), V_HEAD=v_cache.stride(1), BLOCK_SIZE=block_size,
        GROUP=group, SHARE=share, DIM=dim, PADDED_DIM=power_of_two(dim, minimum=16), ROWS=rows, KEYS=keys,
        TILE=tiles.rows, PARTS=parts, MIN_SHARE=triton.cdiv(share_keys, keys),
        WINDOW=rule.window or 0, CHUNK=rule.chunk or 0, IS_BLOCK_WHOLE=rule.is_block_whole,
        HAS_CAP=rule.softcap is not None, IS_SPLIT=splits > 1, PRECISION=precision_of(q),
        num_warps=8 if rows * dim > 64 * 128 else 4, num_stages=stages,
    )  # fmt: skip
    if partials is not None:
        combine(partials, out)
    return out


def _share(group: int) -> int:
    """Query heads of a program: all of a KV head, or as many as divide them and fit."""
    return next(heads for heads in range(min(group, _ROWS), 0, -1) if group % heads == 0)


def _rows(q: Tensor, share: int, *, is_decode: bool) -> int:
    """16 are the least that an MMA takes. Wide heads leave registers for fewer."""
    min_rows = power_of_two(share, minimum=16)
    if is_decode:
        return min_rows
    is_small = q.element_size() == 4 or shared_memory(q.device) < _MANY_BYTES
    return max(min_rows, 32 if is_small and q.shape[2] > 128 else _ROWS)


def _keys(q: Tensor, rows: int) -> tuple[int, int]:
    """Keys of a tile and stages of the pipeline, which hold them and their values in shared memory."""
    if q.element_size() == 4:
        return 32, 1
    keys = 64 if q.shape[2] <= 128 else 32
    width = power_of_two(q.shape[2])
    taken = rows * width * 2
    tile = 2 * keys * width * 2
    stages = max(1, min(3, (shared_memory(q.device) - taken - (16 << 10)) // tile))
    return keys, stages


def _splits(programs: int, shares: int, sms: int) -> int:
    """A power of two: a program for each SM, where tiles alone give fewer. It depends on shapes alone."""
    useful = min(2 * sms // programs, shares, MAX_SPLITS)
    return 1 << (max(useful, 1).bit_length() - 1)


# Step metadata changes alignment and width from step to step: each variant would be compiled anew.
@triton.jit(
    do_not_specialize=["table_row", "cells"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "starts", "index", "blocks"],
)
def _ruled_kernel(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, block_tables: tl.tensor, seq_lens: tl.tensor,
    starts: tl.tensor, index: tl.tensor, blocks: tl.tensor, sinks: tl.tensor, out: tl.tensor,
    mixed: tl.tensor, maxima: tl.tensor, sums: tl.tensor, active: tl.tensor, cells: tl.tensor,
    scale: tl.tensor, v_scale: tl.tensor, cap: tl.tensor,
    q_row: tl.tensor, k_slot: tl.tensor, v_slot: tl.tensor, table_row: tl.tensor,
    HEADS: tl.constexpr, Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, MIN_SHARE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, IS_BLOCK_WHOLE: tl.constexpr, HAS_CAP: tl.constexpr, IS_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    TOKENS: tl.constexpr = ROWS // SHARE
    tile, split, group = tl.program_id(0) // PARTS, tl.program_id(1), tl.program_id(2)
    own = (tl.program_id(0) % PARTS) * TOKENS + tl.arange(0, ROWS) // SHARE  # within the tile
    request, first = tl.load(index + 2 * tile), tl.load(index + 2 * tile + 1)
    start, seq_len = tl.load(starts + request), tl.load(seq_lens + request)
    length = tl.load(starts + request + 1) - start
    if first + (tl.program_id(0) % PARTS) * TOKENS >= length:
        return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    known = (rows < TOKENS * SHARE) & (own < TILE) & (first + own < length)
    packed, heads = (start + first + own).to(tl.int64), group * SHARE + rows % SHARE
    low, high = _intervals(blocks, packed, start, length, seq_len, known, cells // HEADS, WINDOW, CHUNK, IS_BLOCK_WHOLE)
    begin, end, count = _keys_of_split(low, high, known, split, KEYS, MIN_SHARE, IS_SPLIT)
    if split >= count:
        return
    inside = known[:, None] & (dims < DIM)[None, :]
    queries = tl.load(q + packed[:, None] * q_row + heads[:, None] * Q_HEAD + dims[None, :], mask=inside, other=0.0)
    queries = beside(queries, k_cache.dtype.element_ty)
    kv_head = group * SHARE // GROUP
    keys, values = k_cache + kv_head * K_HEAD, v_cache + kv_head * V_HEAD
    table = block_tables + request.to(tl.int64) * table_row
    largest, total = _before_keys(sinks, heads, known, split, ROWS)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for at in range(begin, end, KEYS):
        acc, largest, total = _attend(
            queries, keys, values, table, at, end, low, high, scale, cap, acc, largest, total, k_slot, v_slot,
            BLOCK_SIZE, DIM, PADDED_DIM, KEYS, HAS_CAP, PRECISION,
        )  # fmt: skip
    parts = (mixed, maxima, sums, active, cells)
    _write(
        out, parts, acc * v_scale, largest, total, packed, heads, known, split, count, HEADS, DIM, PADDED_DIM, IS_SPLIT
    )


@triton.jit
def _write(
    out: tl.tensor, parts: tl.tuple, acc: tl.tensor, largest: tl.tensor, total: tl.tensor, packed: tl.tensor,
    heads: tl.tensor, known: tl.tensor, split: tl.tensor, count: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, IS_SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """The result, or what a split found."""
    dims = tl.arange(0, PADDED_DIM)
    inside = known[:, None] & (dims < DIM)[None, :]
    cell = packed * HEADS + heads
    if IS_SPLIT:
        mixed, maxima, sums, active, cells = parts
        part = split.to(tl.int64) * cells + cell
        tl.store(mixed + part[:, None] * DIM + dims[None, :], acc, mask=inside)
        tl.store(maxima + part, largest, mask=known)
        tl.store(sums + part, tl.where(total > 0, total, 1.0), mask=known)  # of no key: the maximum says so
        if split == 0 and tl.program_id(2) == 0:
            tl.store(active + packed, tl.zeros_like(heads) + count, mask=known)
    else:
        result = divide(acc, total).to(out.dtype.element_ty)
        tl.store(out + cell[:, None] * DIM + dims[None, :], result, mask=inside)


@triton.jit
def _intervals(
    blocks: tl.tensor, packed: tl.tensor, start: tl.tensor, length: tl.tensor, seq_len: tl.tensor, known: tl.tensor,
    packed_rows: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr, IS_BLOCK_WHOLE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The first key that each row sees, and the one after the last."""
    positions = (packed - start).to(tl.int32) + seq_len - length
    low, high = tl.zeros_like(positions), positions + 1
    block = positions
    if blocks is not None:
        block = tl.load(blocks + packed, mask=known, other=0)
        end = tl.load(blocks + packed_rows + packed, mask=known, other=0) - start + seq_len - length
        high = tl.maximum(high, tl.minimum(end, seq_len))
    if WINDOW:
        low = tl.maximum(positions - WINDOW + 1, 0)
        if IS_BLOCK_WHOLE:
            low = tl.minimum(low, block)
    if CHUNK:
        chunk = positions // CHUNK * CHUNK
        low, high = tl.maximum(low, chunk), tl.minimum(high, chunk + CHUNK)
    return low, tl.where(known, high, 0)


@triton.jit
def _keys_of_split(
    low: tl.tensor, high: tl.tensor, known: tl.tensor, split: tl.tensor,
    KEYS: tl.constexpr, MIN_SHARE: tl.constexpr, IS_SPLIT: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The first of a split's keys and the one after its last, and how many splits have keys: one at least."""
    lowest = tl.min(tl.where(known, low, 1 << 30), 0) // KEYS * KEYS
    highest = tl.max(high, 0)
    share = tl.maximum(highest - lowest, 0)
    if IS_SPLIT:
        share = tl.maximum(tl.cdiv(tl.cdiv(share, KEYS), tl.num_programs(1)), MIN_SHARE) * KEYS
    begin = lowest + split * share
    count = tl.maximum(tl.cdiv(highest - lowest, tl.maximum(share, 1)), 1)
    return begin, tl.minimum(highest, begin + share), count


@triton.jit
def _before_keys(
    sinks: tl.tensor, heads: tl.tensor, known: tl.tensor, split: tl.tensor, ROWS: tl.constexpr
) -> tl.tuple:
    """Maximum and sum of weights before the first key. Finite, as a row may see no key of a tile."""
    largest, total = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32)
    if sinks is not None and split == 0:
        largest = tl.load(sinks + heads, mask=known, other=0.0).to(tl.float32) * _LOG2_E
        total += 1.0
    return largest, total


@triton.jit
def _attend(
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, table: tl.tensor, first: tl.tensor, end: tl.tensor,
    low: tl.tensor, high: tl.tensor, scale: tl.tensor, cap: tl.tensor, acc: tl.tensor, largest: tl.tensor,
    total: tl.tensor, k_slot: tl.tensor, v_slot: tl.tensor,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """One more tile of keys, from `first` on."""
    positions, dims = first + tl.arange(0, KEYS), tl.arange(0, PADDED_DIM)
    readable = (positions < end)[:, None] & (dims < DIM)[None, :]
    slots = slots_of(table, positions, positions < end, BLOCK_SIZE)
    k = tl.load(keys + slots[:, None] * k_slot + dims[None, :], mask=readable, other=0.0).to(queries.dtype)
    v = tl.load(values + slots[:, None] * v_slot + dims[None, :], mask=readable, other=0.0).to(queries.dtype)
    scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale  # [ROWS, KEYS]
    if HAS_CAP:
        scores = cap - 2 * cap / (1 + tl.exp(2 * scores / cap))  # cap * tanh(scores / cap)
    seen = (positions[None, :] >= low[:, None]) & (positions[None, :] < tl.minimum(high, end)[:, None])
    weights, shrink, largest, total = weigh(tl.where(seen, scores, float("-inf")), _LOG2_E, largest, total)
    return tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION), largest, total


def store_pairs(
    k: Tensor,  # [T, kv_heads, d], rows may be apart; so is v
    v: Tensor,
    k_cache: Tensor,  # [slots, kv_heads, d], slots may be apart; so is v_cache
    v_cache: Tensor,
    slots: Tensor,  # int32 [T]; -1: nowhere
    scales: tuple[float, float] = UNSCALED,
) -> None:
    """Writes new keys and values to the cache."""
    tokens, heads, dim = k.shape
    assert k.stride()[1:] == v.stride()[1:] == k_cache.stride()[1:] == v_cache.stride()[1:] == (dim, 1)
    _store_kernel[(tokens,)](
        k, v, k_cache, v_cache, slots, *launched(scales)[:2], k.stride(0), v.stride(0), k_cache.stride(0),
        v_cache.stride(0), WIDTH=heads * dim, PADDED=power_of_two(heads * dim), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_kernel(
    k: tl.tensor, v: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, slots: tl.tensor, k_by: tl.tensor,
    v_by: tl.tensor, k_row: tl.tensor, v_row: tl.tensor, k_slot: tl.tensor, v_slot: tl.tensor,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    columns = tl.arange(0, PADDED)
    inside = (columns < WIDTH) & (slot >= 0)
    key = tl.load(k + row * k_row + columns, mask=inside, other=0.0)
    value = tl.load(v + row * v_row + columns, mask=inside, other=0.0)
    tl.store(k_cache + slot * k_slot + columns, as_stored(key, k_by, k_cache.dtype.element_ty), mask=inside)
    tl.store(v_cache + slot * v_slot + columns, as_stored(value, v_by, v_cache.dtype.element_ty), mask=inside)
