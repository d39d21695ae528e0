"""Decode attention (one new token per request) over the paged KV cache, in Triton. Knows block tables, no requests.

The keys of a request are divided among programs (split KV), evenly within each context, so that the grid depends on
shapes alone and a CUDA graph can hold it. Query heads of one KV head are the rows of one GEMM.

    cache of a layer [slots, kv_heads, d]         grid (kv_heads, splits, requests)

    request 0, table [7, 2, 5], context 41:       block 7            block 2            block 5
        keys                                      |0 ......... 15|16 ........ 31|32 .. 39| 40: the new token
        tiles of 16, three splits                  split 0        split 1        split 2   split 0
    request 1, context 10:                        |0 ..... 8| 9
                                                   split 0        nothing        nothing

    workspace [requests, kv_heads, splits, group, d]: partial results. The last split to arrive at the counter of
    (request, kv head) combines them, writes the result and resets the counter.

Norms of heads and RoPE are applied here to the new token's query and key. Its key and value go to the cache and,
without a round trip, into split 0. All else in the cache is older than this step, so where latency counts, a program
loads its first tile while the QKV projection still runs. Split-K partials of the projection are added up here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.attention.fp8_kv import UNSCALED, as_pairs, as_stored, beside, launched, unpaired
from saccade.kernels.attention.online_softmax import LOG2_E, divide, new_accumulator, weigh
from saccade.kernels.launch.device import num_sms, precision_of, shared_memory
from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import Launch, power_of_two

_MAX_SPLITS = 64
_MIN_KEYS_PER_SPLIT = 64  # fewer save nothing: reading 64 keys is one latency anyway
_PROGRAMS_PER_SM = 2  # keep memory busy; more only make the combine longer
_SPLITS_AT_ONCE = 8  # that the last program reads together when it combines
_MANY_SPLITS = 8  # from here on the device is not full, and latency counts
_FOUR_STAGES = 105 << 10  # bytes of shared memory


class DecodeWorkspace(NamedTuple):
    """Scratch memory of `paged_decode`. One is enough for all layers; two streams need two."""

    mixed: Tensor  # float32 [requests * heads * splits * d]: sums of values, not yet divided
    maxima: Tensor  # float32 [requests * heads * splits]: the maximum of each split
    sums: Tensor  # the same: sum of its weights
    counters: Tensor  # int32 [requests * kv_heads]: splits that have arrived; zero between launches

    @classmethod
    def allocate(
        cls, max_requests: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> DecodeWorkspace:
        """For any batch of up to `max_requests`, whatever its contexts."""
        sms = num_sms(device)
        rows = heads * max(n * choose_splits(n, kv_heads, 2**30, sms) for n in range(1, max_requests + 1))
        rows = max(rows, 2 * sms * heads // kv_heads)  # `hopper_decode`: two partial results per program
        return cls(
            torch.empty(rows * head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.zeros(max_requests * kv_heads, dtype=torch.int32, device=device),
        )


def choose_splits(requests: int, kv_heads: int, max_context: int, num_sms: int) -> int:
    """A power of two: enough programs to fill the device, none with too few keys at the longest context."""
    wanted = _PROGRAMS_PER_SM * num_sms // (requests * kv_heads)
    wanted *= 2 if 4 <= wanted < _MANY_SPLITS else 1  # with many splits, first tiles are loaded early
    useful = min(wanted, max_context // _MIN_KEYS_PER_SPLIT, _MAX_SPLITS)
    return 1 << (max(useful, 1).bit_length() - 1)


class NewTokens(NamedTuple):
    """One token of each request, before norms of heads and RoPE."""

    qkv: Tensor  # [requests, heads + 2 kv_heads, d]; or its split-K partials, float32 [splits, ...]; rows may be wider
    cos: Tensor  # [requests, rotary_dim], contiguous; dimensions of a head from rotary_dim on do not rotate
    sin: Tensor  # the same; carries the sign of its half
    slots: Tensor  # int32 [requests]: where key and value go; -1: nowhere
    query_scales: Tensor | None = None  # float32 [requests], positive: factors of the queries (attention temperature)
    q_norm: Tensor | None = None  # [d]: weights of the RMS norm of each query head; so is k_norm, of key heads
    k_norm: Tensor | None = None


def paged_decode(
    new: NewTokens,
    k_cache: Tensor,  # [slots, kv_heads, d], contiguous; so is v_cache
    v_cache: Tensor,
    block_tables: Tensor,  # int32 [requests, max_blocks]
    seq_lens: Tensor,  # int32 [requests], the new token included; 0 for a padding row, whose result is zero
    block_size: int,
    scale: float,
    workspace: DecodeWorkspace,
    *,
    splits: int | None = None,
    launch: Launch | None = None,
    out: Tensor | None = None,  # [requests, heads, d], contiguous
    norm_eps: float = 0.0,  # of q_norm and k_norm
    scales: tuple[float, float] = UNSCALED,  # of FP8 keys and values
) -> Tensor:
    """[requests, heads, d]. The grid depends on shapes alone: batch size, and the longest context the tables hold."""
    requests, all_heads, dim = new.qkv.shape[-3:]
    kv_heads = k_cache.shape[1]
    heads = all_heads - 2 * kv_heads
    splits = splits or choose_splits(requests, kv_heads, block_tables.shape[1] * block_size, num_sms(k_cache.device))
    launch = launch or launch_for(k_cache, requests, splits)
    pdl = supports_pdl(k_cache)
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and new.qkv.stride()[-2:] == (dim, 1)
    _check_workspace(workspace, requests, heads, kv_heads, dim, splits)
    out = torch.empty((requests, heads, dim), dtype=new.cos.dtype, device=k_cache.device) if out is None else out
    _decode_kernel[(kv_heads, splits, requests)](
        *new, k_cache, v_cache, block_tables, seq_lens, out, *workspace, scale * scales[0] * LOG2_E, *launched(scales),
        block_tables.stride(0), new.qkv.stride(0),
        BLOCK_SIZE=block_size, HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, SPLITS=splits,
        ROWS=power_of_two(heads // kv_heads, minimum=launch.rows), PADDED_DIM=power_of_two(dim, minimum=16),
        KEYS=launch.keys, PRECISION=precision_of(out), PARTS=num_parts(new.qkv),
        AT_ONCE=min(splits, _SPLITS_AT_ONCE if dim <= 128 else _SPLITS_AT_ONCE // 2), PEELED=splits >= _MANY_SPLITS,
        PDL=pdl, ROTARY=new.cos.shape[-1], QKV_ROW=new.qkv.stride(-3), EPS=norm_eps,
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers, **pdl_options(pdl),
    )  # fmt: skip
    return out


def num_parts(qkv: Tensor) -> int:
    """Split-K partials of a projection [T, heads, d] or [splits, T, heads, d]."""
    return qkv.shape[0] if qkv.dim() == 4 else 1


def launch_for(cache: Tensor, requests: int, splits: int) -> Launch:
    """16 rows are the least that an MMA takes; a group seldom fills them, but the kernel is memory-bound."""
    keys = 64 if cache.shape[2] <= 128 else 32  # a tile of 16 KB, or of 8 KB in FP8
    if cache.element_size() == 1 and splits < _MANY_SPLITS:  # converting needs registers, several programs share an SM
        return Launch(rows=16, keys=keys, warps=4, stages=3)
    if cache.element_size() == 4:
        return Launch(rows=16, keys=keys // 2, warps=4, stages=1)
    programs = requests * cache.shape[1] * splits
    if splits >= _MANY_SPLITS and programs > _PROGRAMS_PER_SM * num_sms(cache.device):
        return Launch(rows=16, keys=keys, warps=4, stages=2)  # several share an SM
    if splits >= _MANY_SPLITS:  # most have one tile, which is loaded early: there is nothing to pipeline
        return Launch(rows=16, keys=2 * keys, warps=4, stages=1)
    if splits == 1:
        return Launch(rows=16, keys=keys, warps=8, stages=3)
    # Shared memory for two programs per SM: if three fitted, some SMs would have none.
    return Launch(rows=16, keys=keys, warps=4, stages=4 if shared_memory(cache.device) > _FOUR_STAGES else 3)


def _check_workspace(
    workspace: DecodeWorkspace, requests: int, heads: int, kv_heads: int, dim: int, splits: int
) -> None:
    needed = requests * heads * splits * dim
    if needed > workspace.mixed.numel() or requests * kv_heads > workspace.counters.numel():
        raise ValueError(
            f"{requests} requests in {splits} splits need {needed} floats and {requests * kv_heads} counters; the"
            f" workspace has {workspace.mixed.numel()} and {workspace.counters.numel()}: allocate it for more requests"
        )


# Step metadata changes alignment and width from step to step: each variant would be compiled anew.
@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["slots", "block_tables", "seq_lens"])
def _decode_kernel(
    qkv: tl.tensor, cos: tl.tensor, sin: tl.tensor, slots: tl.tensor, query_scales: tl.tensor, q_norm: tl.tensor,
    k_norm: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, block_tables: tl.tensor, seq_lens: tl.tensor,
    out: tl.tensor, mixed: tl.tensor, maxima: tl.tensor, sums: tl.tensor, counters: tl.tensor, scale: tl.tensor,
    k_by: tl.tensor, v_by: tl.tensor, v_scale: tl.tensor, table_row: tl.tensor, part: tl.tensor,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr, PEELED: tl.constexpr, PDL: tl.constexpr,
    ROTARY: tl.constexpr, QKV_ROW: tl.constexpr, EPS: tl.constexpr,
) -> None:  # fmt: skip
    head, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + request)
    cached = tl.maximum(seq_len - 1, 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(cached, KEYS), SPLITS), 1) * KEYS  # keys of a split, in whole tiles
    active = tl.maximum(tl.cdiv(cached, share), 1)  # splits with keys; split 0 also writes for an empty context
    if split >= active:
        return
    start, end = split * share, tl.minimum((split + 1) * share, cached)
    table, own = block_tables + request.to(tl.int64) * table_row, qkv + request.to(tl.int64) * QKV_ROW
    keys, values = k_cache + head * DIM, v_cache + head * DIM
    read = as_pairs(values)
    if PEELED:
        k, v = _load_tile(keys, read, table, start, end, BLOCK_SIZE, HEADS * DIM, DIM, PADDED_DIM, KEYS)
    pdl_release_then_wait(PDL)
    cos, sin = cos + request * ROTARY, sin + request * ROTARY
    if query_scales is not None:  # scores are linear in queries
        scale *= tl.load(query_scales + request)
    kind = out.dtype.element_ty
    queries = _load_queries(
        own, keys, cos, sin, head, part, q_norm, kind, ROWS, PADDED_DIM, GROUP, DIM, ROTARY, PARTS, EPS
    )
    new_dims = tl.where((split == 0) & (seq_len > 0), DIM, 0)  # only split 0 has the new token
    new_key, new_value = _new_pair(
        own, cos, sin, head, new_dims, part, k_norm, kind, PADDED_DIM, GROUP, HEADS, DIM, ROTARY, PARTS, EPS
    )
    new_key, new_value = _store(keys, values, slots + request, new_key, new_value, k_by, v_by, new_dims, HEADS * DIM)
    largest, total, acc = _new_accumulator(read, ROWS, PADDED_DIM)
    if PEELED:
        if start < end:
            acc, largest, total = _attend(queries, k, v, start, end, scale, acc, largest, total, KEYS, PRECISION)
        start += KEYS
    acc, largest, total = _attend_rest(
        queries, keys, read, table, start, end, scale, acc, largest, total,
        BLOCK_SIZE, HEADS * DIM, DIM, PADDED_DIM, KEYS, PRECISION,
    )  # fmt: skip
    if new_dims > 0:
        acc, largest, total = _add_one(queries, new_key, new_value, scale, acc, largest, total)
    acc *= v_scale
    _finish(acc, largest, total, mixed, maxima, sums, counters, out, split, active, GROUP, DIM, SPLITS, AT_ONCE)


@triton.jit
def _load_tile(
    keys: tl.tensor, values: tl.tensor, table: tl.tensor, first: tl.tensor, end: tl.tensor,
    BLOCK_SIZE: tl.constexpr, SLOT: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Cached keys from `first` on and their values, both [KEYS, PADDED_DIM]; or pairs of FP8 values."""
    positions = first + tl.arange(0, KEYS)
    slots = slots_of(table, positions, positions < end, BLOCK_SIZE)
    return _load_slots(keys, values, slots, positions < end, SLOT, DIM, PADDED_DIM)


