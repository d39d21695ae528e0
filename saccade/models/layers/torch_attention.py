"""PyTorch attention over the paged KV cache and over packed images: a reference and a fast version of each.

One layer's cache is [num_blocks * block_size, kv_heads, d]; token i is in block table[i // block_size]:

    block table of a request: [7, 2, 5]          block_size 4, context 10
    slots of its tokens:      28 29 30 31 | 8 9 10 11 | 20 21
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.models.layers.attention_rules import AttentionRule, rule_attention

# Decode rows share a padded batch while padding is below this share and their keys and values fit a core's
# cache: a batch that leaves the cache between gather and use costs more than another call.
_MAX_PADDING = 0.25
_MAX_GROUP_TOKENS = 2048
_FP8_MAX = 448.0
_MIN_SPLIT = 1024  # tokens of a window for which two attention calls on a CPU cost less than a mask


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """One step's tokens, packed request after request."""

    query_lens: list[int]  # new tokens of each request, in packed order
    seq_lens: list[int]  # tokens of each request in the cache once this step's are written
    block_tables: Tensor  # int64 [requests, max_blocks], padded with blocks of the request's own
    slots: Tensor  # int64 [T]: block * block_size + offset, where each new token's key and value go
    block_size: int

    @cached_property
    def plan(self) -> _Plan:
        """The plan of `torch_attention`, made once and used in every layer."""
        starts = [0, *accumulate(self.query_lens)]
        decoding = [i for i, n in enumerate(self.query_lens) if n == 1]
        windows = [_window(self, i, starts[i]) for i, n in enumerate(self.query_lens) if n > 1]
        groups = [_group(self, members, starts) for members in _similar_contexts(decoding, self.seq_lens)]
        return _Plan(groups, windows)


class PagedKV(NamedTuple):
    """The paged KV cache."""

    k: Tensor  # [KV layers, num_blocks * block_size, kv_heads, d]
    v: Tensor  # the same tensor for MLA
    scales: Sequence[tuple[float, float]] = ()  # of each layer's FP8 keys and values; none: 1

    @classmethod
    def allocate(
        cls,
        config: TextConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[tuple[float, float]] = (),
    ) -> PagedKV:
        shape = (config.num_kv_layers, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        k = _zeros(shape, dtype, device)
        return cls(k, k if config.mla else _zeros(shape, dtype, device), scales)

    @property
    def caches(self) -> list[Tensor]:
        return [self.k] if self.v is self.k else [self.k, self.v]

    @property
    def bytes_per_token(self) -> int:
        return sum(cache.nbytes for cache in self.caches) // self.k.shape[1]

    def scales_of(self, layer: int) -> tuple[float, float]:
        """What a layer's stored keys and values are multiplied by."""
        return self.scales[layer] if self.scales else (1.0, 1.0)

    def clear(self, blocks: Sequence[int], block_size: int) -> None:
        """Zero blocks that will be partly filled: a mask does not remove a NaN of an earlier owner."""
        slots = torch.tensor(blocks, device=self.k.device)[:, None] * block_size
        slots = (slots + torch.arange(block_size, device=self.k.device)).flatten()
        indexable(self.k).index_fill_(1, slots, 0)
        indexable(self.v).index_fill_(1, slots, 0)


Backend = Callable[[Tensor, Tensor, Tensor, AttentionBatch, float], Tensor]
"""(q [T, heads, d], one layer's keys, its values, batch, scale) -> [T, heads, d]. The cache is up to date."""


def reference_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float
) -> Tensor:
    """One request, one explicit mask, one float32 softmax at a time."""
    outputs = []
    for i, queries in enumerate(torch.split(q, batch.query_lens)):  # [n, heads, d]
        context = batch.seq_lens[i]
        offsets = torch.arange(context, device=q.device)
        blocks = batch.block_tables[i][offsets // batch.block_size]
        slots = blocks * batch.block_size + offsets % batch.block_size
        group = q.shape[1] // k_cache.shape[1]
        k = k_cache[slots].float().repeat_interleave(group, dim=1)  # [context, heads, d]
        v = v_cache[slots].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,mhd->hnm", queries.float(), k) * scale
        positions = torch.arange(context - len(queries), context, device=q.device)  # positions of the queries
        scores = scores.masked_fill(offsets[None, :] > positions[:, None], float("-inf"))
        outputs.append(torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).to(q.dtype))
    return torch.cat(outputs)


