"""Qwen3.5: Qwen3-VL's tower, and a hybrid decoder of gated delta nets and gated attention."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import LinearConfig, TextConfig
from saccade.errors import ConfigError
from saccade.models.families.qwen3_vl import Qwen3VL
from saccade.models.layers.decoder import Biases, Decoder, QKNorms, decoder_rules
from saccade.models.layers.forward_types import Attention, States
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.moe import layer_mlp
from saccade.models.layers.rotary_embedding import Rotary, rotate
from saccade.models.state_dict import Parameters
from saccade.models.weights import Rule, under

_ROTARY_SHARE = 0.25  # default of partial_rotary_factor


class Qwen3_5(Qwen3VL):
    decoder: Any  # a HybridDecoder

    def make_decoder(self, params: Parameters) -> Any:
        if self.config.text.linear is None:
            raise ConfigError("config.json names no linear_attention layers, which this family is made of")
        return HybridDecoder(params, self.config.text, self.config.text.linear)

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Attention, states: States | None = None
    ) -> Tensor:
        assert states is not None, "layers of this model carry states from window to window"
        hidden: Tensor = self.decoder.forward(embeds, positions, attention, states)
        return hidden

    def rules(self) -> tuple[Rule, ...]:
        names = {
            **{f"in_proj_{part}.*": f"inputs.{part}.*" for part in ("qkv", "z", "b", "a")},
            "conv1d.weight": "conv.weight",
            "A_log": "decay",
            "dt_bias": "decay_bias",
            "norm.weight": "norm.weight",
            "out_proj.*": "out.*",
        }
        inner = [Rule(name, ours) for name, ours in names.items()]
        linear = under(inner, ("layers.{}.linear_attn.",), "layers.{}.linear.")
        mtp = [Rule(f"mtp.{rule.source}", None) for rule in decoder_rules(self.config.text)]
        extra = ("fc", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
        mtp += [Rule(f"mtp.{name}.weight", None) for name in extra]
        return (*super().rules(), *under(linear, ("model.language_model.", "model."), "decoder."), *mtp)


class HybridDecoder(Decoder):
    """Gated delta nets, and gated attention in every few layers."""

    layers: list[Any]  # of HybridLayer

    def __init__(self, params: Parameters, text: TextConfig, linear: LinearConfig) -> None:
        if linear.value_heads % linear.key_heads:
            shared = f"{linear.key_heads} key heads"
            raise ConfigError(f"{linear.value_heads} value heads of linear attention cannot share {shared}")
        self.linear = linear
        super().__init__(params, text, Biases())

    def make_rotary(self, text: TextConfig, device: torch.device) -> Rotary:
        """Only the first dimensions of a head rotate."""
        share = float(text.rope_scaling.get("partial_rotary_factor", _ROTARY_SHARE))
        return Rotary(replace(text, head_dim=int(text.head_dim * share)), device)

    def make_layer(self, params: Parameters, text: TextConfig, biases: Biases, index: int) -> HybridLayer:
        return HybridLayer(params, text, self.linear, index)

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
    """`index` counts the layers of its kind: it is that of the KV cache, or of the recurrent states."""

    def __init__(self, params: Parameters, text: TextConfig, linear: LinearConfig, index: int) -> None:
        hidden = text.hidden_size
        before = sum(1 for i in linear.layers if i < index)  # linear attention layers
        self.attention_norm = CenteredNorm(params.within("attention_norm"), hidden, text.rms_norm_eps)
        self.attention: GatedAttention | GatedDeltaNet
        if index in linear.layers:
            self.index = before
            self.attention = GatedDeltaNet(params.within("linear"), text, linear)
        else:
            self.index = index - before
            self.attention = GatedAttention(params, text)
        self.mlp_norm = CenteredNorm(params.within("mlp_norm"), hidden, text.rms_norm_eps)
        self.mlp = layer_mlp(params, text, index)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, states: States) -> Tensor:
        normed = self.attention_norm(x)
        if isinstance(self.attention, GatedDeltaNet):
            x = x + self.attention(normed, states, self.index)
        else:
            x = x + self.attention(normed, cos, sin, attention, self.index)
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
