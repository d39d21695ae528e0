"""MLA of a pass on a CUDA device: its kernels, and which form a prefill pass takes.

    few new tokens, or a long past    absorbed: all heads read the cached vectors, nothing is expanded
    many new tokens                   expanded: keys and values of every head, once for the whole context

A CUDA graph of T tokens has memory for T tokens of expanded contexts: prompts without a past, or with a short
one. Longer contexts are expanded in passes that are launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from saccade.kernels.attention.mla_absorbed import (
    choose_prefill_splits,
    prefill_launch,
    tile_tokens,
)
from saccade.kernels.attention.mla_expanded import (
    GATHERED,
    MLADims,
    expand_context,
    is_worth_it,
    tile_rows,
)
from saccade.kernels.attention.mla_store import mla_rope_store
from saccade.kernels.attention.prefill import Half
from saccade.kernels.attention.registry import MLA, usable
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.models.cuda.decoder import Mixer, Mixing
from saccade.models.layers.mla import LatentAttention
from saccade.models.layers.torch_attention import PagedKV
from saccade.runner.cuda.graph_sizes import MAX_EXPANDED
from saccade.runner.cuda.layer_pass import DecodePass, DecoderParts, PrefillPass
from saccade.runner.cuda.prefill_metadata import PrefillSizes, Window


class _LatentRows(NamedTuple):
    """Metadata of the rows of a pass, on the device."""

    cos: Tensor  # [T, rope]
    sin: Tensor
    slots: Tensor  # int32 [T]
    tables: Tensor  # int32 [requests, max_blocks]
    seq_lens: Tensor  # int32 [requests]


class LatentAttentions:
    layer = LatentAttention
    is_optional = False
    past_of_trials = 0  # tokens: a long one is expanded outside of graphs

    @classmethod
    def of(cls, parts: DecoderParts) -> Self | None:
        module = parts.fused.first(LatentAttention)
        return cls(module, parts.fused.kv, parts.block_size, parts.fused.scale) if module else None

    def __init__(self, module: LatentAttention, kv: PagedKV, block_size: int, scale: float) -> None:
        """`own`: any layer's, for its shape."""
        mla = module.mla
        self.dims = MLADims(mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim)
        self.heads = module.heads
        self.block_size = block_size
        self.scale = scale
        self._kv = kv.k
        self._launch = prefill_launch(kv.k)
        self._kernels = usable(MLA, kv.k.device)[0].kernel

    def is_short(self, tokens: int, seq_lens: Sequence[int]) -> bool:
        """Whether a CUDA graph of so many tokens runs these contexts in the expanded form."""
        return sum(seq_lens) <= tokens

    def expanded(self, lengths: Sequence[int], seq_lens: Sequence[int]) -> int:
        """Tokens of contexts that a pass of any size expands: all of them, or 0."""
        total = sum(seq_lens)
        return total if total <= MAX_EXPANDED and is_worth_it(lengths, seq_lens, self.dims) else 0

    def rows(self, tokens: int, *, is_short: bool = False) -> int:
        """Tokens of a tile."""
        if is_short:
            return tile_rows(self._kv, tokens, self.heads)
        return tile_tokens(self.heads, self._launch)

    def half(self, tokens: int) -> Half:
        """The launch of so many tokens in a mixed batch."""
        tiles = -(-tokens // self.rows(tokens))
        splits = choose_prefill_splits(tiles, self.heads, self._launch, self._kv.device, share=2)
        return Half(splits, tiles * -(-self.heads // self._launch.rows) * splits)

    def sized(self, sizes: PrefillSizes, windows: Sequence[Window] | None) -> PrefillSizes:
        if windows is None:
            return sizes._replace(expanded=sizes.tokens if sizes.is_short else 0)
        expanded = self.expanded_of(windows)
        return sizes._replace(expanded=expanded, is_short=expanded > 0)

    def expanded_of(self, windows: Sequence[Window]) -> int:
        lengths = [len(window.tokens) for window in windows]
        return self.expanded(lengths, [window.seq_len for window in windows])

    def decode(self, step: DecodePass) -> Mixer:
        rows = _LatentRows(
            step.inputs.cos, step.inputs.sin, step.metadata.slots, step.inputs.tables, step.metadata.seq_lens
        )

        def attend(
            projected: Tensor, module: LatentAttention, index: int, out: Tensor | None = None
        ) -> Tensor:
            queries = self._store_and_absorb(projected, module, index, rows)
            cache = self._kv[index]
            paged = (cache, rows.tables, rows.seq_lens, self.dims.rank, self.block_size, self.scale)
            return self._to_values(self._kernels.decode(queries, *paged), module, out)

        return Mixer(attend)

    def prefill(self, step: PrefillPass) -> Mixer:
        inputs = step.inputs
        rows = _LatentRows(inputs.cos, inputs.sin, step.parts.slots, inputs.tables, step.parts.seq_lens)
        if not step.sizes.expanded:
            return Mixer(self._absorbed(rows, step.tiles, step.splits))
        contexts = Tiles(step.parts.context_starts, step.parts.context_tiles.view(-1, 2), GATHERED)
        return Mixer(self._expanded(rows, step.tiles, contexts, step.sizes.expanded))

    def _absorbed(self, rows: _LatentRows, tiles: Tiles, splits: int | None) -> Mixing:
        def attend(
            projected: Tensor, module: LatentAttention, index: int, out: Tensor | None = None
        ) -> Tensor:
            queries = self._store_and_absorb(projected, module, index, rows)
            cache = self._kv[index]
            paged = (cache, rows.tables, rows.seq_lens, tiles, self.dims.rank, self.block_size, self.scale)
            return self._to_values(self._kernels.prefill(queries, *paged, splits=splits), module, out)

        return attend

    def _expanded(self, rows: _LatentRows, tiles: Tiles, contexts: Tiles, total: int) -> Mixing:
        """`contexts`: the tiles of all contexts. `total`: their tokens, or more."""

        def attend(
            projected: Tensor, module: LatentAttention, index: int, out: Tensor | None = None
        ) -> Tensor:
            q, kv = self._split(projected)
            q_rope = q[..., self.dims.nope :]
            self._store(q_rope, kv, module, index, rows, q_rope)  # in place
            cache = self._kv[index]
            context = expand_context(
                cache, rows.tables, contexts, total, module.expand, self.dims, self.block_size
            )
            if out is None:
                out = self._new_out(projected)
            by_head = out.view(len(out), self.heads, -1)
            self._kernels.expanded(q, context, tiles, self.dims, self.scale, out=by_head)
            return out

        return attend

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, nope + rope]; latent and the key's part with RoPE [T, rank + rope]."""
        width = self.heads * (self.dims.nope + self.dims.rope)
        q, kv = projected.tensor_split([width], dim=-1)
        return q.view(len(q), self.heads, -1), kv

    def _store(
        self,
        q_rope: Tensor,
        kv: Tensor,
        module: LatentAttention,
        index: int,
        rows: _LatentRows,
        rotated: Tensor,
    ) -> None:
        norm = module.norm
        rotation = (rows.cos, rows.sin)
        mla_rope_store(q_rope, kv, *rotation, norm.weight, norm.eps, self._kv[index], rows.slots, rotated)

    def _store_and_absorb(
        self, projected: Tensor, module: LatentAttention, index: int, rows: _LatentRows
    ) -> Tensor:
        """Queries [T, heads, rank + rope]."""
        dims = self.dims
        q, kv = self._split(projected)
        queries = projected.new_empty(len(projected), self.heads, dims.rank + dims.rope)
        self._store(q[..., dims.nope :], kv, module, index, rows, queries[..., dims.rank :])
        absorbed = queries[..., : dims.rank].transpose(0, 1)
        torch.bmm(q[..., : dims.nope].transpose(0, 1), module.to_keys, out=absorbed)
        return queries

    def _to_values(self, mixed: Tensor, module: LatentAttention, out: Tensor | None) -> Tensor:
        """[T, heads, rank] -> [T, heads * value]"""
        if out is None:
            out = self._new_out(mixed)
        by_head = out.view(len(out), self.heads, -1).transpose(0, 1)
        torch.bmm(mixed.transpose(0, 1), module.to_values.mT, out=by_head)
        return out

    def _new_out(self, rows: Tensor) -> Tensor:
        return rows.new_empty(len(rows), self.heads * self.dims.value)