def torch_attention(q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Decode rows in padded groups, prefill windows one by one; keys and values are not repeated per head."""
    out = torch.empty_like(q)
    for group in batch.plan.groups:
        _attend_group(group, q, keys, values, out, scale)
    for window in batch.plan.windows:
        _attend_window(window, q, keys, values, out, scale)
    return out


class PagedAttention:
    """The `Attention` of a step: writes a layer's new keys and values to the cache, then attends.

    All tokens are written first, because a request may read blocks that another one fills in the same step.
    """

    def __init__(
        self, kv: PagedKV, batch: AttentionBatch, scale: float, backend: Backend = torch_attention
    ) -> None:
        self.kv = kv
        self.batch = batch
        self.scale = scale
        self.backend = backend

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule | None = None
    ) -> Tensor:
        """Heads may be fewer or narrower than the cache's. With a rule the backend is not asked."""
        k_cache = self.kv.k[layer]
        v_cache = self.kv.v[layer]
        k_scale, v_scale = self.kv.scales_of(layer)
        self._store(k, k_scale, k_cache)
        if self.kv.v is not self.kv.k:
            self._store(v, v_scale, v_cache)
        scale = self.scale * k_scale
        if rule is None and k.shape[1:] == k_cache.shape[1:] == v.shape[1:]:
            mixed = self.backend(q, k_cache, v_cache, self.batch, scale)
        else:
            own = (of_heads(k_cache, *k.shape[1:]), of_heads(v_cache, *v.shape[1:]))
            mixed = rule_attention(q, *own, self.batch, scale, rule or AttentionRule())
        return mixed if v_scale == 1 else mixed * v_scale

    def _store(self, new: Tensor, scale: float, cache: Tensor) -> None:
        converted = as_stored(new, scale, cache.dtype)
        if new.shape[1:] != cache.shape[1:]:
            cache = of_heads(cache, *new.shape[1:])
        indexable(cache).index_copy_(0, self.batch.slots, indexable(converted))


def of_heads(cache: Tensor, heads: int, dim: int) -> Tensor:
    """The part of a layer's cache that such heads take: [slots, heads, d], a view."""
    width = heads * dim
    assert width <= cache[0].numel(), f"a row of the cache has {cache[0].numel()} values, not {width}"
    return cache.as_strided((len(cache), heads, dim), (cache.stride(0), dim, 1))


def as_stored(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Keys or values in the dtype of the cache. FP8 is divided by its scale, and saturates."""
    if dtype != torch.float8_e4m3fn:
        return x
    return (x.float() * (1 / scale)).clamp_(-_FP8_MAX, _FP8_MAX).to(dtype)


def indexable(cache: Tensor) -> Tensor:
    """FP8 as bytes: PyTorch copies rows of few dtypes by index."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that a device writes at once, so too little fails at start-up; a CPU takes pages as used."""
    if device.type != "cpu":
        return torch.empty(*shape, dtype=dtype, device=device).zero_()
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)  # zero until written
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


class _KeyBlocks(NamedTuple):
    """Where the keys of some requests are: blocks to gather, or a slice of the cache that needs no copy."""

    blocks: Tensor  # int64 [requests, blocks]
    contiguous: slice | None  # of slots, for a single request with consecutive blocks

    def read(self, cache: Tensor, block_size: int) -> Tensor:
        """[slots, kv_heads, d] -> [requests, kv_heads, tokens, d]"""
        if self.contiguous is not None:
            return cache[self.contiguous].transpose(0, 1)[None]
        # Whole blocks are contiguous, so the gather is a few large copies.
        rows = indexable(cache).view(-1, block_size * cache[0].numel())
        gathered = rows.index_select(0, self.blocks.flatten()).view(cache.dtype)
        return gathered.view(len(self.blocks), -1, *cache.shape[1:]).transpose(1, 2)


class _Group(NamedTuple):
    """Requests that decode: one query each."""

    rows: Tensor  # int64 [requests]: packed position of each query
    keys: _KeyBlocks
    block_size: int
    mask: Tensor | None  # float32 [requests, 1, 1, tokens]: -inf on padding


class _NewTokens(NamedTuple):
    """Several new tokens of one request."""

    rows: slice
    context: int
    keys: _KeyBlocks
    block_size: int
    mask: Tensor | None  # float32 [new tokens, context]; None when the window is the whole context
    is_split: bool  # attends to its own keys and to those before it in two calls


class _Plan(NamedTuple):
    groups: list[_Group]
    windows: list[_NewTokens]


def _attend_group(g: _Group, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, scale: float) -> None:
    # The query heads that share a key head become rows of one small GEMM.
    # [b, kv_heads, group, d]
    queries = q.index_select(0, g.rows).view(len(g.rows), k_cache.shape[1], -1, q.shape[2])
    k, v = (g.keys.read(cache, g.block_size).to(q.dtype) for cache in (k_cache, v_cache))
    mask = None if g.mask is None else g.mask.to(q.dtype).expand(-1, -1, queries.shape[2], -1)
    mixed = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale)
    out.index_copy_(0, g.rows, mixed.reshape(len(g.rows), *q.shape[1:]))


