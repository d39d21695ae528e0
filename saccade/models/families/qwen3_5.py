"""Qwen3.5: Qwen3-VL's tower, and a hybrid decoder of gated delta nets and gated attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import LinearConfig, TextConfig
from saccade.errors import ConfigError
from saccade.models.families.qwen3_vl import Qwen3VL
from saccade.models.layers.decoder import decoder_rules
from saccade.models.layers.forward_types import Attention, States
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.layers.linear import Linear
from saccade.models.layers.moe import GatedMLP, layer_experts
from saccade.models.layers.rotary_embedding import Rotary, rotate
from saccade.models.state_dict import Parameters
from saccade.models.weights import Rule, under

_ROTARY_SHARE = 0.25  # default of partial_rotary_factor


class Qwen3_5(Qwen3VL):
    decoder: Any  # a HybridDecoder

    def make_decoder(self, params: Parameters) -> Any:
        """Not a `Decoder`, since the fused CUDA kernels do not support recurrent states."""
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


class HybridDecoder:
    def __init__(self, params: Parameters, text: TextConfig, linear: LinearConfig) -> None:
        if text.num_heads % text.num_kv_heads or linear.value_heads % linear.key_heads:
            raise ConfigError(
                f"{text.num_heads} attention heads cannot share {text.num_kv_heads} key-value heads, or "
                f"{linear.value_heads} value heads {linear.key_heads} key heads"
            )
        self.table = params.new("embed.weight", text.vocab_size, text.hidden_size)
        share = float(text.rope_scaling.get("partial_rotary_factor", _ROTARY_SHARE))
        self.rotary = Rotary(replace(text, head_dim=int(text.head_dim * share)), params.device)
        self.scale = float(text.head_dim**-0.5)
        layers = enumerate(params.each("layers", text.num_layers))
        self.layers = [HybridLayer(own, text, linear, i) for i, own in layers]
        self.norm = CenteredNorm(params.within("norm"), text.hidden_size, text.rms_norm_eps)
        self.head = self.table if text.tie_word_embeddings else params.new("head.weight", *self.table.shape)

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.table)

    def forward(self, embeds: Tensor, positions: Tensor, attention: Attention, states: States) -> Tensor:
        cos, sin = self.rotary(positions, embeds.dtype)  # [T, 1, rotated]
        x = embeds
        for layer in self.layers:
            x = layer(x, cos, sin, attention, states)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head).float()


class HybridLayer:
    def __init__(self, params: Parameters, text: TextConfig, linear: LinearConfig, index: int) -> None:
        hidden = text.hidden_size
        before = sum(1 for i in linear.layers if i < index)  # linear attention layers
        self.attention_norm = CenteredNorm(params.within("attention_norm"), hidden, text.rms_norm_eps)
        self.delta: GatedDeltaNet | None = None
        self.attend: GatedAttention | None = None
        if index in linear.layers:
            self.index = before
            self.delta = GatedDeltaNet(params.within("linear"), text, linear)
        else:
            self.index = index - before
            self.attend = GatedAttention(params, text)
        self.mlp_norm = CenteredNorm(params.within("mlp_norm"), hidden, text.rms_norm_eps)
        experts = layer_experts(params, hidden, text.experts, index)
        self.mlp = experts or GatedMLP(params, hidden, text.intermediate_size)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, states: States) -> Tensor:
        normed = self.attention_norm(x)
        if self.delta is not None:
            x = x + self.delta(normed, states, self.index)
        elif self.attend is not None:
            x = x + self.attend(normed, cos, sin, attention, self.index)
        return self.mlp(self.mlp_norm(x)).add_(x)


class GatedAttention:
    """Attention with an output gate, which is projected together with each query."""

    def __init__(self, params: Parameters, text: TextConfig) -> None:
        self.heads = text.num_heads
        self.kv_heads = text.num_kv_heads
        self.head_dim = text.head_dim
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        self.qkv = Linear(params.within("qkv"), text.hidden_size, {"q": 2 * q, "k": kv, "v": kv})
        self.q_norm = CenteredNorm(params.within("q_norm"), self.head_dim, text.rms_norm_eps)
        self.k_norm = CenteredNorm(params.within("k_norm"), self.head_dim, text.rms_norm_eps)
        self.out = Linear(params.within("out"), q, text.hidden_size)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, index: int) -> Tensor:
        projected = self.qkv(x).view(len(x), -1, self.head_dim)
        both, kv = torch.split(projected, [2 * self.heads, 2 * self.kv_heads], dim=1)
        q, gate = both.reshape(len(x), self.heads, 2, self.head_dim).unbind(2)  # [T, heads, d] each
        k, v = kv.chunk(2, dim=1)
        q = _rotate(self.q_norm(q), cos, sin)
        k = _rotate(self.k_norm(k), cos, sin)
        mixed = attention(index, q, k, v)
        return self.out((mixed * gate.sigmoid()).flatten(1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Partial RoPE: only the first dimensions of a head rotate."""
    rotated = cos.shape[-1]
    return torch.cat((rotate(x[..., :rotated], cos, sin), x[..., rotated:]), dim=-1)


class CenteredNorm:
    """An RMS norm whose weights are stored minus one."""

    def __init__(self, params: Parameters, size: int, eps: float) -> None:
        self.weight = params.new("weight", size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)
