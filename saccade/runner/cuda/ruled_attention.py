"""Attention with a rule on a CUDA device, in layers of Transformers or ours: a launch stores, one attends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from saccade.kernels.attention.rope_store_kv import rotary_and_store
from saccade.kernels.attention.ruled import Interval, block_ends, ruled_attention, store_pairs
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.kernels.ops.prepare_inputs import DecodeInputs, PrefillInputs
from saccade.kernels.ops.qk_norm import qk_rms_norm
from saccade.models.cuda.decoder import FusedDecoder, Mixer
from saccade.models.cuda.transformers_decoder import TransformersDecoder
from saccade.models.layers.attention_rules import AttentionRule, RuledAttention
from saccade.models.layers.ruled_decoder import RuledDecoder, RuledSelfAttention
from saccade.models.layers.torch_attention import of_heads
from saccade.runner.cuda.layer_pass import DecodePass, DecoderParts, PrefillPass
from saccade.runner.cuda.prefill_metadata import PrefillSizes, Window


class _New(NamedTuple):
    """[T, heads, d] each, of one GEMM."""

    q: Tensor
    k: Tensor
    v: Tensor


class RuledAttentions:
    layer: type = RuledAttention
    is_optional = False

    @classmethod
    def of(cls, parts: DecoderParts) -> Self | None:
        fused = parts.fused
        if isinstance(fused, TransformersDecoder):
            return cls(fused, parts.block_size, parts.max_requests)
        return None

    def __init__(self, fused: FusedDecoder, block_size: int, max_requests: int) -> None:
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
        return self._mixer(step.inputs, seq_lens, tiles, slots, None)

    def prefill(self, step: PrefillPass) -> Mixer:
        parts = step.parts
        row = self._fused.block_row
        blocks = None
        if row is not None:
            blocks = block_ends(parts.positions.view(step.sizes.axes, -1)[row])
        return self._mixer(step.inputs, parts.seq_lens, step.tiles, parts.slots, blocks)

    def _mixer(
        self,
        inputs: DecodeInputs | PrefillInputs,
        seq_lens: Tensor,
        tiles: Tiles,
        slots: Tensor,
        blocks: Tensor | None,
    ) -> Mixer:
        kv = self._fused.kv
        scale = self._fused.scale

        def attend(projected: Tensor, module: Any, index: int, out: Tensor | None = None) -> Tensor:
            shape = (module.kv_heads, module.head_dim)
            new = _New(*torch.split(projected, [module.heads, shape[0], shape[0]], dim=1))
            caches = (of_heads(kv.k[index], *shape), of_heads(kv.v[index], *shape))
            scales = kv.scales_of(index)
            q = self._store(projected, new, module, inputs, (*caches, slots), scales)
            by_head = None if out is None else out.view(q.shape)
            paged = (*caches, inputs.tables, seq_lens, tiles, self._block_size, scale)
            interval = _interval(module.rule, blocks)
            return ruled_attention(q, *paged, interval, out=by_head, scales=scales).flatten(1)

        return Mixer(attend)

    def _store(
        self,
        projected: Tensor,
        new: _New,
        module: Any,
        inputs: DecodeInputs | PrefillInputs,
        target: tuple[Tensor, Tensor, Tensor],
        scales: tuple[float, float],
    ) -> Tensor:
        """Keys and values to the cache; the queries."""
        store_pairs(new.k, new.v, *target, scales)
        return new.q


class RuledSelfAttentions(RuledAttentions):
    """Of our decoders: norms of heads and RoPE are not yet applied."""

    layer = RuledSelfAttention

    @classmethod
    def of(cls, parts: DecoderParts) -> Self | None:
        if isinstance(parts.fused.decoder, RuledDecoder):
            return cls(parts.fused, parts.block_size, parts.max_requests)
        return None

    def _store(
        self,
        projected: Tensor,
        new: _New,
        module: Any,
        inputs: DecodeInputs | PrefillInputs,
        target: tuple[Tensor, Tensor, Tensor],
        scales: tuple[float, float],
    ) -> Tensor:
        norms = module.qk_norms
        if norms is not None:
            weights = (norms.q.weight, norms.k.weight, module.heads, norms.eps)
            qk_rms_norm(projected, *weights, has_v=module.form.norms_values)
        rotation = (inputs.cos, inputs.sin)
        return rotary_and_store(*new, *rotation, *target, scales=scales, turn=module.form.turn)


def _interval(rule: AttentionRule, blocks: Tensor | None) -> Interval:
    seen = None if rule.blocks is None else blocks
    return Interval(rule.window, rule.chunk, rule.softcap, rule.sinks, seen, rule.is_block_whole)
