"""Attention temperature (llama_4_scaling_beta): queries are scaled by position for long contexts.

positions     0 .. L - 1    L .. 2 L - 1        2 L .. 3 L - 1      L: the length the model was trained on
queries       x 1           x (1 + b log 2)     x (1 + b log 3)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.models.layers.forward_types import Attention


class AttentionTemperature:
    def __init__(self, beta: float, length: int) -> None:
        self.beta = beta
        self.length = length

    def factors(self, positions: Tensor) -> Tensor:
        """[T] -> float32 [T]"""
        return 1 + self.beta * torch.log(1 + torch.floor(positions / self.length))

    def around(self, attention: Attention, positions: Tensor) -> Attention:
        """The same attention, with queries scaled for these RoPE positions [axes, T]."""
        factors = self.factors(positions[0])[:, None, None]
        return lambda layer, q, k, v: attention(layer, q * factors.to(q.dtype), k, v)


def attention_temperature_of(scaling: Mapping[str, Any]) -> AttentionTemperature | None:
    """Read it from rope_scaling, if it is there."""
    beta = scaling.get("llama_4_scaling_beta")
    length = scaling.get("original_max_position_embeddings")
    if not beta:
        return None
    if not length:
        name = "original_max_position_embeddings to count in"
        raise ConfigError(f"config.json has llama_4_scaling_beta, but no {name}")
    return AttentionTemperature(float(beta), int(length))
