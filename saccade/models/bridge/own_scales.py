"""Decoders that scale embeddings, what layers add and logits: ours has a residual in other units.

    theirs    x = e * embedding        x += m * layer(norm(x))    logits = g * head(norm(x))
    ours      y = e / m * embedding    y += layer(norm(y))        g is in the weight of the last norm

x is m * y. A norm is the same of both, if ours has an eps of eps / m^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.model import ModelBridge
from saccade.models.layers.decoder import Decoder


class Scales(NamedTuple):
    embeddings: float = 1.0  # e
    added: float = 1.0  # m
    logits: float = 1.0  # g

    def put_into(self, decoder: Decoder) -> None:
        """Once its norms are there."""
        for layer in decoder.layers:
            for norm in (layer.attention_norm, layer.mlp_norm):
                norm.eps /= self.added**2
        decoder.norm.eps /= self.added**2
        decoder.norm.weight = decoder.norm.weight * self.logits


class ScaledDecoder(Decoder):
    scales = Scales()

    def parts(self, embeds: Tensor) -> tuple[Tensor, ...]:
        first, *deep = super().parts(embeds)
        added = self.scales.added
        return first * (self.scales.embeddings / added), *(rows / added for rows in deep)


def scales_of(model: ModelBridge) -> Scales:
    layers = model.text.layers
    added = {float(getattr(layer, "residual_multiplier", 1.0)) for layer in layers}
    if len(added) != 1 or min(added) <= 0:
        raise Unfit("its layers scale what they add, each in its own way")
    return Scales(_embedding_scale(model, layers), added.pop(), model.tail.gain)


def _embedding_scale(model: ModelBridge, layers: Sequence[nn.Module]) -> float:
    """From an embedding to what reaches the first layer."""
    reached: list[Tensor] = []

    def first_layer(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        reached.append((positional[0] if positional else named["hidden_states"]).float())

    table = model.decoder.table
    embeds = table.new_zeros(1, 1, model.config.text.embedding_size)
    embeds[..., : table.shape[1]] = torch.linspace(-1, 1, table.shape[1])
    hook = layers[0].register_forward_pre_hook(first_layer, with_kwargs=True)
    try:
        with model.attention.of_step(_nothing, None):
            model.decode(embeds, torch.zeros(model.axes, 1, 1, dtype=torch.int64, device=model.device))
    finally:
        hook.remove()
    given = embeds[..., : table.shape[1]].float()
    scale = float((reached[0] * given).sum() / given.square().sum())
    if not torch.allclose(reached[0], scale * given, rtol=1e-2, atol=1e-3 * abs(scale)):
        raise Unfit("its decoder changes embeddings before its first layer")
    return scale if abs(scale - 1) > 1e-3 else 1.0


def _nothing(layer: int, q: Tensor, k: Tensor, v: Tensor, rule: object = None) -> Tensor:
    return q.new_zeros(*q.shape[:2], v.shape[2])
