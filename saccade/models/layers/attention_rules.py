"""Attention that is more than causal: windows, chunks, blocks seen whole, soft caps, sinks. In PyTorch.

A rule is of a layer. `rule_attention` is the reference: one request, one mask at a time.

    token              0  1  2  3  4  5  6        window 3: 6 sees 4 5 6      chunk 4: 6 sees 4 5 6
    block              0  1  2  2  2  5  6        2, 3 and 4 see each other, and what is before them
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from saccade.models.layers.torch_attention import AttentionBatch


READ_AT_ONCE = 64  # keys, at most: kernels read whole tiles, also where a window begins inside
_MAX_SCORES = 1 << 26  # held at a time: 256 MB in float32


class AttentionRule(NamedTuple):
    window: int | None = None  # tokens that one sees, itself included
    chunk: int | None = None  # tokens of a chunk: one sees its own alone
    blocks: Tensor | None = None  # [T]: the first token of each packed token's block
    is_block_whole: bool = False  # seen beyond the window, too
    prompts: Sequence[int] | None = None  # [T]: tokens of each packed token's prompt, which no window hides
    softcap: float | None = None  # scores are kept within it by tanh
    sinks: Tensor | None = None  # [heads]: a score that takes part in the softmax and has no value

    @property
    def is_plain(self) -> bool:
        """Causal and no more."""
        return (self.window, self.chunk, self.blocks, self.softcap, self.sinks) == (None,) * 5

    @property
    def is_interval(self) -> bool:
        """Whether each query sees keys that lie side by side."""
        return self.prompts is None

    @property
    def reach(self) -> int | None:
        """Tokens that one may see before the next, beside its prompt. None: all, or more than a window."""
        return None if self.is_block_whole else min(filter(None, (self.window, self.chunk)), default=None)

    def keys(self, start: int, end: int, rows: slice, device: torch.device) -> Tensor:
        """[n]: positions before `end` that queries from `start` on, in these packed rows, can see. No others
        are read: their blocks may be another request's by now."""
        first = self._first_key(start, rows)
        near = torch.arange(first, end, device=device)
        if self.prompts is None:
            return near
        prompt = torch.arange(min(first, self.prompts[rows.start]), device=device)
        return torch.cat([prompt, near])

    def _first_key(self, position: int, rows: slice) -> int:
        if self.is_block_whole and self.blocks is not None:
            position = min(position, int(self.blocks[rows].min()))
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)


class RuledAttention(NamedTuple):
    """A layer's attention with a rule, or with heads unlike those of the cache, as kernels are called."""

    heads: int
    kv_heads: int
    head_dim: int
    rule: AttentionRule

    @property
    def out(self) -> SimpleNamespace:
        """Of the output projection."""
        return SimpleNamespace(inputs=self.heads * self.head_dim)


def rule_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, rule: AttentionRule
) -> Tensor:
    """q [T, heads, d], one layer's keys and values [slots, kv_heads, d] each -> [T, heads, d of values]"""
    outputs = []
    start = 0
    for i, length in enumerate(batch.query_lens):
        rows = slice(start, start + length)
        context = batch.seq_lens[i]
        keys = rule.keys(context - length, context, rows, q.device)
        slots = batch.block_tables[i][keys // batch.block_size] * batch.block_size + keys % batch.block_size
        mask = _visible(rule, keys, context - length, rows)
        k, v = (cache[slots].transpose(0, 1).to(q.dtype) for cache in (k_cache, v_cache))
        rows_at_once = max(1, _MAX_SCORES // (q.shape[1] * len(keys)))
        pieces = (torch.split(part, rows_at_once) for part in (q[rows], mask))
        for queries, seen in zip(*pieces, strict=True):
            outputs.append(_attend(queries.transpose(0, 1), k, v, seen, scale, rule).transpose(0, 1))
        start += length
    return torch.cat(outputs)


def _visible(rule: AttentionRule, keys: Tensor, start: int, rows: slice) -> Tensor:
    """[queries, keys]. Queries are at `start` and after; keys are a context's last, and maybe a prompt."""
    queries = torch.arange(start, start + rows.stop - rows.start, device=keys.device)[:, None]
    mask = keys <= queries
    if rule.blocks is not None:
        _add_blocks(mask, rule.blocks[rows])
    if rule.window is not None:
        near = keys > queries - rule.window
        mask &= near if rule.prompts is None else near | (keys < rule.prompts[rows.start])
    if rule.blocks is not None and rule.is_block_whole:
        _add_blocks(mask, rule.blocks[rows])
        mask |= (keys >= rule.blocks[rows][:, None]) & (keys <= queries)
    if rule.chunk is not None:
        mask &= keys // rule.chunk == queries // rule.chunk
    return mask


def _add_blocks(mask: Tensor, blocks: Tensor) -> None:
    """What is in one block and among the new tokens, which are the last keys."""
    mask[:, -len(blocks) :] |= blocks == blocks[:, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, rule: AttentionRule) -> Tensor:
    """[heads, n, d]"""
    if rule.softcap is None and rule.sinks is None:
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale, enable_gqa=True)
        return mixed[0]
    groups = q.shape[0] // k.shape[0]
    k, v = (part.repeat_interleave(groups, 0) for part in (k, v))
    scores = torch.matmul(q, k.transpose(1, 2)).float() * scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.matmul(weights.to(v.dtype), v)
