"""The decoder with fused kernels, for CUDA devices: the same weights and the same result as `Decoder.forward`.

Rows of any kind may be mixed; what differs between decoding and prompts is the attention the caller passes in. Nothing
here reads a value back from the device, so a CUDA graph can hold all of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.kernels.fused_norm import add_rms_norm, silu_and_mul
from saccade.kernels.store_kv import rotary_and_store
from saccade.models.attention import PagedKV
from saccade.models.decoder import Decoder, DecoderLayer
from saccade.models.layers import RMSNorm

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(turned queries [T, heads, d], one layer's keys, its values) -> [T, heads, d]. The cache has these rows' tokens."""


class FusedDecoder:
    def __init__(self, decoder: Decoder, kv: PagedKV) -> None:
        self.decoder = decoder
        self.kv = kv
        # The norm behind a layer's MLP is the next layer's first one.
        norms = [layer.attention_norm for layer in decoder.layers] + [decoder.norm]
        self._layers = list(zip(decoder.layers, norms[1:], strict=True))
        self._first: RMSNorm = norms[0]

    def forward(self, embeds: Tensor, positions: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        """[T, H] -> normed hidden states [T, H]. `slots` [T] says where keys and values go; -1 is a row of padding."""
        cos, sin = (angles.contiguous() for angles in self.decoder.rotary(positions, embeds.dtype))  # [T, 1, d]
        residual, normed = embeds, self._first(embeds)
        for index, (layer, next_norm) in enumerate(self._layers):
            mixed = self._attend(layer, index, normed, cos, sin, slots, attend)
            normed, residual = add_rms_norm(layer.out(mixed), residual, layer.mlp_norm.weight, layer.mlp_norm.eps)
            wide = silu_and_mul(layer.gate_up(normed))
            normed, residual = add_rms_norm(layer.down(wide), residual, next_norm.weight, next_norm.eps)
        return normed

    def _attend(
        self, layer: DecoderLayer, index: int, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, attend: Attend
    ) -> Tensor:
        qkv = layer.qkv(x).view(len(x), -1, layer.head_dim)  # [T, heads + 2 kv_heads, d]
        q, k, v = torch.split(qkv, [layer.heads, layer.kv_heads, layer.kv_heads], dim=1)
        keys, values = self.kv.k[index], self.kv.v[index]
        rotary_and_store(q, k, v, cos, sin, keys, values, slots)
        return attend(q, keys, values).view(len(x), -1)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.decoder.embed(token_ids)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """In the model's own type: rounding does not change which one is largest."""
        return torch.mm(hidden, self.decoder.head.T, out=out)

    @property
    def scale(self) -> float:
        return float(self.decoder.layers[0].head_dim ** -0.5)

    @property
    def vocab_size(self) -> int:
        return self.decoder.head.shape[0]


def fusable(decoder: Decoder) -> bool:
    """Whether the kernels know this decoder's shapes."""
    return decoder.layers[0].head_dim % 16 == 0
