"""Decoders whose layers keep states, but for attention in every few: like Qwen3.5's, or like LFM2's."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import LinearConfig, TextConfig
from saccade.models.layers.decoder import Biases, Decoder, QKNorms, SelfAttention
from saccade.models.layers.forward_types import Attention, States
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.moe import layer_mlp
from saccade.models.layers.rotary_embedding import Rotary, rotate
from saccade.models.layers.short_convolution import ShortConvolution
from saccade.models.state_dict import Parameters

KEEPS_STATES = (GatedDeltaNet, ShortConvolution)
_ROTARY_SHARE = 0.25  # default of partial_rotary_factor


class HybridDecoder(Decoder):
    layers: list[Any]  # of HybridLayer

    def __init__(
        self,
        params: Parameters,
        text: TextConfig,
        linear: LinearConfig,
        *,
        has_gates: bool = True,  # of attention
        has_qk_norms: bool = True,
    ) -> None:
        self.linear = linear
        self.has_gates = has_gates
        super().__init__(params, text, Biases(), has_qk_norms=has_qk_norms)

    def make_rotary(self, text: TextConfig, device: torch.device) -> Rotary:
        """Only the first dimensions of a head rotate."""
        share = float(text.rope_scaling.get("partial_rotary_factor", _ROTARY_SHARE))
        return Rotary(replace(text, head_dim=int(text.head_dim * share)), device)

    def make_layer(self, params: Parameters, text: TextConfig, biases: Biases, index: int) -> HybridLayer:
        keeps_states = index in self.linear.layers
        before = sum(1 for i in self.linear.layers if i < index)
        make = self.make_states if keeps_states else self.make_attention
        return HybridLayer(
            params, text, make(params, text), index, before if keeps_states else index - before
        )

    def make_states(self, params: Parameters, text: TextConfig) -> GatedDeltaNet | ShortConvolution:
        kind = ShortConvolution if self.linear.is_convolution else GatedDeltaNet
        return kind(params.within("linear"), text, self.linear)

    def make_attention(self, params: Parameters, text: TextConfig) -> GatedAttention | SelfAttention:
        if self.has_gates:
            return GatedAttention(params, text)
        return SelfAttention(params, text, Biases(), has_qk_norms=self.has_qk_norms)

    def make_norm(self, params: Parameters, text: TextConfig) -> CenteredNorm:
        return CenteredNorm(params, text.hidden_size, text.rms_norm_eps)

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Attention, states: States | None = None
    ) -> Tensor:
        assert states is not None, "layers of this model carry states from window to window"
        cos, sin = self.rotary(positions, embeds.dtype)  # [T, 1, rotated]
        x = embeds
        for layer in self.layers:
            x = layer(x, cos, sin, attention, states)
        return self.norm(x)


class HybridLayer:
    """`number` among the layers of its kind: it is that of the KV cache, or of the states."""

    def __init__(self, params: Parameters, text: TextConfig, attention: Any, index: int, number: int) -> None:
        hidden = text.hidden_size
        self.attention_norm = CenteredNorm(params.within("attention_norm"), hidden, text.rms_norm_eps)
        self.attention = attention
        self.number = number
        self.mlp_norm = CenteredNorm(params.within("mlp_norm"), hidden, text.rms_norm_eps)
        self.mlp = layer_mlp(params, text, index)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, states: States) -> Tensor:
        normed = self.attention_norm(x)
        if isinstance(self.attention, KEEPS_STATES):
            x = x + self.attention(normed, states, self.number)
        else:
            x = x + self.attention(normed, cos, sin, attention, self.number)
        return self.mlp(self.mlp_norm(x)).add_(x)


class GatedAttention:
    """Attention with an output gate. Checkpoints store a head's query and gate side by side."""

    def __init__(self, params: Parameters, text: TextConfig) -> None:
        self.heads = text.num_heads
        self.kv_heads = text.num_kv_heads
        self.head_dim = text.head_dim
        hidden = text.hidden_size
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        inner = params.within("qkv")
        parts = {"q": self.head_dim, "k": kv, "v": kv}
        self.qkv = Linear(inner, hidden, {"q": q, "k": kv, "v": kv, "gate": q}, tensors=parts)
        inner.remove("gate.weight")
        scales = None if self.qkv.scales is None else self._by_head(self.qkv.scales)
        inner.add("q.weight", self._by_head(self.qkv.weight), scales)
        self.qk_norms = CenteredQKNorms(params, text)
        self.out = Linear(params.within("out"), q, hidden)

    def _by_head(self, rows: Tensor) -> Tensor:
        """A weight, or its scales, as [heads, query and gate, rows of a head, columns]."""
        total = 2 * (self.heads + self.kv_heads) * self.head_dim
        of_head = self.head_dim * len(rows) // total
        columns = rows.shape[1]
        to_gate = (self.heads + 2 * self.kv_heads) * of_head * columns
        return rows.as_strided((self.heads, 2, of_head, columns), (of_head * columns, to_gate, columns, 1))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, index: int) -> Tensor:
        projected = self.qkv(x).view(len(x), -1, self.head_dim)
        sizes = [self.heads + self.kv_heads, self.kv_heads, self.heads]
        qk, v, gate = torch.split(projected, sizes, dim=1)
        rotated = _rotate(self.qk_norms(qk), cos, sin)
        mixed = attention(index, rotated[:, : self.heads], rotated[:, self.heads :], v)
        return self.out((mixed * gate.sigmoid()).flatten(1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Partial RoPE: only the first dimensions of a head rotate."""
    rotated = cos.shape[-1]
    return torch.cat((rotate(x[..., :rotated], cos, sin), x[..., rotated:]), dim=-1)


class CenteredNorm(RMSNorm):
    """An RMS norm whose weights are stored minus one. Its arithmetic, and `weight`, are in float32."""

    def __init__(self, params: Parameters, size: int, eps: float) -> None:
        self.stored = params.new("weight", size)
        self.eps = eps

    @cached_property
    def weight(self) -> Tensor:  # type: ignore[override]
        return 1 + self.stored.float()

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class CenteredQKNorms(QKNorms):
    def __init__(self, params: Parameters, text: TextConfig) -> None:
        self.heads = text.num_heads
        self.eps = text.rms_norm_eps
        self.q = CenteredNorm(params.within("q_norm"), text.head_dim, self.eps)
        self.k = CenteredNorm(params.within("k_norm"), text.head_dim, self.eps)
