"""Multi-head latent attention (MLA), in its absorbed form, and a decoder with it.

The KV cache has one vector per token for all heads: the latent vector and the rotated part of the key.

    cached     [ latent 512 | rope 64 ]              key and value of a single head
    queries    [ nope 128 -> 512 | rope 64 ]         a head's up-projection of keys is absorbed
    output     latent 512 -> value 128               its up-projection of values comes last

So attention runs with one key head, and a context is never expanded into keys and values of every head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saccade.checkpoint.config import MLAConfig, TextConfig
from saccade.models.layers.decoder import Biases, Decoder, DecoderLayer
from saccade.models.layers.forward_types import Attention
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.layers.rotary_embedding import Rotary, rotate, yarn_gain
from saccade.models.state_dict import Parameters
from saccade.models.weights import Rule

_LATENT_EPS = 1e-6  # of the norms inside attention, independent of rms_norm_eps


class LatentDecoder(Decoder):
    def __init__(self, params: Parameters, text: TextConfig, mla: MLAConfig) -> None:
        self.mla = mla
        super().__init__(params, text, Biases())
        weight = text.rope_scaling.get("mscale_all_dim")  # of YaRN's factor, whose square multiplies scores
        gain = yarn_gain(text.rope_scaling, float(weight)) if weight else 1.0
        self.scale = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5 * gain**2
        # RoPE covers only a part of queries and keys, so YaRN's other factor cannot be applied to the scores.
        self.rotary_gain = self.rotary.gain

    def make_rotary(self, text: TextConfig, device: torch.device) -> Rotary:
        return Rotary(replace(text, head_dim=self.mla.qk_rope_head_dim), device)

    def make_layer(self, params: Parameters, text: TextConfig, biases: Biases, index: int) -> DecoderLayer:
        return DecoderLayer(params, text, LatentAttention(params, text, self.mla), index)


class LatentAttention:
    def __init__(self, params: Parameters, text: TextConfig, mla: MLAConfig) -> None:
        self.mla = mla
        self.heads = text.num_heads
        self.kv_heads = 1
        self.head_dim = self.cached = mla.kv_lora_rank + mla.qk_rope_head_dim  # of the cached vector
        queries = self.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        expanded = mla.qk_nope_head_dim + mla.v_head_dim  # of a head
        first = mla.q_lora_rank or queries
        self.inputs = Linear(params.within("inputs"), text.hidden_size, {"q": first, "kv": text.head_dim})
        self.q_norm = None
        self.q_up = None
        if mla.q_lora_rank:
            self.q_norm = RMSNorm(params.within("q_norm"), mla.q_lora_rank, _LATENT_EPS)
            self.q_up = Linear(params.within("q_up"), mla.q_lora_rank, queries)
        self.norm = RMSNorm(params.within("latent_norm"), mla.kv_lora_rank, _LATENT_EPS)
        self.expand = params.new("expand.weight", self.heads * expanded, mla.kv_lora_rank)
        by_head = self.expand.view(self.heads, expanded, mla.kv_lora_rank)
        self.to_keys = by_head[:, : mla.qk_nope_head_dim]  # [heads, d, rank]
        self.to_values = by_head[:, mla.qk_nope_head_dim :]
        self.out = Linear(params.within("out"), self.heads * mla.v_head_dim, text.hidden_size)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, index: int) -> Tensor:
        queries, latent = self._project(x, cos, sin)
        mixed = attention(index, queries, latent, latent)[..., : self.mla.kv_lora_rank]
        del queries, latent  # with many heads they are most of a step's memory
        values = torch.bmm(mixed.transpose(0, 1), self.to_values.mT).transpose(0, 1)  # [T, heads, value]
        return self.out(values.flatten(1))

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, rank + rope] and the cached vectors [T, 1, rank + rope]."""
        mla = self.mla
        first, kv = self.inputs(x).tensor_split([self.inputs.weight.shape[0] - self.cached], dim=-1)
        if self.q_norm and self.q_up:
            first = self.q_up(self.q_norm(first))
        q_nope, q_rope = first.view(len(x), self.heads, -1).tensor_split([mla.qk_nope_head_dim], dim=-1)
        latent, k_rope = kv[:, None].tensor_split([mla.kv_lora_rank], dim=-1)  # [T, 1, ...]
        absorbed = torch.bmm(q_nope.transpose(0, 1), self.to_keys).transpose(0, 1)  # [T, heads, rank]
        queries = torch.cat((absorbed, rotate_pairs(q_rope, cos, sin)), dim=-1)
        return queries, torch.cat((self.norm(latent), rotate_pairs(k_rope, cos, sin)), dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on adjacent pairs: they are moved d / 2 apart in queries and keys, which keeps scores."""
    return rotate(x.view(*x.shape[:-1], -1, 2).mT.flatten(-2), cos, sin)


LATENT_RULES = tuple(  # under a layer's prefix
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
