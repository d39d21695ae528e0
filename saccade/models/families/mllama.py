"""Llama 3.2 Vision: a tower over tiles, and a Llama decoder with cross-attention layers in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.checkpoint.settings import setting
from saccade.errors import ConfigError
from saccade.models.families.llava import PROJECTOR_LEVELS
from saccade.models.families.mllama_tower import TileTower, are_rising
from saccade.models.interface import DecoderModel, ModelParts
from saccade.models.layers.cross_attention import CROSS_RULES, CrossDecoder, pack
from saccade.models.layers.decoder import decoder_rules, head_rule
from saccade.models.layers.forward_types import Attention, CrossAttentionRows, Encoding
from saccade.models.layers.linear import Linear
from saccade.models.vision.blocks import vision_config
from saccade.models.vision.preprocess import ImagePixels, PatchLayout, pixel_policy
from saccade.models.weights import Rule, under
from saccade.types.media import Geometry, Grid

_EXTRA_TOKENS = 8  # rows of the embedding table after the vocabulary; the first is the image token
_PIXELS = {"resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # defaults of the image processor


class Mllama(DecoderModel):
    decoder: CrossDecoder

    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts)
        config = parts.config
        params = parts.params
        vision = vision_config(config)
        text = config.text
        if text.tie_word_embeddings:
            table = "an embedding table that has more rows than the head"
            raise ConfigError(f"config.json ties the head to {table}")
        self.pixels = pixel_policy({**_PIXELS, **parts.image_processor})
        self.layout = PatchLayout(vision.patch_size)
        self.tower = TileTower(params.within("vision"), vision, config.raw["vision_config"])
        self.projector = Linear(params.within("projector"), self.tower.width, text.hidden_size, bias=True)
        crossing = _cross_layers(config.raw, text)
        self.decoder = CrossDecoder(params.within("decoder"), text, crossing, extra_tokens=_EXTRA_TOKENS)

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        """The image is padded with black to the right and below."""
        small = self.ops.resize(image, geometry.resized, self.pixels.resample).to(self.params.device)
        right = geometry.grid.w * self.layout.patch - small.shape[1]
        below = geometry.grid.h * self.layout.patch - small.shape[0]
        if right or below:
            small = F.pad(small, (0, 0, 0, right, 0, below))
        return self.ops.cut(small, geometry.grid, self.layout, self.pixels, self.params.dtype)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        """One image at a time: its tile slots are enough rows to keep a device busy."""
        parts = list(torch.split(patches, [grid.patches for grid in grids]))
        del patches
        images = []
        for grid in grids:
            features = yield from self.tower.encode(parts.pop(0), grid)
            images.append(pack(self.decoder.cross_layers, self.projector(features)))
        return images

    def encoder_weights(self) -> Mapping[str, Tensor]:
        """The tower's, and the decoder's part of `pack`: keys and values of its cross-attention layers."""
        targets = self.params.targets.items()
        parts = (".kv.", ".k_norm.")
        packing = {name: tensor for name, tensor in targets if any(part in name for part in parts)}
        return {**super().encoder_weights(), **packing}

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Attention, rows: Sequence[CrossAttentionRows] = ()
    ) -> Tensor:
        return self.decoder.forward(embeds, positions, attention, rows)

    def rules(self) -> tuple[Rule, ...]:
        text = self.config.text
        levels = ("model.language_model.", "language_model.model.")
        rules = (*under(CROSS_RULES, ("layers.{}.",), "layers.{}."), *decoder_rules(text))
        return (
            *under(rules, levels, "decoder."),
            *under([head_rule(text)], ("", "language_model."), "decoder."),
            *under(self.tower.rules(), ("model.vision_model.", "vision_model."), "vision."),
            *under([Rule("*", "projector.*")], PROJECTOR_LEVELS, ""),
        )


def _cross_layers(raw: Mapping[str, Any], text: TextConfig) -> tuple[int, ...]:
    layers = setting(setting(raw, "text_config", {}), "cross_attention_layers", ())
    if not are_rising(layers, text.num_layers):
        rule = f"some of the decoder's {text.num_layers} layers, rising"
        raise ConfigError(f"cross_attention_layers {list(layers)} must name {rule}")
    return tuple(layers)
