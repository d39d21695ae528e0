"""The decoder with fused kernels, for CUDA devices: same weights and result as `Decoder.forward`.

Decode and prefill differ only in the attention that the caller passes in. Nothing here reads a value back
from the device, so a CUDA graph can hold all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.kernels.launch.device import Heads
from saccade.kernels.ops.output_gate import sigmoid_gate
from saccade.kernels.ops.prepare_inputs import Temperature
from saccade.kernels.ops.qk_norm import qk_rms_norm
from saccade.models.cuda.gemms import Gemms, Residual, gemms_for, new_workspace
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.layers.torch_attention import PagedKV

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(QKV projection of new tokens [T, heads + 2 kv_heads, d], a layer's keys, its values) -> [T, heads, d]

With `in_parts`, the projection may be split-K partials [splits, T, ...]. It applies RoPE to queries and keys
and stores the new keys and values.
"""


Delta = Callable[[Tensor, GatedDeltaNet, int], Tensor]
"""(projection of new tokens [T, width], its layer, index of its states) -> [T, value_heads * value]"""


class Mixers(NamedTuple):
    """What mixes the tokens of a pass."""

    attend: Attend
    delta: Delta | None = None  # of decoders with gated delta nets


class FusedDecoder:
    def __init__(self, decoder: Decoder, kv: PagedKV) -> None:
        self.decoder = decoder
        self.kv = kv
        own = next(layer.attention for layer in decoder.layers if layer.attention is not None)
        self.heads = Heads(own.heads, own.kv_heads, own.head_dim)
        nets = [net for layer in decoder.layers if (net := _delta_of(layer)) is not None]
        self.net = nets[0] if nets else None  # for its shape
        self._workspace = new_workspace(decoder)

    def gemms(self, rows: int, *, in_parts: bool = False) -> Gemms:
        return gemms_for(self.decoder, rows, self._workspace, in_parts=in_parts)

    def forward(self, embeds: Tensor, mixers: Mixers, gemms: Gemms) -> Residual:
        """[T, H], or wider rows as `Decoder.parts` reads them -> the residual after the last layer."""
        first, *deep = self.decoder.parts(embeds)
        x = Residual(first.contiguous())
        seen = [0, 0]  # layers with attention, with a delta net
        for index, layer in enumerate(self.decoder.layers):
            net = _delta_of(layer)
            if net is None:  # methods: their memory is free before the MLP begins
                x = self._attention(x, layer, seen[0], mixers.attend, gemms)
            else:
                assert mixers.delta is not None
                x = self._delta(x, layer, net, seen[1], mixers.delta, gemms)
            seen[net is not None] += 1
            x = gemms.mlp(x, layer.mlp_norm, layer.mlp)
            if index < len(deep):
                (x.rows if x.added is None else x.added.view(-1, *x.rows.shape)[0]).add_(deep[index])
        return x

    def _attention(self, x: Residual, layer: Any, index: int, attend: Attend, gemms: Gemms) -> Residual:
        own = layer.attention
        qkv, x = gemms.project(x, layer.attention_norm, own.qkv, in_parts=own.qk_norms is None)
        projected = qkv.view(*qkv.shape[:-1], -1, own.head_dim)
        count = own.heads + 2 * own.kv_heads
        gate = projected[..., count:, :]  # of attention with an output gate
        projected = projected[..., :count, :]
        norms = own.qk_norms
        if norms is not None:
            qk_rms_norm(projected, norms.q.weight, norms.k.weight, own.heads, norms.eps)  # in place
        mixed = attend(projected, self.kv.k[index], self.kv.v[index]).flatten(1)
        if gate.shape[-2]:
            mixed = sigmoid_gate(mixed, gate.flatten(1))
        return gemms.add(mixed, own.out, x)

    def _delta(
        self, x: Residual, layer: Any, net: GatedDeltaNet, index: int, mix: Delta, gemms: Gemms
    ) -> Residual:
        projected, x = gemms.project(x, layer.attention_norm, net.inputs)
        return gemms.add(mix(projected, net, index), net.out, x)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a layer's projection, or of its split-K partials."""
        heads = self.heads
        q, k, v = torch.split(qkv, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=-2)
        return q, k, v

    @property
    def temperature(self) -> Temperature | None:
        found = self.decoder.temperature
        return Temperature(found.beta, found.length) if found else None

    @property
    def scale(self) -> float:
        return self.decoder.scale

    @property
    def vocab_size(self) -> int:
        return self.decoder.head.shape[0]


def _delta_of(layer: Any) -> GatedDeltaNet | None:
    net: GatedDeltaNet | None = getattr(layer, "delta", None)
    return net
