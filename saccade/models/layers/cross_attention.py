"""Gated cross-attention layers of a decoder, which attend to encoded images.

An encoded image is the keys and values of its states in every such layer, in rows as wide as the decoder:

    [layers, k and v, states, kv_heads, d]  ->  flat, zeros up to whole rows  ->  [slots, hidden]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.models.layers.forward_types import CrossAttentionRows
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.state_dict import Parameters
from saccade.models.weights import Rule


class CrossLayer:
    """Rows without images pass unchanged."""

    def __init__(self, params: Parameters, text: TextConfig) -> None:
        self.heads = text.num_heads
        self.kv_heads = text.num_kv_heads
        self.head_dim = text.head_dim
        hidden = text.hidden_size
        wide = text.intermediate_size
        eps = text.rms_norm_eps
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        self.attention_norm = RMSNorm(params.within("attention_norm"), hidden, eps)
        self.q = Linear(params.within("q"), hidden, q)
        self.kv = Linear(params.within("kv"), hidden, {"k": kv, "v": kv})
        self.q_norm = RMSNorm(params.within("q_norm"), self.head_dim, eps)
        self.k_norm = RMSNorm(params.within("k_norm"), self.head_dim, eps)
        self.out = Linear(params.within("out"), q, hidden)
        self.attention_gate = params.new("attention_gate", 1)
        self.mlp_norm = RMSNorm(params.within("mlp_norm"), hidden, eps)
        self.gate_up = Linear(params.within("gate_up"), hidden, {"gate": wide, "up": wide})
        self.down = Linear(params.within("down"), wide, hidden)
        self.mlp_gate = params.new("mlp_gate", 1)

    def __call__(self, x: Tensor, images: Sequence[tuple[CrossAttentionRows, Tensor]]) -> Tensor:
        """`images`: rows with this layer's keys and values [2, states, kv_heads, d] of all their images."""
        rows = torch.cat([cross_rows.rows for cross_rows, _ in images])
        part = x.index_select(0, rows)
        part = part + self.attend(self.attention_norm(part), images).mul_(self.attention_gate.tanh())
        gate, up = self.gate_up(self.mlp_norm(part)).chunk(2, dim=-1)
        part += self.down(F.silu(gate).mul_(up)).mul_(self.mlp_gate.tanh())
        return x.index_copy(0, rows, part)

    def attend(self, x: Tensor, images: Sequence[tuple[CrossAttentionRows, Tensor]]) -> Tensor:
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
    first = layers[0]
    values = 2 * len(layers) * first.kv_heads * first.head_dim  # of one state
    slots = len(states) * math.ceil(values / states.shape[1])
    kept = states.new_zeros(slots, states.shape[1])
    for layer, kv in zip(layers, unpack(layers, kept), strict=True):
        kv.copy_(layer.project(states))
    return kept


def unpack(layers: Sequence[CrossLayer], kept: Tensor) -> Tensor:
    """[slots, hidden] -> [layers, 2, states, kv_heads, d], without a copy."""
    first = layers[0]
    values = 2 * len(layers) * first.kv_heads * first.head_dim
    states = len(kept) // math.ceil(values / kept.shape[1])
    return kept.reshape(-1)[: states * values].view(len(layers), 2, states, first.kv_heads, first.head_dim)


def by_layer(
    layers: Sequence[CrossLayer], cross_rows: Sequence[CrossAttentionRows]
) -> list[list[tuple[CrossAttentionRows, Tensor]]]:
    """For each layer, its rows with their keys and values; several images are concatenated."""
    pairs = []
    for rows in cross_rows:
        images = [unpack(layers, embedding) for embedding in rows.embeddings]
        pairs.append((rows, images[0] if len(images) == 1 else torch.cat(images, 2)))
    return [[(rows, kv[index]) for rows, kv in pairs] for index in range(len(layers))]


CROSS_RULES = (
    Rule("input_layernorm.weight", "attention_norm.weight"),
    Rule("cross_attn.q_proj.weight", "q.weight"),
    Rule("cross_attn.k_proj.weight", "kv.k.weight"),
    Rule("cross_attn.v_proj.weight", "kv.v.weight"),
    Rule("cross_attn.o_proj.weight", "out.weight"),
    Rule("cross_attn.q_norm.weight", "q_norm.weight"),
    Rule("cross_attn.k_norm.weight", "k_norm.weight"),
    Rule("cross_attn_attn_gate", "attention_gate"),
    Rule("post_attention_layernorm.weight", "mlp_norm.weight"),
    Rule("mlp.gate_proj.weight", "gate_up.gate.weight"),
    Rule("mlp.up_proj.weight", "gate_up.up.weight"),
    Rule("mlp.down_proj.weight", "down.weight"),
    Rule("cross_attn_mlp_gate", "mlp_gate"),
)
