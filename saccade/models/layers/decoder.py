"""The Llama-like decoder of most families, over packed tokens. `Attention` owns the KV cache."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.errors import ConfigError
from saccade.models.layers.attention_temperature import attention_temperature_of
from saccade.models.layers.forward_types import Attention
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.moe import EXPERT_RULES, layer_mlp
from saccade.models.layers.packed_linear import (
    Gemm,
    Lookup,
    linear_with_copy,
    pack,
    packed_linear,
    packed_lookup,
    packed_rows,
)
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
        self.lookup: Lookup = F.embedding
        self.embedding_gain = 1.0  # of the table's rows
        self.tail: Any = None  # of the head's output, float32 -> float32; None: nothing
        self.hidden_size = text.hidden_size
        self.embedding_size = text.embedding_size
        self.rotary = self.make_rotary(text, params.device)
        self.scale = float(text.head_dim**-0.5) * self.rotary.gain**2  # of scores
        self.rotary_gain = 1.0  # of cos and sin
        self.temperature = attention_temperature_of(text.rope_scaling)
        self.has_qk_norms = has_qk_norms
        layers = enumerate(params.each("layers", text.num_layers))
        self.layers = [self.make_layer(inner, text, biases, index) for index, inner in layers]
        self.norm = self.make_norm(params.within("norm"), text)
        self.head = self.table
        self.head_gemm: Gemm = F.linear
        if not text.tie_word_embeddings:
            self.head = params.new("head.weight", text.vocab_size, text.hidden_size)
        self.projection: Linear | None = None  # of late interaction: hidden states to token vectors
        if text.token_dim is not None:
            inner = params.within("projection")
            self.projection = Linear(inner, text.hidden_size, text.token_dim, bias=True)

    def make_rotary(self, text: TextConfig, device: torch.device) -> Rotary:
        return Rotary(text, device)

    def make_layer(self, params: Parameters, text: TextConfig, biases: Biases, index: int) -> Any:
        attention = SelfAttention(params, text, biases, has_qk_norms=self.has_qk_norms)
        return DecoderLayer(params, text, attention, index, bias=biases.mlp)

    def make_norm(self, params: Parameters, text: TextConfig) -> RMSNorm:
        return RMSNorm(params, text.hidden_size, text.rms_norm_eps)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, embedding size]: zeros for the deepstack vectors of images."""
        rows = self.lookup(token_ids, self.table)
        if self.embedding_gain != 1:
            rows = rows * self.embedding_gain
        columns = self.embedding_size - rows.shape[1]
        return F.pad(rows, (0, columns)) if columns else rows

    def forward(self, embeds: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        cos, sin = self.rotary(positions, embeds.dtype)  # [T, 1, d]
        if self.rotary_gain != 1:
            cos = cos * self.rotary_gain
            sin = sin * self.rotary_gain
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
        return torch.split(embeds, self.hidden_size, dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head_gemm(hidden, self.head, None).float()
        return logits if self.tail is None else self.tail(logits)

    def pack_head(self) -> None:
        """Embeddings are looked up in a packed head that is tied, or in the original where that cannot be."""
        packed = pack(self.head)
        if self.head is self.table:
            rows = packed_rows(packed, self.table)
            if rows is not None:
                self.table = rows
                self.lookup = packed_lookup
        self.head = packed
        self.head_gemm = packed_linear

    def copy_head(self) -> None:
        """A packed copy for steps of several rows; one row is computed with the original."""
        self.head_gemm = partial(linear_with_copy, packed=pack(self.head))


class DecoderLayer:
    def __init__(
        self,
        params: Parameters,
        text: TextConfig,
        attention: Any,  # SelfAttention, or another kind that is called like it
        index: int,
        *,
        bias: bool = False,  # of the MLP
    ) -> None:
        self.attention_norm = RMSNorm(params.within("attention_norm"), text.hidden_size, text.rms_norm_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(params.within("mlp_norm"), text.hidden_size, text.rms_norm_eps)
        self.mlp = layer_mlp(params, text, index, bias=bias)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, index: int) -> Tensor:
        x = self.attention(self.attention_norm(x), cos, sin, attention, index).add_(x)
        return self.mlp(self.mlp_norm(x)).add_(x)


class SelfAttention:
    def __init__(self, params: Parameters, text: TextConfig, biases: Biases, *, has_qk_norms: bool) -> None:
        self.heads = text.num_heads
        self.kv_heads = text.num_kv_heads
        self.head_dim = text.head_dim
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        sizes = {"q": q, "k": kv, "v": kv}
        self.qkv = Linear(params.within("qkv"), text.hidden_size, sizes, bias=biases.qkv)
        self.qk_norms = QKNorms(params, text) if has_qk_norms else None
        self.out = Linear(params.within("out"), q, text.hidden_size, bias=biases.out)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, index: int) -> Tensor:
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)  # [T, heads + 2 kv_heads, d]
        v = qkv[:, self.heads + self.kv_heads :]
        qk = qkv[:, : self.heads + self.kv_heads]
        # Queries and keys are adjacent, so one call rotates both.
        if self.qk_norms:
            qk = self.qk_norms(qk)
        rotated = rotate(qk, cos, sin)
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
