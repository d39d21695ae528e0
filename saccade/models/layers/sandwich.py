"""Decoder layers that norm what they add, too.

x ─┬─ norm ─ attention ─ norm ─ + ─┬─ norm ─ MLP ─ norm ─ + ─
   └────────────────────────────┘  └──────────────────────┘
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.models.layers.decoder import Biases, Decoder, DecoderLayer, SelfAttention
from saccade.models.layers.forward_types import Attention
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.state_dict import Parameters


class NormedSum:
    """The residual with what a layer adds."""

    def __init__(self, params: Parameters, text: TextConfig) -> None:
        self.norm = RMSNorm(params, text.hidden_size, text.rms_norm_eps)
        self.scale = 1.0  # of the sum

    def __call__(self, added: Tensor, residual: Tensor) -> Tensor:
        return self.norm(added).add_(residual).mul_(self.scale)


class SandwichLayer(DecoderLayer):
    def __init__(
        self, params: Parameters, text: TextConfig, attention: Any, index: int, *, bias: bool = False
    ) -> None:
        super().__init__(params, text, attention, index, bias=bias)
        self.attention_sum = NormedSum(params.within("attention_sum"), text)
        self.mlp_sum = NormedSum(params.within("mlp_sum"), text)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, index: int) -> Tensor:
        mixed = self.attention(self.attention_norm(x), cos, sin, attention, index)
        x = self.attention_sum(mixed, x)
        return self.mlp_sum(self.run_mlp(x), x)

    def run_mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.mlp_norm(x))
        return out


class SandwichDecoder(Decoder):
    def make_layer(self, params: Parameters, text: TextConfig, biases: Biases, index: int) -> Any:
        attention = SelfAttention(params, text, biases, has_qk_norms=self.has_qk_norms)
        return SandwichLayer(params, text, attention, index, bias=biases.mlp)
