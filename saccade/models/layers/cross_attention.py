"""Gated cross-attention layers of a decoder, which attend to encoded images.

An encoded image is the keys and values of its states in every such layer, in rows as wide as the decoder:

    a state   [layers, k and v, kv_heads, d]  ->  flat, zeros up to whole rows  ->  [rows, hidden]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.models.layers.decoder import Biases, Decoder, DecoderLayer
from saccade.models.layers.forward_types import Attention, CrossAttentionRows
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.mlp import GatedMLP
from saccade.models.state_dict import Parameters
from saccade.models.weights import Rule


class CrossDecoder(Decoder):
    """`crossing`: which layers attend to images; all others are a Llama's."""

    layers: list[Any]  # of DecoderLayer and CrossLayer

    def __init__(
        self, params: Parameters, text: TextConfig, crossing: Sequence[int], *, extra_tokens: int
    ) -> None:
        self.crossing = crossing
        super().__init__(params, text, Biases(), extra_tokens=extra_tokens)

    @property
    def cross_layers(self) -> list[CrossLayer]:
        return [self.layers[index] for index in self.crossing]

    def make_layer(
        self, params: Parameters, text: TextConfig, biases: Biases, index: int
    ) -> DecoderLayer | CrossLayer:
        if index in self.crossing:
            return CrossLayer(params, text)
        layer: DecoderLayer = super().make_layer(params, text, biases, index)
        return layer

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Attention, rows: Sequence[CrossAttentionRows] = ()
    ) -> Tensor:
        cos, sin = self.rotary(positions, embeds.dtype)  # [T, 1, d]
        images = iter(by_layer(self.cross_layers, rows))
        kv_layers = count()
        x = embeds
        for layer in self.layers:
            if not isinstance(layer, CrossLayer):
                x = layer(x, cos, sin, attention, next(kv_layers))
            elif of_layer := next(images):
                x = layer(x, of_layer)
        return self.norm(x)


class CrossLayer:
    """Rows without images pass unchanged."""

    def __init__(self, params: Parameters, text: TextConfig) -> None:
        hidden = text.hidden_size
        self.attention_norm = RMSNorm(params.within("attention_norm"), hidden, text.rms_norm_eps)
        self.attention = CrossAttention(params, text)
        self.attention_gate = params.new("attention_gate", 1)
        self.mlp_norm = RMSNorm(params.within("mlp_norm"), hidden, text.rms_norm_eps)
        self.mlp = GatedMLP(params, hidden, text.intermediate_size)
        self.mlp_gate = params.new("mlp_gate", 1)

    def __call__(self, x: Tensor, images: Sequence[tuple[CrossAttentionRows, Tensor]]) -> Tensor:
        """`images`: rows with this layer's keys and values [2, states, kv_heads, d] of all their images."""
        rows = torch.cat([cross_rows.rows for cross_rows, _ in images])
        part = x.index_select(0, rows)
        part = part + self.attention(self.attention_norm(part), images).mul_(self.attention_gate.tanh())
        part += self.mlp(self.mlp_norm(part)).mul_(self.mlp_gate.tanh())
        return x.index_copy(0, rows, part)


class CrossAttention:
    def __init__(self, params: Parameters, text: TextConfig) -> None:
        self.heads = text.num_heads
        self.kv_heads = text.num_kv_heads
        self.head_dim = text.head_dim
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        self.q = Linear(params.within("q"), text.hidden_size, q)
        self.kv = Linear(params.within("kv"), text.hidden_size, {"k": kv, "v": kv})
        self.q_norm = RMSNorm(params.within("q_norm"), self.head_dim, text.rms_norm_eps)
        self.k_norm = RMSNorm(params.within("k_norm"), self.head_dim, text.rms_norm_eps)
        self.out = Linear(params.within("out"), q, text.hidden_size)

    def __call__(self, x: Tensor, images: Sequence[tuple[CrossAttentionRows, Tensor]]) -> Tensor:
        q = self.q_norm(self.q(x).view(len(x), self.heads, self.head_dim))
        parts = torch.split(q, [len(cross_rows.rows) for cross_rows, _ in images])
        mixed = [self._mix(part, kv) for part, (_, kv) in zip(parts, images, strict=True)]
        return self.out(torch.cat(mixed))

    def _mix(self, q: Tensor, kv: Tensor) -> Tensor:
        """Query heads that share a key head become rows of one GEMM: [n, heads, d] -> [n, heads * d]."""
        n = len(q)
        group = self.heads // self.kv_heads
        by_kv_head = q.view(n, self.kv_heads, -1).transpose(0, 1)
        queries = by_kv_head.reshape(1, self.kv_heads, n * group, self.head_dim)
        k, v = kv.transpose(1, 2)  # [kv_heads, states, d] each
        mixed = F.scaled_dot_product_attention(queries, k[None], v[None])  # of any strides
        return mixed.reshape(self.kv_heads, n, -1).transpose(0, 1).reshape(n, -1)

    def project(self, states: Tensor) -> Tensor:
        """[states, hidden] -> keys and values [2, states, kv_heads, d]"""
        kv = self.kv(states).view(len(states), 2, self.kv_heads, self.head_dim).transpose(0, 1)
        return torch.stack((self.k_norm(kv[0]), kv[1]))


def pack(layers: Sequence[CrossLayer], states: Tensor) -> Tensor:
    """States of one image [states, hidden] -> its keys and values as [slots, hidden]."""
    slots = len(states) * rows_per_state(layers, states.shape[1])
    packed = states.new_zeros(slots, states.shape[1])
    for layer, kv in zip(layers, unpack(layers, packed), strict=True):
        kv.copy_(layer.attention.project(states))
    return packed


def unpack(layers: Sequence[CrossLayer], packed: Tensor) -> Tensor:
    """[slots, hidden] -> [layers, 2, states, kv_heads, d], without a copy."""
    first = layers[0].attention
    states = packed.view(-1, rows_per_state(layers, packed.shape[1]) * packed.shape[1])
    shape = (len(layers), 2, first.kv_heads, first.head_dim)
    return states[:, : math.prod(shape)].view(-1, *shape).permute(1, 2, 0, 3, 4)


def rows_per_state(layers: Sequence[CrossLayer], width: int) -> int:
    first = layers[0].attention
    return math.ceil(2 * len(layers) * first.kv_heads * first.head_dim / width)


def by_layer(
    layers: Sequence[CrossLayer], cross_rows: Sequence[CrossAttentionRows]
) -> list[list[tuple[CrossAttentionRows, Tensor]]]:
    """Rows of each layer with their keys and values; several images are concatenated."""
    pairs = []
    for rows in cross_rows:
        images = [unpack(layers, embedding) for embedding in rows.embeddings]
        pairs.append((rows, images[0] if len(images) == 1 else torch.cat(images, 2)))
    return [[(rows, kv[index]) for rows, kv in pairs] for index in range(len(layers))]


CROSS_RULES = tuple(  # under a layer's prefix, beside those of other layers
    Rule(name, ours)
    for name, ours in {
        "cross_attn.q_proj.weight": "q.weight",
        "cross_attn.k_proj.weight": "kv.k.weight",
        "cross_attn.v_proj.weight": "kv.v.weight",
        "cross_attn.o_proj.weight": "out.weight",
        "cross_attn.q_norm.weight": "q_norm.weight",
        "cross_attn.k_norm.weight": "k_norm.weight",
        "cross_attn_attn_gate": "attention_gate",
        "cross_attn_mlp_gate": "mlp_gate",
    }.items()
)