@triton.jit
def _load_slots(
    keys: tl.tensor, values: tl.tensor, slots: tl.tensor, known: tl.tensor,
    SLOT: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """What lies beyond the context is not read at all: it may be another request's, or NaN."""
    dims = tl.arange(0, PADDED_DIM)[None, :]
    offsets, readable = slots[:, None] * SLOT + dims, known[:, None] & (dims < DIM)
    k = tl.load(keys + offsets, mask=readable, other=0.0)
    if values.dtype.element_ty == tl.int16:
        pairs = tl.arange(0, PADDED_DIM // 2)[None, :]
        offsets, readable = slots[:, None] * (SLOT // 2) + pairs, known[:, None] & (pairs < DIM // 2)
    return k, tl.load(values + offsets, mask=readable, other=0)


@triton.jit
def _new_accumulator(values: tl.tensor, ROWS: tl.constexpr, PADDED_DIM: tl.constexpr) -> tl.tuple:
    """Sums of values as a tuple: of all dimensions, or of even and odd ones where values are read as pairs."""
    if values.dtype.element_ty == tl.int16:
        largest, total, half = new_accumulator(ROWS, PADDED_DIM // 2)
        sums: tl.tuple = (half, half)
    else:
        largest, total, whole = new_accumulator(ROWS, PADDED_DIM)
        sums = (whole,)
    return largest, total, sums


@triton.jit
def _attend_rest(
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, table: tl.tensor, start: tl.tensor, end: tl.tensor,
    scale: tl.tensor, acc: tl.tuple, largest: tl.tensor, total: tl.tensor,
    BLOCK_SIZE: tl.constexpr, SLOT: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The cached keys from `start` to `end`, tile by tile. The sums of values are those of all dimensions again.

    Slots are looked up one tile ahead: the compiler can then pipeline the loads of several tiles.
    """
    known = start + tl.arange(0, KEYS) < end
    slots = slots_of(table, start + tl.arange(0, KEYS), known, BLOCK_SIZE)
    for first in range(start, end, KEYS):
        k, v = _load_slots(keys, values, slots, known, SLOT, DIM, PADDED_DIM)
        known = first + KEYS + tl.arange(0, KEYS) < end
        slots = slots_of(table, first + KEYS + tl.arange(0, KEYS), known, BLOCK_SIZE)
        acc, largest, total = _attend(queries, k, v, first, end, scale, acc, largest, total, KEYS, PRECISION)
    return acc[0] if len(acc) == 1 else tl.interleave(acc[0], acc[1]), largest, total


@triton.jit
def _attend(
    queries: tl.tensor, k: tl.tensor, v: tl.tensor, first: tl.tensor, end: tl.tensor, scale: tl.tensor,
    acc: tl.tuple, largest: tl.tensor, total: tl.tensor, KEYS: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """One more tile of keys."""
    scores = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision=PRECISION)  # [ROWS, KEYS]
    scores = tl.where((first + tl.arange(0, KEYS) < end)[None, :], scores, float("-inf"))
    weights, shrink, largest, total = weigh(scores, scale, largest, total)
    return _add_values(acc, weights.to(queries.dtype), v, shrink[:, None], PRECISION), largest, total


@triton.jit
def _add_values(
    acc: tl.tuple, weights: tl.tensor, v: tl.tensor, shrink: tl.tensor, PRECISION: tl.constexpr
) -> tl.tuple:
    if v.dtype == tl.int16:
        even, odd = unpaired(v, weights.dtype)
        first = tl.dot(weights, even, acc[0] * shrink, input_precision=PRECISION)
        sums: tl.tuple = (first, tl.dot(weights, odd, acc[1] * shrink, input_precision=PRECISION))
    else:
        sums = (tl.dot(weights, v, acc[0] * shrink, input_precision=PRECISION),)
    return sums


@triton.jit
def _load_queries(
    own: tl.tensor, keys: tl.tensor, cos: tl.tensor, sin: tl.tensor, head: tl.tensor, part: tl.tensor,
    norm: tl.tensor, kind: tl.constexpr, ROWS: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, PARTS: tl.constexpr, EPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The query heads of a KV head [ROWS, PADDED_DIM], in the type in which they are multiplied with `keys`."""
    rows, dims = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED_DIM)[None, :]
    inside = (rows < GROUP) & (dims < DIM)
    first = own + (head * GROUP + rows) * DIM
    found = _rotated(first, cos, sin, dims, inside, part, norm, kind, DIM, ROTARY, PARTS, EPS)
    return beside(found, keys.dtype.element_ty)


@triton.jit
def _rotated(
    rows: tl.tensor, cos: tl.tensor, sin: tl.tensor, dims: tl.tensor, inside: tl.tensor, part: tl.tensor,
    norm: tl.tensor, kind: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, PARTS: tl.constexpr,
    EPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows at these pointers, normed, with RoPE: dimensions i and i + ROTARY / 2 rotate as a pair, the rest stay."""
    REST: tl.constexpr = 0.0 if ROTARY == DIM else 1.0  # their cosine
    own_cos = tl.load(cos + dims, mask=dims < ROTARY, other=REST).to(tl.float32)
    own_sin = tl.load(sin + dims, mask=dims < ROTARY, other=0.0).to(tl.float32)
    one = _projected(rows + dims, inside, part, kind, PARTS)
    paired = inside if ROTARY == DIM else inside & (dims < ROTARY)
    pairs = (dims + ROTARY // 2) % ROTARY
    other = _projected(rows + pairs, paired, part, kind, PARTS)
    if norm is not None:
        squares = one.to(tl.float32) * one.to(tl.float32)
        by = tl.rsqrt(tl.sum(squares, len(one.shape) - 1, keep_dims=True) / DIM + EPS)
        one = _scaled(one, by, norm + dims, dims < DIM)
        other = _scaled(other, by, norm + pairs, dims < ROTARY)
    return (one.to(tl.float32) * own_cos + other.to(tl.float32) * own_sin).to(one.dtype)


@triton.jit
def _scaled(rows: tl.tensor, by: tl.tensor, weights: tl.tensor, known: tl.tensor) -> tl.tensor:
    return (rows.to(tl.float32) * by * tl.load(weights, mask=known, other=0.0).to(tl.float32)).to(rows.dtype)


@triton.jit
def _projected(
    source: tl.tensor, inside: tl.tensor, part: tl.tensor, kind: tl.constexpr, PARTS: tl.constexpr
) -> tl.tensor:
    """The projection at these pointers: the sum of its split-K partials, `part` elements apart."""
    found = tl.load(source, mask=inside, other=0.0)
    for i in tl.static_range(1, PARTS):
        found += tl.load(source + i * part, mask=inside, other=0.0)
    return found.to(kind)


@triton.jit
def _new_pair(
    own: tl.tensor, cos: tl.tensor, sin: tl.tensor, head: tl.tensor, count: tl.tensor, part: tl.tensor,
    norm: tl.tensor, kind: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, PARTS: tl.constexpr, EPS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The new token's key and value, the first `count` dimensions of them."""
    dims = tl.arange(0, PADDED_DIM)
    is_new = dims < count
    first = own + (GROUP * HEADS + head) * DIM
    key = _rotated(first, cos, sin, dims, is_new, part, norm, kind, DIM, ROTARY, PARTS, EPS)
    return key, _projected(own + ((GROUP + 1) * HEADS + head) * DIM + dims, is_new, part, kind, PARTS)


@triton.jit
def _store(
    keys: tl.tensor, values: tl.tensor, slot: tl.tensor, key: tl.tensor, value: tl.tensor, k_by: tl.tensor,
    v_by: tl.tensor, count: tl.tensor, SLOT: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """The first `count` dimensions of a key and its value, unless the slot is -1. Returns both as they are stored."""
    key, value = as_stored(key, k_by, keys.dtype.element_ty), as_stored(value, v_by, values.dtype.element_ty)
    dims = tl.arange(0, key.shape[0])
    own = tl.load(slot)
    target, is_stored = own.to(tl.int64) * SLOT + dims, dims < tl.where(own >= 0, count, 0)
    tl.store(keys + target, key, mask=is_stored)
    tl.store(values + target, value, mask=is_stored)
    return key, value


@triton.jit
def _add_one(
    queries: tl.tensor, key: tl.tensor, value: tl.tensor, scale: tl.tensor,
    acc: tl.tensor, largest: tl.tensor, total: tl.tensor,
) -> tl.tuple:  # fmt: skip
    """One more key [d] and its value; it may be the first."""
    score = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale  # [ROWS]
    new_largest = tl.maximum(largest, score)
    shrink, weight = tl.exp2(largest - new_largest), tl.exp2(score - new_largest)
    acc = acc * shrink[:, None] + value.to(tl.float32)[None, :] * weight[:, None]
    return acc, new_largest, total * shrink + weight


@triton.jit
def _finish(
    acc: tl.tensor, largest: tl.tensor, total: tl.tensor,
    mixed: tl.tensor, maxima: tl.tensor, sums: tl.tensor, counters: tl.tensor, out: tl.tensor,
    split: tl.tensor, active: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the result, or a partial one; the last split combines them."""
    cell = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)  # of the result and of the workspace
    if active == 1:
        _write(out, cell, divide(acc, total), GROUP, DIM)
    else:
        _write_partial(mixed, maxima, sums, (cell * SPLITS + split) * GROUP, acc, largest, total, GROUP, DIM)
        if tl.atomic_add(counters + cell, 1, sem="acq_rel") == active - 1:
            whole = _combine(mixed, maxima, sums, cell, active, GROUP, DIM, SPLITS, acc.shape[1], AT_ONCE)
            _write(out, cell, whole, GROUP, DIM)
            tl.store(counters + cell, 0)


@triton.jit
def _write(out: tl.tensor, cell: tl.tensor, found: tl.tensor, GROUP: tl.constexpr, DIM: tl.constexpr) -> None:
    rows, dims = tl.arange(0, found.shape[0])[:, None], tl.arange(0, found.shape[1])[None, :]
    result = out + (cell * GROUP + rows) * DIM + dims
    tl.store(result, found.to(out.dtype.element_ty), mask=(rows < GROUP) & (dims < DIM))


@triton.jit
def _write_partial(
    mixed: tl.tensor, maxima: tl.tensor, sums: tl.tensor, part: tl.tensor,
    acc: tl.tensor, largest: tl.tensor, total: tl.tensor, GROUP: tl.constexpr, DIM: tl.constexpr,
) -> None:  # fmt: skip
    """The barrier at the end: all threads have stored before one of them counts this split."""
    rows, dims = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    inside = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    tl.store(mixed + (part + rows)[:, None] * DIM + dims[None, :], acc, mask=inside)
    tl.store(maxima + part + rows, largest, mask=rows < GROUP)
    tl.store(sums + part + rows, total, mask=rows < GROUP)
    tl.debug_barrier()


@triton.jit
def slots_of(table: tl.tensor, positions: tl.tensor, known: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """The slots of a request's tokens: int64, since a cache may have more elements than 32 bits count."""
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=known, other=0)
    return blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def _combine(
    mixed: tl.tensor, maxima: tl.tensor, sums: tl.tensor, cell: tl.tensor, active: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, PADDED_DIM: tl.constexpr, AT_ONCE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The softmax over all splits of a request and KV head [rows, d], several at a time: one latency for all of them.

    Other SMs wrote the partial results, so loads bypass L1. Rows come before splits: warps then divide the rows, and
    each thread reduces its own splits.
    """
    ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    inside = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    largest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for first in tl.range(0, active, AT_ONCE, num_stages=1):
        splits = first + tl.arange(0, AT_ONCE)
        part = (cell * SPLITS + splits)[None, :] * GROUP + rows[:, None]  # [ROWS, AT_ONCE]
        present = (rows < GROUP)[:, None] & (splits < active)[None, :]
        each_largest = tl.load(maxima + part, mask=present, other=-1e30, cache_modifier=".cg")
        each_total = tl.load(sums + part, mask=present, other=0.0, cache_modifier=".cg")
        each = mixed + part[:, :, None] * DIM + dims[None, None, :]  # [ROWS, AT_ONCE, PADDED_DIM]
        found = tl.load(each, mask=present[:, :, None] & inside[:, None, :], other=0.0, cache_modifier=".cg")
        new_largest = tl.maximum(largest, tl.max(each_largest, 1))
        shrink, weights = tl.exp2(largest - new_largest), tl.exp2(each_largest - new_largest[:, None])
        acc = acc * shrink[:, None] + tl.sum(found * weights[:, :, None], 1)
        total = total * shrink + tl.sum(each_total * weights, 1)
        largest = new_largest
    return divide(acc, total)
