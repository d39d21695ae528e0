"""Multi-head latent attention and a decoder of layers with it. Where the latent vectors stay is not its business.

What is kept of a token is one vector, for all heads, and the part of its key that turns with the position:

    kept       [ latent 512 | turned 64 ]            key and value at once, of one head
    queries    [ plain 128 -> 512 | turned 64 ]      each head's way from latent to key is in its queries already
    found      latent 512 -> value 128               and the way to its values comes last, once a token

So attention sees one key head, and a context is never expanded into the keys and values of every head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import MLAConfig, TextConfig
from saccade.models.layers.basic import Linear, RMSNorm, rotate, silu_and_mul
from saccade.models.layers.decoder import Rotary, yarn_gain
from saccade.models.layers.moe import layer_experts
from saccade.models.layers.types import Attention
from saccade.models.parameters import Parameters
from saccade.models.weights import Rule

_LATENT_EPS = 1e-6  # of the norms inside attention, whatever the config says of the others


class LatentDecoder:
    def __init__(self, params: Parameters, text: TextConfig, mla: MLAConfig) -> None:
        self.table = params.new("embed.weight", text.vocab_size, text.hidden_size)
        self.rotary = Rotary(replace(text, head_dim=mla.qk_rope_head_dim), params.device)
        self.scale = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5 * _stretch(text) ** 2  # of scores
        layers = params.within("layers")
        self.layers = [LatentLayer(layers.within(i), text, mla, i) for i in range(text.num_layers)]
        self.norm = RMSNorm(params.within("norm"), text.hidden_size, text.rms_norm_eps)
        self.head = self.table if text.tie_word_embeddings else params.new("head.weight", *self.table.shape)

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.table)

    def forward(self, embeds: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        # Only a part of queries and keys turns, so what a scaling multiplies them with cannot be left to the scores.
        cos, sin = (wave * self.rotary.gain for wave in self.rotary(positions, embeds.dtype))  # [T, 1, turned]
        x = embeds
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, attention, index)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head).float()


class LatentLayer:
    def __init__(self, params: Parameters, text: TextConfig, mla: MLAConfig, index: int) -> None:
        hidden, wide = text.hidden_size, text.intermediate_size
        self.attention_norm = RMSNorm(params.within("attention_norm"), hidden, text.rms_norm_eps)
        self.attend = LatentAttention(params, text, mla)
        self.mlp_norm = RMSNorm(params.within("mlp_norm"), hidden, text.rms_norm_eps)
        self.experts = layer_experts(params, hidden, text.experts, index)
        if self.experts is None:
            self.gate_up = Linear(params.within("gate_up"), hidden, {"gate": wide, "up": wide})
            self.down = Linear(params.within("down"), wide, hidden)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, index: int) -> Tensor:
        x = self.attend(self.attention_norm(x), cos, sin, attention, index).add_(x)
        normed = self.mlp_norm(x)
        return (self.experts(normed) if self.experts else self.down(silu_and_mul(self.gate_up(normed)))).add_(x)


class LatentAttention:
    def __init__(self, params: Parameters, text: TextConfig, mla: MLAConfig) -> None:
        self.mla, self.heads = mla, text.num_heads
        queries, made = (
            self.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim),
            mla.qk_nope_head_dim + mla.v_head_dim,
        )
        first = mla.q_lora_rank or queries
        self.inputs = Linear(params.within("inputs"), text.hidden_size, {"q": first, "kv": text.head_dim})
        self.q_norm, self.q_up = None, None
        if mla.q_lora_rank:
            self.q_norm = RMSNorm(params.within("q_norm"), mla.q_lora_rank, _LATENT_EPS)
            self.q_up = Linear(params.within("q_up"), mla.q_lora_rank, queries)
        self.norm = RMSNorm(params.within("latent_norm"), mla.kv_lora_rank, _LATENT_EPS)
        expand = params.new("expand.weight", self.heads * made, mla.kv_lora_rank).view(
            self.heads, made, mla.kv_lora_rank
        )
        self.to_keys, self.to_values = torch.split(
            expand, [mla.qk_nope_head_dim, mla.v_head_dim], dim=1
        )  # [heads, d, rank]
        self.out = Linear(params.within("out"), self.heads * mla.v_head_dim, text.hidden_size)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, index: int) -> Tensor:
        queries, memory = self._asked_and_kept(x, cos, sin)
        mixed = attention(index, queries, memory, memory)[..., : self.mla.kv_lora_rank]
        del queries, memory  # with many heads they are most of what a step takes
        found = torch.bmm(mixed.transpose(0, 1), self.to_values.mT).transpose(0, 1)  # [T, heads, value]
        return self.out(found.flatten(1))

    def _asked_and_kept(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[T, heads, rank + turned] and [T, 1, rank + turned]"""
        shape, rows = self.mla, len(x)
        first, kept = self.inputs(x).tensor_split(
            [self.inputs.weight.shape[0] - shape.kv_lora_rank - shape.qk_rope_head_dim], dim=-1
        )
        q = self.q_up(self.q_norm(first)) if self.q_up and self.q_norm else first
        plain, turning = q.view(rows, self.heads, -1).tensor_split([shape.qk_nope_head_dim], dim=-1)
        short, key = kept[:, None].tensor_split([shape.kv_lora_rank], dim=-1)  # [T, 1, ...]
        absorbed = torch.bmm(plain.transpose(0, 1), self.to_keys).transpose(0, 1)  # [T, heads, rank]
        queries = torch.cat((absorbed, rotate_pairs(turning, cos, sin)), dim=-1)
        return queries, torch.cat((self.norm(short), rotate_pairs(key, cos, sin)), dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Here neighbours turn together; they are put apart first, in queries and keys alike, so scores stay the same."""
    return rotate(x.view(*x.shape[:-1], -1, 2).mT.flatten(-2), cos, sin)


def _stretch(text: TextConfig) -> float:
    """What scores of all dimensions are multiplied with, twice, where positions are stretched."""
    weight = text.rope_scaling.get("mscale_all_dim")
    return yarn_gain(text.rope_scaling, float(weight)) if weight else 1.0


LATENT_RULES = tuple(  # below a layer
    Rule(f"self_attn.{name}.weight", f"{ours}.weight")
    for name, ours in {
        "q_proj": "inputs.q",
        "q_a_proj": "inputs.q",
        "q_a_layernorm": "q_norm",
        "q_b_proj": "q_up",
        "kv_a_proj_with_mqa": "inputs.kv",
        "kv_a_layernorm": "latent_norm",
        "kv_b_proj": "expand",
    }.items()
)
