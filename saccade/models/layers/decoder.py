"""The Llama-like decoder of most families, over packed tokens. `Attention` owns the KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.errors import ConfigError
from saccade.models.layers.activation import silu_and_mul
from saccade.models.layers.attention_temperature import attention_temperature_of
from saccade.models.layers.forward_types import Attention
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.moe import EXPERT_RULES, layer_experts
from saccade.models.layers.rotary_embedding import Rotary, rotate
from saccade.models.state_dict import Parameters
from saccade.models.weights import Rule, under


class Biases(NamedTuple):
    """Which projections have a bias, by which the families differ."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


class Decoder:
    def __init__(
        self,
        params: Parameters,
        text: TextConfig,
        biases: Biases,
        *,
        has_qk_norms: bool = False,
        extra_tokens: int = 0,  # input-only tokens after the vocabulary
    ) -> None:
        if text.num_heads % text.num_kv_heads:
            shared = f"{text.num_kv_heads} key-value heads"
            raise ConfigError(f"{text.num_heads} attention heads cannot share {shared}")
        self.table = params.new("embed.weight", text.vocab_size + extra_tokens, text.hidden_size)
        self.embedding_size = text.embedding_size
        self.rotary = Rotary(text, params.device)
        self.scale = float(text.head_dim**-0.5) * self.rotary.gain**2  # of scores
        self.temperature = attention_temperature_of(text.rope_scaling)
        layers = enumerate(params.each("layers", text.num_layers))
        self.layers = [DecoderLayer(own, text, biases, has_qk_norms, i) for i, own in layers]
        self.norm = RMSNorm(params.within("norm"), text.hidden_size, text.rms_norm_eps)
        self.head = self.table
        if not text.tie_word_embeddings:
            self.head = params.new("head.weight", text.vocab_size, text.hidden_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, embedding size]: zeros for the deepstack vectors of images."""
        rows = F.embedding(token_ids, self.table)
        missing = self.embedding_size - rows.shape[1]
        return F.pad(rows, (0, missing)) if missing else rows

    def forward(self, embeds: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        cos, sin = self.rotary(positions, embeds.dtype)  # [T, 1, d]
        if self.temperature is not None:
            attention = self.temperature.around(attention, positions)
        x, *deepstack = self.parts(embeds)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, attention, index)
            if index < len(deepstack):
                x.add_(deepstack[index])
        return self.norm(x)

    def parts(self, embeds: Tensor) -> tuple[Tensor, ...]:
        """The input of the first layer, and what deepstack adds after the first layers: [T, H] each."""
        return torch.split(embeds, self.table.shape[1], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head).float()


class DecoderLayer:
    def __init__(
        self, params: Parameters, text: TextConfig, biases: Biases, has_qk_norms: bool = False, index: int = 0
    ) -> None:
        self.heads = text.num_heads
        self.kv_heads = text.num_kv_heads
        self.head_dim = text.head_dim
        hidden = text.hidden_size
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        self.attention_norm = RMSNorm(params.within("attention_norm"), hidden, text.rms_norm_eps)
        self.qkv = Linear(params.within("qkv"), hidden, {"q": q, "k": kv, "v": kv}, bias=biases.qkv)
        self.qk_norms = QKNorms(params, text) if has_qk_norms else None
        self.out = Linear(params.within("out"), q, hidden, bias=biases.out)
        self.mlp_norm = RMSNorm(params.within("mlp_norm"), hidden, text.rms_norm_eps)
        self.experts = layer_experts(params, hidden, text.experts, index)
        if self.experts is None:
            wide = {"gate": text.intermediate_size, "up": text.intermediate_size}
            self.gate_up = Linear(params.within("gate_up"), hidden, wide, bias=biases.mlp)
            self.down = Linear(params.within("down"), text.intermediate_size, hidden, bias=biases.mlp)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, index: int) -> Tensor:
        x = self.attend(self.attention_norm(x), cos, sin, attention, index).add_(x)
        normed = self.mlp_norm(x)
        mlp = self.experts(normed) if self.experts else self.down(silu_and_mul(self.gate_up(normed)))
        return mlp.add_(x)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, index: int) -> Tensor:
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)  # [T, heads + 2 kv_heads, d]
        v = qkv[:, self.heads + self.kv_heads :]
        qk = qkv[:, : self.heads + self.kv_heads]
        # Queries and keys are adjacent, so one call rotates both.
        rotated = rotate(self.qk_norms(qk) if self.qk_norms else qk, cos, sin)
        mixed = attention(index, rotated[:, : self.heads], rotated[:, self.heads :], v)
        return self.out(mixed.reshape(len(x), -1))


class QKNorms:
    """RMS norms over each head of the queries and keys, before RoPE."""

    def __init__(self, params: Parameters, text: TextConfig) -> None:
        self.heads = text.num_heads
        self.eps = text.rms_norm_eps
        self.q = RMSNorm(params.within("q_norm"), text.head_dim, self.eps)
        self.k = RMSNorm(params.within("k_norm"), text.head_dim, self.eps)

    def __call__(self, qk: Tensor) -> Tensor:
        """[T, heads + kv_heads, d], queries first"""
        return torch.cat((self.q(qk[:, : self.heads]), self.k(qk[:, self.heads :])), dim=1)


def decoder_rules(text: TextConfig) -> tuple[Rule, ...]:
    """Weight rules under the decoder's prefix in a checkpoint."""
    layer = {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "qkv.q",
        "self_attn.k_proj": "qkv.k",
        "self_attn.v_proj": "qkv.v",
        "self_attn.q_norm": "q_norm",
        "self_attn.k_norm": "k_norm",
        "self_attn.o_proj": "out",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "gate_up.gate",
        "mlp.up_proj": "gate_up.up",
        "mlp.down_proj": "down",
    }
    return (
        Rule("embed_tokens.weight", "embed.weight"),
        *(Rule(f"layers.{{}}.{name}.*", f"layers.{{}}.{ours}.*") for name, ours in layer.items()),
        *(under(EXPERT_RULES, ("layers.{}.",), "layers.{}.") if text.experts else ()),
        Rule("norm.weight", "norm.weight"),
        Rule("rotary_emb.inv_freq", None),
        Rule("layers.{}.self_attn.rotary_emb.inv_freq", None),
    )


def head_rule(text: TextConfig) -> Rule:
    """A tied head is ignored where a checkpoint stores it as well."""
    return Rule("lm_head.weight", None if text.tie_word_embeddings else "head.weight")
