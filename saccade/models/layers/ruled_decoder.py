"""Decoders whose layers differ in their attention: windows, heads, RoPE. As Gemma 3 and 4 have it.

layer       0  1  2  3  4  5            cos, sin [T, 1, 2 F]    | first halves       | second halves      |
window      w  w  w  w  w  -                                    | turn 0  | turn 1   | turn 0  | turn 1   |
heads       16 of 256 ..  8 of 512
RoPE        turn 0 ....   turn 1        a layer's heads rotate by its columns of both halves
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.checkpoint.moe_config import MoEConfig
from saccade.models.layers.attention_rules import AttentionRule
from saccade.models.layers.decoder import Biases, Decoder, DecoderLayer, SelfAttention
from saccade.models.layers.forward_types import Attention
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.mlp import GatedMLP
from saccade.models.layers.moe import MoE
from saccade.models.layers.rotary_embedding import rotate
from saccade.models.layers.sandwich import SandwichLayer
from saccade.models.state_dict import Parameters


class RuledHeads(NamedTuple):
    """The attention of a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    rule: AttentionRule  # if it has blocks, they are those of each step
    turn: slice  # of the decoder's frequencies
    norms_values: bool  # by no weight


class RuledLayers(NamedTuple):
    heads: Sequence[RuledHeads]  # of each layer
    norms_sums: bool
    experts: MoEConfig | None = None  # beside the MLP of each layer


class RuledSelfAttention(SelfAttention):
    def __init__(
        self, params: Parameters, text: TextConfig, biases: Biases, form: RuledHeads, *, has_qk_norms: bool
    ) -> None:
        text = replace(text, num_heads=form.heads, num_kv_heads=form.kv_heads, head_dim=form.head_dim)
        super().__init__(params, text, biases, has_qk_norms=has_qk_norms)
        self.form = form
        self.rule = form.rule

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, index: int) -> Tensor:
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        qk, v = torch.split(qkv, [self.heads + self.kv_heads, self.kv_heads], dim=1)
        if self.qk_norms:
            qk = self.qk_norms(qk)
            if self.form.norms_values:
                v = F.rms_norm(v, v.shape[-1:], eps=self.qk_norms.eps)
        q, k = torch.split(self._rotated(qk, cos, sin), [self.heads, self.kv_heads], dim=1)
        return self.out(attention(index, q, k, v).reshape(len(x), -1))

    def _rotated(self, qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        columns = [
            torch.cat([half[..., self.form.turn] for half in part.chunk(2, -1)], -1) for part in (cos, sin)
        ]
        return rotate(qk, *columns)

    def rule_with(self, blocks: Tensor | None) -> AttentionRule | None:
        """None: causal and no more."""
        rule = self.rule
        if rule.blocks is not None:
            rule = rule._replace(blocks=blocks)
        return None if rule.is_plain else rule


class MLPBesideExperts(GatedMLP):
    """Both read the residual, each normed by its own weight, as does the router; both results are normed."""

    def __init__(self, params: Parameters, text: TextConfig, rules: MoEConfig, *, bias: bool = False) -> None:
        super().__init__(params, text.hidden_size, text.intermediate_size, bias=bias)
        self.experts = MoE(params.within("experts"), text.hidden_size, rules)
        self.in_norms: Tensor = torch.empty(0)  # [3, H]: of the MLP, of experts, of the router
        self.eps = text.rms_norm_eps
        self.mlp_out = RMSNorm(params.within("mlp_out"), text.hidden_size, self.eps)
        self.experts_out = RMSNorm(params.within("experts_out"), text.hidden_size, self.eps)

    def of_residual(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        dense, routed, by = (normed * self.in_norms.float()[:, None]).to(x.dtype)
        return self.mlp_out(self(dense)).add_(self.experts_out(self.experts(routed, by)))


class BesideExpertsLayer(SandwichLayer):
    def run_mlp(self, x: Tensor) -> Tensor:
        return self.mlp.of_residual(x)  # type: ignore[union-attr, no-any-return]


class RuledDecoder(Decoder):
    def __init__(
        self, params: Parameters, text: TextConfig, biases: Biases, of_layers: RuledLayers, **options: Any
    ) -> None:
        self.of_layers = of_layers
        self.has_blocks = text.blocks is not None
        super().__init__(params, text, biases, **options)

    def make_layer(self, params: Parameters, text: TextConfig, biases: Biases, index: int) -> Any:
        form = self.of_layers.heads[index]
        attention = RuledSelfAttention(params, text, biases, form, has_qk_norms=self.has_qk_norms)
        if self.of_layers.experts is None:
            kind = SandwichLayer if self.of_layers.norms_sums else DecoderLayer
            return kind(params, text, attention, index, bias=biases.mlp)
        layer = BesideExpertsLayer(params, text, attention, index)
        layer.mlp = MLPBesideExperts(params, text, self.of_layers.experts)
        return layer

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Any, blocks: Tensor | None = None
    ) -> Tensor:
        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mixed: Tensor = attention(index, q, k, v, self.layers[index].attention.rule_with(blocks))
            return mixed

        return super().forward(embeds, positions, attend)
