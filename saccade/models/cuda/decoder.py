"""The decoder with fused kernels, for CUDA devices: same weights and result as `Decoder.forward`.

Decode and prefill differ only in the attention that the caller passes in. Nothing here reads a value back
from the device, so a CUDA graph can hold all of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.kernels.ops.qk_norm import qk_rms_norm
from saccade.models.cuda.gemms import Gemms, Residual, gemms_for, new_workspace
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.torch_attention import PagedKV

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(QKV projection of new tokens [T, heads + 2 kv_heads, d], a layer's keys, its values) -> [T, heads, d]

With `in_parts`, the projection may be split-K partials [splits, T, ...]. It applies RoPE to queries and keys
and stores the new keys and values.
"""


class FusedDecoder:
    def __init__(self, decoder: Decoder, kv: PagedKV) -> None:
        assert decoder.temperature is None and not any(layer.experts for layer in decoder.layers), (
            "`eager_reason` should have kept this model from the kernels"
        )
        self.decoder = decoder
        self.kv = kv
        self._workspace = new_workspace(decoder)

    def gemms(self, rows: int, *, in_parts: bool = False) -> Gemms:
        return gemms_for(self.decoder, rows, self._workspace, in_parts=in_parts)

    def forward(self, embeds: Tensor, attend: Attend, gemms: Gemms) -> Residual:
        """[T, H], or wider rows as `Decoder.parts` reads them -> the residual after the last layer."""
        first, *deep = self.decoder.parts(embeds)
        x = Residual(first.contiguous())
        for index, layer in enumerate(self.decoder.layers):
            x = self._attention(x, index, attend, gemms)  # a method: its memory is free before the MLP begins
            x = gemms.mlp(x, layer)
            if index < len(deep):
                (x.rows if x.added is None else x.added.view(-1, *x.rows.shape)[0]).add_(deep[index])
        return x

    def _attention(self, x: Residual, index: int, attend: Attend, gemms: Gemms) -> Residual:
        layer = self.decoder.layers[index]
        qkv, x = gemms.qkv(x, layer)
        projected = qkv.view(*qkv.shape[:-1], -1, layer.head_dim)
        norms = layer.qk_norms
        if norms is not None:
            qk_rms_norm(projected, norms.q.weight, norms.k.weight, layer.heads, norms.eps)  # in place
        mixed = attend(projected, self.kv.k[index], self.kv.v[index])
        return gemms.out(mixed.flatten(1), x, layer)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a layer's projection, or of its split-K partials."""
        layer = self.decoder.layers[0]
        q, k, v = torch.split(qkv, [layer.heads, layer.kv_heads, layer.kv_heads], dim=-2)
        return q, k, v

    @property
    def scale(self) -> float:
        return self.decoder.scale

    @property
    def vocab_size(self) -> int:
        return self.decoder.head.shape[0]
