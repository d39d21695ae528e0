"""Attention with a rule, of layers of Transformers, on a CUDA device: a launch stores, another attends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from saccade.kernels.attention.ruled import Interval, block_ends, ruled_attention, store_pairs
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.models.cuda.decoder import Mixer
from saccade.models.cuda.transformers_decoder import TransformersDecoder
from saccade.models.layers.attention_rules import AttentionRule, RuledAttention
from saccade.models.layers.torch_attention import of_heads
from saccade.runner.cuda.layer_pass import DecodePass, DecoderParts, PrefillPass
from saccade.runner.cuda.prefill_metadata import PrefillSizes, Window


class RuledAttentions:
    layer = RuledAttention
    is_optional = False

    @classmethod
    def of(cls, parts: DecoderParts) -> Self | None:
        fused = parts.fused
        if isinstance(fused, TransformersDecoder):
            return cls(fused, parts.block_size, parts.max_requests)
        return None

    def __init__(self, fused: TransformersDecoder, block_size: int, max_requests: int) -> None:
        self._fused = fused
        self._block_size = block_size
        self._starts = torch.arange(max_requests + 1, dtype=torch.int32, device=fused.kv.k.device)
        self._index = torch.stack((self._starts, torch.zeros_like(self._starts)), 1)

    def sized(self, sizes: PrefillSizes, windows: Sequence[Window] | None) -> PrefillSizes:
        return sizes

    def decode(self, step: DecodePass) -> Mixer:
        """A new token is a block of its own."""
        slots, seq_lens = step.metadata.slots, step.metadata.seq_lens
        requests = len(seq_lens)
        tiles = Tiles(self._starts[: requests + 1], self._index[:requests], 1)
        return self._mixer(step.inputs.tables, seq_lens, tiles, slots, None)

    def prefill(self, step: PrefillPass) -> Mixer:
        parts = step.parts
        row = self._fused.text.block_row
        blocks = None
        if row is not None:
            blocks = block_ends(parts.positions.view(step.sizes.axes, -1)[row])
        return self._mixer(step.inputs.tables, parts.seq_lens, step.tiles, parts.slots, blocks)

    def _mixer(
        self, tables: Tensor, seq_lens: Tensor, tiles: Tiles, slots: Tensor, blocks: Tensor | None
    ) -> Mixer:
        kv = self._fused.kv
        scale = self._fused.scale

        def attend(
            projected: Tensor, module: RuledAttention, index: int, out: Tensor | None = None
        ) -> Tensor:
            shape = (module.kv_heads, module.head_dim)
            q, k, v = torch.split(projected, [module.heads, shape[0], shape[0]], dim=1)
            caches = (of_heads(kv.k[index], *shape), of_heads(kv.v[index], *shape))
            scales = kv.scales_of(index)
            store_pairs(k, v, *caches, slots, scales)
            by_head = None if out is None else out.view(q.shape)
            paged = (*caches, tables, seq_lens, tiles, self._block_size, scale)
            interval = _interval(module.rule, blocks)
            return ruled_attention(q, *paged, interval, out=by_head, scales=scales).flatten(1)

        return Mixer(attend)


def _interval(rule: AttentionRule, blocks: Tensor | None) -> Interval:
    seen = None if rule.blocks is None else blocks
    return Interval(rule.window, rule.chunk, rule.softcap, rule.sinks, seen, rule.is_block_whole)
