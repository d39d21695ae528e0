"""Self-attention of a pass on a CUDA device: norms of heads, RoPE, and attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor

from saccade.kernels.attention.decode import DecodeAttention
from saccade.kernels.attention.decode_triton import NewTokens
from saccade.kernels.attention.prefill import PrefillAttention
from saccade.kernels.attention.rope_store_kv import rotary_and_store
from saccade.kernels.ops.qk_norm import qk_rms_norm
from saccade.models.cuda.decoder import FusedDecoder, Mixer
from saccade.models.layers.decoder import SelfAttention
from saccade.runner.cuda.layer_pass import DecodePass, DecoderParts, PrefillPass
from saccade.runner.cuda.prefill_metadata import PrefillSizes, Window


class SelfAttentions:
    layer = SelfAttention
    is_optional = False
    past_of_trials = 1024

    @classmethod
    def of(cls, parts: DecoderParts) -> Self:
        return cls(parts.fused, parts.block_size, parts.max_requests)

    def __init__(self, fused: FusedDecoder, block_size: int, max_requests: int) -> None:
        dtype = fused.kv.k.dtype
        device = fused.kv.k.device
        self._fused = fused
        self._decode = DecodeAttention(fused.heads, dtype, block_size, max_requests, device, fused.norm_eps)
        self._prefill = PrefillAttention(fused.heads, dtype, block_size, device)
        self.is_short = self._prefill.is_short
        self.rows = self._prefill.rows
        self.half = self._prefill.half

    def expanded_of(self, windows: Sequence[Window]) -> int:
        return 0

    def sized(self, sizes: PrefillSizes, windows: Sequence[Window] | None) -> PrefillSizes:
        return sizes

    def decode(self, step: DecodePass) -> Mixer:
        metadata = step.metadata
        inputs = step.inputs
        planned = self._decode.plan(metadata.seq_lens, step.taken)
        kv = self._fused.kv
        scale = self._fused.scale

        def attend(projected: Tensor, module: Any, index: int, out: Tensor | None = None) -> Tensor:
            norms = module.qk_norms
            weights = (norms.q.weight, norms.k.weight) if norms else ()
            new = NewTokens(projected, inputs.cos, inputs.sin, metadata.slots, inputs.query_scales, *weights)
            by_head = None if out is None else out.view(len(out), module.heads, module.head_dim)
            paged = (kv.k[index], kv.v[index], inputs.tables, metadata.seq_lens)
            return self._decode(new, *paged, scale, planned, by_head, kv.scales_of(index)).flatten(1)

        return Mixer(attend)

    def prefill(self, step: PrefillPass) -> Mixer:
        parts = step.parts
        inputs = step.inputs
        kv = self._fused.kv
        scale = self._fused.scale

        def attend(projected: Tensor, module: Any, index: int, out: Tensor | None = None) -> Tensor:
            norms = module.qk_norms
            if norms is not None:
                qk_rms_norm(projected, norms.q.weight, norms.k.weight, module.heads, norms.eps)  # in place
            q, k, v = self._fused.split(projected)
            cached = (kv.k[index], kv.v[index])
            rotation = (inputs.cos, inputs.sin)
            scales = kv.scales_of(index)
            q = rotary_and_store(q, k, v, *rotation, *cached, parts.slots, inputs.query_scales, scales)
            by_head = None if out is None else out.view(q.shape)
            paged = (*cached, inputs.tables, parts.seq_lens)
            return self._prefill(q, *paged, step.tiles, scale, by_head, step.splits, scales).flatten(1)

        return Mixer(attend)
