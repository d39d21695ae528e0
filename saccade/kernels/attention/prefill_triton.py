"""Prefill attention over the paged KV cache, in Triton: causal inside the window, full over the past.

packed queries [T, heads, d]         grid (heads, splits, tiles); tiles with most keys first, heads side by side

request with 4 past and 5 new tokens, tiles of 2 rows:

               past        window
    keys       0 1 2 3   4 5 6 7 8        x read without a mask
    tile 0     x x x x   m m              m compared with each row's own position
    tile 1     x x x x   x x m m
    tile 2     x x x x   x x x x m        a tile reads no key after its last row

A few tiles would leave most of the device idle, however long their contexts are. Then keys are split, too:

    | split 0 | split 1 | ...        partial results, which a second launch combines; rows that have only one split
                                     are written at once
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.attention.decode_triton import slots_of
from saccade.kernels.attention.fp8_kv import UNSCALED, beside
from saccade.kernels.attention.online_softmax import LOG2_E, divide, new_accumulator, weigh
from saccade.kernels.attention.prefill_combine import MAX_SPLITS, combine, new_partials
from saccade.kernels.launch.device import is_hopper, num_sms, precision_of, shared_memory
from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import Launch, Tiles, power_of_two

_MIN_SHARE = 256  # keys of a split: shorter ones cost more than they save


def choose_rows(tokens: int, heads: int, num_sms: int, dim: int = 128) -> int:
    """Large tiles read the keys less often; small ones are better where large ones would leave SMs idle.

    Heads of more than 128 dimensions do not fit the registers of a large tile.
    """
    return 128 if tokens * heads >= 128 * 2 * num_sms and dim <= 128 else 64


def paged_prefill(
    q: Tensor,  # [T, heads, d], last dimension dense
    k_cache: Tensor,  # [slots, kv_heads, d]
    v_cache: Tensor,
    block_tables: Tensor,  # int32 [requests, max_blocks]
    seq_lens: Tensor,  # int32 [requests], on the device; the new tokens included
    tiles: Tiles,  # of the windows' lengths
    block_size: int,
    scale: float,
    *,
    splits: int | None = None,
    min_share: int = _MIN_SHARE,
    launch: Launch | None = None,
    out: Tensor | None = None,  # [T, heads, d], contiguous
    scales: tuple[float, float] = UNSCALED,  # of FP8 keys and values
) -> Tensor:
    """[T, heads, d]. A window of one token is allowed, though `paged_decode` is faster at it."""
    tokens, heads, dim = q.shape
    splits = splits or choose_splits(tokens, heads, tiles.rows, 2 * num_sms(q.device))
    launch = launch or launch_for(q, tiles.rows, splits)
    assert launch.rows == tiles.rows, f"tiles of {tiles.rows} rows, a launch of {launch.rows}"
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device) if out is None else out
    parts = new_partials(splits, out) if splits > 1 else None
    pdl = supports_pdl(q)
    _prefill_kernel[(heads, splits, len(tiles.index))](
        q, k_cache, v_cache, block_tables, seq_lens, tiles.starts, tiles.index, out,
        *(parts or (None,) * 4), tokens * heads, scale * scales[0] * LOG2_E, scales[1],
        q.stride(0), k_cache.stride(0), v_cache.stride(0), block_tables.stride(0),
        Q_HEAD=q.stride(1), K_HEAD=k_cache.stride(1), V_HEAD=v_cache.stride(1), BLOCK_SIZE=block_size,
        GROUP=heads // k_cache.shape[1], DIM=dim, PADDED_DIM=power_of_two(dim, minimum=16),
        ROWS=launch.rows, KEYS=launch.keys, IS_SPLIT=splits > 1, MIN_SHARE=triton.cdiv(min_share, launch.keys),
        PRECISION=precision_of(q), PDL=pdl, ONE_LOOP=launch.one_loop,
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers, **pdl_options(pdl),
    )  # fmt: skip
    if parts is not None:
        combine(parts, out)
    return out


def choose_splits(tokens: int, heads: int, rows: int, num_sms: int) -> int:
    """A power of two: a program for each SM, where tiles alone give fewer. More would make the combine longer."""
    wanted = num_sms // (heads * -(-tokens // rows))
    return 1 << (max(min(wanted, MAX_SPLITS), 1).bit_length() - 1)


def launch_for(q: Tensor, rows: int, splits: int = 1) -> Launch:
    """Two of the stages are spent on loads of block tables, which those of keys and values depend on."""
    if q.element_size() == 4:
        return Launch(rows, keys=32, warps=4, stages=1)
    one_wave = rows * num_sms(q.device)
    if q.shape[2] > 128:  # registers and shared memory hold fewer keys; without WGMMA, four warps would spill
        one_loop = splits == 1 and 2 * q.shape[0] * q.shape[1] <= one_wave
        return Launch(rows, keys=32, warps=4 if rows <= 64 and is_hopper(q.device) else 8, stages=4, one_loop=one_loop)
    if rows >= 128:
        return Launch(rows, keys=64, warps=8, stages=5)
    if 2 * q.shape[0] * q.shape[1] <= one_wave:
        # Leaves shared memory for the weights of the next GEMM. With few keys one masked loop is faster: fetching the
        # instructions of a second one takes longer than running them.
        return Launch(rows, keys=64, warps=4, stages=5, one_loop=splits == 1)
    # While each program has an SM to itself, fewer and larger steps take less time. They need 161 KB.
    is_large = q.shape[0] * q.shape[1] <= one_wave and shared_memory(q.device) >= 163 << 10
    return Launch(rows, keys=128 if is_large else 64, warps=4, stages=5)


# Step metadata changes alignment and width from step to step: each variant would be compiled anew.
@triton.jit(
    do_not_specialize=["table_row", "cells"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "starts", "index"],
)
def _prefill_kernel(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, block_tables: tl.tensor, seq_lens: tl.tensor,
    starts: tl.tensor, index: tl.tensor, out: tl.tensor,
    mixed: tl.tensor, maxima: tl.tensor, sums: tl.tensor, active: tl.tensor, cells: tl.tensor,
    scale: tl.tensor, v_scale: tl.tensor, q_row: tl.tensor, k_slot: tl.tensor, v_slot: tl.tensor, table_row: tl.tensor,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr,  # constants, so that loads of a head are aligned
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, IS_SPLIT: tl.constexpr, MIN_SHARE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, ONE_LOOP: tl.constexpr,
) -> None:  # fmt: skip
    head, tile = tl.program_id(0), tl.program_id(2)
    request, first = tl.load(index + 2 * tile), tl.load(index + 2 * tile + 1)
    start, seq_len = tl.load(starts + request), tl.load(seq_lens + request)
    length = tl.load(starts + request + 1) - start
    pdl_release_then_wait(PDL)
    if first >= length:
        return
    rows, dims = first + tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    inside = (rows < length)[:, None] & (dims < DIM)[None, :]
    packed = (start + rows).to(tl.int64)
    queries = tl.load(q + packed[:, None] * q_row + head * Q_HEAD + dims[None, :], mask=inside, other=0.0)
    queries = beside(queries, k_cache.dtype.element_ty)
    positions = seq_len - length + rows  # of each row in its context
    seen_by_all = (seq_len - length + first + 1) // KEYS * KEYS
    end = tl.minimum(seq_len, seq_len - length + first + ROWS)
    low, all_keys, share = 0, end, end
    if IS_SPLIT:
        share = tl.maximum(tl.cdiv(tl.cdiv(seq_len, KEYS), tl.num_programs(1)), MIN_SHARE) * KEYS  # in whole tiles
        low = tl.program_id(1) * share
        if low >= end:
            return
        all_keys = tl.minimum(end, low + share)
    table = block_tables + request.to(tl.int64) * table_row
    keys, values = k_cache + head // GROUP * K_HEAD, v_cache + head // GROUP * V_HEAD
    largest, total, acc = new_accumulator(ROWS, PADDED_DIM)
    acc, largest, total = _attend_all(
        queries, keys, values, table, positions, low, seen_by_all, all_keys, end, scale, acc, largest, total,
        k_slot, v_slot, BLOCK_SIZE, DIM, PADDED_DIM, KEYS, PRECISION, ONE_LOOP,
    )  # fmt: skip
    acc *= v_scale
    if end <= share:
        _write(out, acc, total, packed, dims, inside, DIM)
        if IS_SPLIT:  # nothing to combine; every head writes it
            tl.store(active + packed, tl.zeros_like(rows), mask=rows < length)
    elif IS_SPLIT:
        parts = (mixed, maxima, sums, active, cells)
        _write_partial(parts, acc, largest, total, packed, positions // share + 1, dims, rows < length, inside, DIM)


@triton.jit
def _attend_all(
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, table: tl.tensor, positions: tl.tensor,
    low: tl.tensor, seen_by_all: tl.tensor, all_keys: tl.tensor, end: tl.tensor, scale: tl.tensor,
    acc: tl.tensor, largest: tl.tensor, total: tl.tensor, k_slot: tl.tensor, v_slot: tl.tensor,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, ONE_LOOP: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """A program's keys: those that all of its rows see, then, masked, the others."""
    masked = low
    if not ONE_LOOP:
        masked = tl.maximum(low, seen_by_all)
        for tile_start in range(low, tl.minimum(seen_by_all, all_keys), KEYS):
            acc, largest, total = _attend(
                queries, keys, values, table, positions, tile_start, end, scale, acc, largest, total,
                k_slot, v_slot, BLOCK_SIZE, DIM, PADDED_DIM, KEYS, PRECISION, False,
            )  # fmt: skip
    for tile_start in range(masked, all_keys, KEYS):
        acc, largest, total = _attend(
            queries, keys, values, table, positions, tile_start, end, scale, acc, largest, total,
            k_slot, v_slot, BLOCK_SIZE, DIM, PADDED_DIM, KEYS, PRECISION, True,
        )  # fmt: skip
    return acc, largest, total


