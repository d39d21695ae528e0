"""MLA prefill with keys and values expanded for every head: for windows of many tokens. In Triton.

The absorbed form multiplies 512 + 64 and 512 dimensions a key, this one 128 + 64 and 128: less than a third. Expanding
a context costs one GEMM, which windows of a few hundred tokens earn back (`is_worth_it`).

    cache, paged     | 512 | 64 |  ─ gather ─►  latents [S, 512 + 64], contexts one after the other
                                                latents . weight^T  ─►  expanded [S, heads, 128 + 128]

    queries [T, heads, 128 + 64]     scores = q_nope . k_nope + q_rope . k_rope; the 64 are the same for all heads
    grid (heads, tiles)              causal inside the window, full over the past
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.attention.decode_triton import slots_of
from saccade.kernels.attention.online_softmax import LOG2_E, divide, new_accumulator, weigh
from saccade.kernels.launch.device import num_sms, precision_of, shared_memory
from saccade.kernels.launch.pdl import pdl_options, pdl_release_then_wait, supports_pdl
from saccade.kernels.launch.varlen_tiles import Launch, Tiles, power_of_two

GATHERED = 16  # tokens of a tile of contexts


class MLADims(NamedTuple):
    """Of a head, and of the cached vector."""

    rank: int  # of the latent
    nope: int
    rope: int
    value: int


class ExpandedContext(NamedTuple):
    """Keys and values of every head, of the contexts of a step one after the other."""

    expanded: Tensor  # [S, heads, nope + value], contiguous
    latents: Tensor  # [S, rank + rope], contiguous
    starts: Tensor  # int32 [requests + 1]: row where each context begins, and the end


def is_worth_it(lengths: Sequence[int], seq_lens: Sequence[int], dims: MLADims) -> bool:
    """Whether windows take fewer operations in the expanded form than in the absorbed one."""
    pairs = sum(n * (seq_len - n / 2) for n, seq_len in zip(lengths, seq_lens, strict=True))
    absorbed = 2 * dims.rank + dims.rope
    expanded = dims.nope + dims.rope + dims.value
    projection = dims.rank * (dims.nope + dims.value)  # of a key; the absorbed form has it for queries and results
    return pairs * (absorbed - expanded) > (sum(seq_lens) - sum(lengths)) * projection


def expand_context(
    cache: Tensor,  # [slots, 1, rank + rope], contiguous
    block_tables: Tensor,  # int32 [requests, max_blocks]
    contexts: Tiles,  # of all context lengths, the new tokens included, `GATHERED` rows each
    total: int,  # S: the sum of contexts, or more where a CUDA graph has a capacity
    weight: Tensor,  # [heads * (nope + value), rank]: of the layer's up-projection
    dims: MLADims,
    block_size: int,
) -> ExpandedContext:
    assert cache.is_contiguous() and contexts.rows == GATHERED
    latents = cache.new_empty(total, dims.rank + dims.rope)
    pdl = supports_pdl(cache)
    _gather_kernel[(len(contexts.index),)](
        cache, block_tables, contexts.starts, contexts.index, latents, block_tables.stride(0),
        BLOCK_SIZE=block_size, DIM=latents.shape[1], PADDED_DIM=power_of_two(latents.shape[1]), ROWS=GATHERED, PDL=pdl,
        num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    expanded = F.linear(latents[:, : dims.rank], weight)
    return ExpandedContext(expanded.view(total, -1, dims.nope + dims.value), latents, contexts.starts)


def choose_rows(tokens: int, heads: int, num_sms: int) -> int:
    """Large tiles read the keys less often; small ones are better where large ones would leave SMs idle."""
    return 128 if tokens * heads >= 128 * 2 * num_sms else 64


def mla_expanded_prefill(
    q: Tensor,  # [T, heads, nope + rope], last dimension dense; rope is rotated, its pairs d / 2 apart
    context: ExpandedContext,
    tiles: Tiles,  # of the windows' lengths
    dims: MLADims,
    scale: float,
    *,
    launch: Launch | None = None,
    out: Tensor | None = None,  # [T, heads, value], contiguous
) -> Tensor:
    """[T, heads, value]: attention with the up-projection of values done."""
    tokens, heads, _ = q.shape
    launch = launch or launch_for(q, tiles.rows)
    assert launch.rows == tiles.rows, f"tiles of {tiles.rows} rows, a launch of {launch.rows}"
    assert q.stride(2) == 1 and context.expanded.is_contiguous() and context.latents.is_contiguous()
    out = q.new_empty(tokens, heads, dims.value) if out is None else out
    pdl = supports_pdl(q)
    _expanded_kernel[(heads, len(tiles.index))](
        q, context.expanded, context.latents, context.starts, tiles.starts, tiles.index, out, scale * LOG2_E,
        q.stride(0), Q_HEAD=q.stride(1), HEADS=heads, RANK=dims.rank, NOPE=dims.nope, ROPE=dims.rope, VALUE=dims.value,
        PADDED_NOPE=power_of_two(dims.nope, minimum=16), PADDED_ROPE=power_of_two(dims.rope, minimum=16),
        PADDED_VALUE=power_of_two(dims.value, minimum=16), ROWS=launch.rows, KEYS=launch.keys,
        PRECISION=precision_of(q), PDL=pdl,
        num_warps=launch.warps, num_stages=launch.stages, maxnreg=launch.registers, **pdl_options(pdl),
    )  # fmt: skip
    return out


def tile_rows(cache: Tensor, tokens: int, heads: int) -> int:
    """Rows of the tiles of a pass of so many tokens."""
    if cache.element_size() == 4:
        return 32
    small = shared_memory(cache.device) < 160 << 10
    return 64 if small else choose_rows(tokens, heads, num_sms(cache.device))


def launch_for(q: Tensor, rows: int) -> Launch:
    """By shared memory: of a tile of queries, and of a tile of keys and values for each stage."""
    if q.element_size() == 4:
        return Launch(rows, keys=16, warps=4, stages=1)
    if shared_memory(q.device) < 160 << 10:
        return Launch(rows, keys=32, warps=4, stages=2)
    return Launch(rows, keys=64, warps=8 if rows >= 128 else 4, stages=3 if shared_memory(q.device) > 200 << 10 else 2)


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["block_tables", "starts", "index"])
def _gather_kernel(
    cache: tl.tensor, block_tables: tl.tensor, starts: tl.tensor, index: tl.tensor, latents: tl.tensor,
    table_row: tl.tensor,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(0)
    request = tl.load(index + 2 * tile)
    first = tl.load(index + 2 * tile + 1)
    start = tl.load(starts + request)
    seq_len = tl.load(starts + request + 1) - start
    pdl_release_then_wait(PDL)
    if first >= seq_len:
        return
    rows = first + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)[None, :]
    slots = slots_of(block_tables + request.to(tl.int64) * table_row, rows, rows < seq_len, BLOCK_SIZE)
    inside = (rows < seq_len)[:, None] & (dims < DIM)
    found = tl.load(cache + slots[:, None] * DIM + dims, mask=inside, other=0.0)
    tl.store(latents + (start + rows).to(tl.int64)[:, None] * DIM + dims, found, mask=inside)


# Step metadata changes alignment from step to step: each variant would be compiled anew.
@triton.jit(do_not_specialize_on_alignment=["key_starts", "starts", "index"])
def _expanded_kernel(
    q: tl.tensor, expanded: tl.tensor, latents: tl.tensor, key_starts: tl.tensor, starts: tl.tensor, index: tl.tensor,
    out: tl.tensor, scale: tl.tensor, q_row: tl.tensor,
    Q_HEAD: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    VALUE: tl.constexpr, PADDED_NOPE: tl.constexpr, PADDED_ROPE: tl.constexpr, PADDED_VALUE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(0)
    tile = tl.program_id(1)
    request = tl.load(index + 2 * tile)
    first = tl.load(index + 2 * tile + 1)
    start = tl.load(starts + request)
    first_key = tl.load(key_starts + request).to(tl.int64)
    length = tl.load(starts + request + 1) - start
    seq_len = tl.load(key_starts + request + 1) - first_key.to(tl.int32)
    pdl_release_then_wait(PDL)
    if first >= length:
        return
    rows = first + tl.arange(0, ROWS)
    packed = (start + rows).to(tl.int64)
    known = rows < length
    nope_dims = tl.arange(0, PADDED_NOPE)[None, :]
    rope_dims = tl.arange(0, PADDED_ROPE)[None, :]
    source = q + packed[:, None] * q_row + head * Q_HEAD
    q_nope = tl.load(source + nope_dims, mask=known[:, None] & (nope_dims < NOPE), other=0.0)
    q_rope = tl.load(source + NOPE + rope_dims, mask=known[:, None] & (rope_dims < ROPE), other=0.0)
    keys = expanded + (first_key * HEADS + head) * (NOPE + VALUE)
    ropes = latents + first_key * (RANK + ROPE) + RANK
    past = seq_len - length
    end = tl.minimum(seq_len, past + first + ROWS)
    seen_by_all = tl.minimum((past + first + 1) // KEYS * KEYS, end)
    largest, total, acc = new_accumulator(ROWS, PADDED_VALUE)
    for tile_start in range(0, seen_by_all, KEYS):
        acc, largest, total = _attend(
            q_nope, q_rope, keys, ropes, past + rows, tile_start, end, scale, acc, largest, total,
            HEADS, RANK, NOPE, ROPE, VALUE, KEYS, PRECISION, False,
        )  # fmt: skip
    for tile_start in range(seen_by_all, end, KEYS):
        acc, largest, total = _attend(
            q_nope, q_rope, keys, ropes, past + rows, tile_start, end, scale, acc, largest, total,
            HEADS, RANK, NOPE, ROPE, VALUE, KEYS, PRECISION, True,
        )  # fmt: skip
    value_dims = tl.arange(0, PADDED_VALUE)[None, :]
    result = out + (packed[:, None] * HEADS + head) * VALUE + value_dims
    tl.store(result, divide(acc, total).to(out.dtype.element_ty), mask=known[:, None] & (value_dims < VALUE))


@triton.jit
def _attend(
    q_nope: tl.tensor, q_rope: tl.tensor, keys: tl.tensor, ropes: tl.tensor, positions: tl.tensor, first: tl.tensor,
    end: tl.tensor, scale: tl.tensor, acc: tl.tensor, largest: tl.tensor, total: tl.tensor,
    HEADS: tl.constexpr, RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, IS_MASKED: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """One more tile of keys, from `first` on. What lies after `end` is another request's."""
    own = first + tl.arange(0, KEYS)
    nope_dims = tl.arange(0, q_nope.shape[1])[None, :]
    rope_dims = tl.arange(0, q_rope.shape[1])[None, :]
    value_dims = tl.arange(0, acc.shape[1])[None, :]
    is_nope = nope_dims < NOPE
    is_rope = rope_dims < ROPE
    is_value = value_dims < VALUE
    if IS_MASKED:
        readable = (own < end)[:, None]
        is_nope = is_nope & readable
        is_rope = is_rope & readable
        is_value = is_value & readable
    cells = keys + own[:, None] * (HEADS * (NOPE + VALUE))
    k_nope = tl.load(cells + nope_dims, mask=is_nope, other=0.0)
    k_rope = tl.load(ropes + own[:, None] * (RANK + ROPE) + rope_dims, mask=is_rope, other=0.0)
    v = tl.load(cells + NOPE + value_dims, mask=is_value, other=0.0)
    scores = tl.dot(q_rope, tl.trans(k_rope), input_precision=PRECISION)
    scores = tl.dot(q_nope, tl.trans(k_nope), scores, input_precision=PRECISION)  # [ROWS, KEYS]
    if IS_MASKED:
        scores = tl.where((own[None, :] <= positions[:, None]) & (own < end)[None, :], scores, float("-inf"))
    weights, shrink, largest, total = weigh(scores, scale, largest, total)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, largest, total