def _attend_window(w: _NewTokens, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, scale: float) -> None:
    queries = q[w.rows].transpose(0, 1)[None]  # [1, heads, n, d]
    k, v = (w.keys.read(cache, w.block_size)[:, :, : w.context].to(q.dtype) for cache in (keys, values))
    if w.is_split:
        out[w.rows] = _attend_in_parts(queries, k, v, scale)[0].transpose(0, 1)
        return
    mask = None if w.mask is None else w.mask.to(q.dtype)
    mixed = F.scaled_dot_product_attention(
        queries, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    out[w.rows] = mixed[0].transpose(0, 1)


def _attend_in_parts(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention to the own keys, full attention to those before: no mask, and less to compute."""
    past = k.shape[2] - q.shape[2]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    before, before_lse = attend(q, k[:, :, :past], v[:, :, :past], 0.0, False, scale=scale)
    window, window_lse = attend(q, k[:, :, past:], v[:, :, past:], 0.0, True, scale=scale)
    share = torch.sigmoid(before_lse - window_lse)[..., None]  # of the softmax's sum that lies in the past
    return torch.lerp(window, before, share.to(window.dtype))


def _similar_contexts(requests: list[int], seq_lens: Sequence[int]) -> Iterator[list[int]]:
    """Split into groups of similar context, so that padding to the longest stays small."""
    group: list[int] = []
    for i in sorted(requests, key=lambda i: seq_lens[i], reverse=True):
        longest = seq_lens[group[0]] if group else seq_lens[i]
        padded = longest * (len(group) + 1)
        padding = padded - sum(seq_lens[j] for j in group) - seq_lens[i]
        if group and (padded > _MAX_GROUP_TOKENS or padding > _MAX_PADDING * padded):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _group(batch: AttentionBatch, members: list[int], starts: list[int]) -> _Group:
    device = batch.block_tables.device
    lengths = torch.tensor([batch.seq_lens[i] for i in members], device=device)
    keys = _keys(batch, members)
    mask = None
    if keys.contiguous is None:
        columns = torch.arange(keys.blocks.shape[1] * batch.block_size, device=device)
        mask = _additive(columns < lengths[:, None])[:, None, None]
    return _Group(torch.tensor([starts[i] for i in members], device=device), keys, batch.block_size, mask)


def _window(batch: AttentionBatch, i: int, start: int) -> _NewTokens:
    n = batch.query_lens[i]
    context = batch.seq_lens[i]
    mask = None
    is_split = n < context and n >= _MIN_SPLIT and batch.block_tables.device.type == "cpu"
    if n < context and not is_split:
        positions = torch.arange(context - n, context, device=batch.block_tables.device)
        mask = _additive(torch.arange(context, device=positions.device) <= positions[:, None])
    return _NewTokens(slice(start, start + n), context, _keys(batch, [i]), batch.block_size, mask, is_split)


def _keys(batch: AttentionBatch, members: list[int]) -> _KeyBlocks:
    longest = max(batch.seq_lens[i] for i in members)
    blocks = batch.block_tables[members, : -(-longest // batch.block_size)]
    first = int(blocks[0, 0])
    is_contiguous = len(members) == 1 and blocks[0].tolist() == list(range(first, first + blocks.shape[1]))
    start = first * batch.block_size
    return _KeyBlocks(blocks, slice(start, start + longest) if is_contiguous else None)


def _additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))


def reference_packed_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float
) -> Tensor:
    """Full attention inside each image, with one dense mask."""
    owner = torch.repeat_interleave(torch.tensor(lengths, device=q.device))  # [T]: the image of each patch
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * scale
    scores = scores.masked_fill(owner[:, None] != owner[None, :], float("-inf"))
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v.float()).to(q.dtype)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Full attention inside each image; q, k, v are [T, heads, d] with T the sum of lengths. No padding."""
    outputs = []
    start = 0
    for length, same in groupby(lengths):
        count = len(list(same))  # adjacent images of equal size are one batch
        rows = slice(start, start + count * length)
        shape = (count, length, *q.shape[1:])
        # [count, heads, length, d]
        own_q, own_k, own_v = (x[rows].view(shape).transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(own_q, own_k, own_v, scale=scale)
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
        start = rows.stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