@triton.jit
def _write(
    out: tl.tensor, acc: tl.tensor, total: tl.tensor, packed: tl.tensor, dims: tl.tensor, inside: tl.tensor,
    DIM: tl.constexpr,
) -> None:  # fmt: skip
    """The result of rows that have one split."""
    result = out + (packed * tl.num_programs(0) + tl.program_id(0))[:, None] * DIM + dims[None, :]
    tl.store(result, divide(acc, total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _write_partial(
    parts: tl.tuple, acc: tl.tensor, largest: tl.tensor, total: tl.tensor, packed: tl.tensor, seen: tl.tensor,
    dims: tl.tensor, known: tl.tensor, inside: tl.tensor, DIM: tl.constexpr,
) -> None:  # fmt: skip
    """A split's sums. Those of a row that has no key in it are undefined, and never read."""
    mixed, maxima, sums, active, cells = parts
    head, split = tl.program_id(0), tl.program_id(1)
    part = split.to(tl.int64) * cells + packed * tl.num_programs(0) + head
    tl.store(mixed + part[:, None] * DIM + dims[None, :], acc, mask=inside)
    tl.store(maxima + part, largest, mask=known)
    tl.store(sums + part, total, mask=known)
    if split == 0 and head == 0:
        tl.store(active + packed, seen, mask=known)


@triton.jit
def _attend(
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, table: tl.tensor, positions: tl.tensor, first: tl.tensor,
    end: tl.tensor, scale: tl.tensor,
    acc: tl.tensor, largest: tl.tensor, total: tl.tensor, k_slot: tl.tensor, v_slot: tl.tensor,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, IS_MASKED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """One more tile of keys, from `first` on."""
    own, dims = first + tl.arange(0, KEYS), tl.arange(0, PADDED_DIM)
    known = own < end
    readable = (dims < DIM)[None, :]
    if IS_MASKED:  # what lies after the last row may be another request's, or NaN
        readable = readable & known[:, None]
    slots = slots_of(table, own, known, BLOCK_SIZE)
    k = tl.load(keys + slots[:, None] * k_slot + dims[None, :], mask=readable, other=0.0)
    v = tl.load(values + slots[:, None] * v_slot + dims[None, :], mask=readable, other=0.0)
    scores = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision=PRECISION)  # [ROWS, KEYS]
    if IS_MASKED:
        scores = tl.where((own[None, :] <= positions[:, None]) & known[None, :], scores, float("-inf"))
    weights, shrink, largest, total = weigh(scores, scale, largest, total)
    v = v.to(queries.dtype)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, largest, total
