"""Llama 3.2 Vision: a tower over tiles, and a Llama decoder with cross-attention layers in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import ModelConfig, TextConfig
from saccade.errors import ConfigError
from saccade.models.families.mllama_tower import TileTower
from saccade.models.layers.basic import Linear
from saccade.models.layers.cross_attention import CROSS_RULES, CrossLayer, by_layer, pack
from saccade.models.layers.decoder import Biases, Decoder, decoder_rules, head_rule
from saccade.models.layers.types import Attention, CrossAttentionRows, Encoding
from saccade.models.parameters import Parameters
from saccade.models.vision.blocks import vision_config
from saccade.models.vision.ops import VisionOps
from saccade.models.vision.preprocess import ImagePixels, PatchLayout, pixel_policy
from saccade.models.weights import Rule, under
from saccade.types import Geometry, Grid

_EXTRA_TOKENS = 8  # rows of the embedding table after the vocabulary; the first is the image token
_PIXELS = {"resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # defaults of the image processor


class Mllama:
    def __init__(
        self, config: ModelConfig, params: Parameters, image_processor: Mapping[str, Any], ops: VisionOps
    ) -> None:
        vision = vision_config(config)
        text = config.text
        if text.tie_word_embeddings:
            raise ConfigError("config.json ties the head to an embedding table that has more rows than the head")
        self.config = config
        self.params = params
        self.ops = ops
        self.pixels = pixel_policy({**_PIXELS, **image_processor})
        self.layout = PatchLayout(vision.patch_size)
        self.tower = TileTower(params.within("vision"), vision, config.raw["vision_config"])
        self.projector = Linear(params.within("projector"), self.tower.width, text.hidden_size, bias=True)
        self.cross_indices = _cross_layers(config.raw, text)
        own = replace(text, num_layers=text.num_kv_layers)
        self.decoder = Decoder(params.within("decoder"), own, Biases(), extra_tokens=_EXTRA_TOKENS)
        cross = params.within("cross")
        self.cross = [CrossLayer(cross.within(i), text) for i in range(len(self.cross_indices))]

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        """The image is padded with black to the right and below."""
        small = self.ops.resize(image, geometry.resized, self.pixels.resample).to(self.params.device)
        right = geometry.grid.w * self.layout.patch - small.shape[1]
        below = geometry.grid.h * self.layout.patch - small.shape[0]
        canvas = F.pad(small, (0, 0, 0, right, 0, below)) if right or below else small
        return self.ops.cut(canvas, geometry.grid, self.layout, self.pixels, self.params.dtype)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        """One image at a time: its tile slots are enough rows to keep a device busy."""
        parts = list(torch.split(patches, [grid.patches for grid in grids]))
        del patches
        kept = []
        for grid in grids:
            features = yield from self.tower.encode(parts.pop(0), grid)
            kept.append(pack(self.cross, self.projector(features)))
        return kept

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.decoder.embed(token_ids)

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Attention, cross_rows: Sequence[CrossAttentionRows] = ()
    ) -> Tensor:
        cos, sin = self.decoder.rotary(positions, embeds.dtype)  # [T, 1, d]
        own = iter(enumerate(self.decoder.layers))
        cross = iter(zip(self.cross, by_layer(self.cross, cross_rows), strict=True))
        x = embeds
        for index in range(self.config.text.num_layers):
            if index in self.cross_indices:
                layer, images = next(cross)
                x = layer(x, images) if images else x
            else:
                number, own_layer = next(own)
                x = own_layer(x, cos, sin, attention, number)
        return self.decoder.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)

    def rules(self) -> tuple[Rule, ...]:
        text = self.config.text
        levels = ("model.language_model.", "language_model.model.")
        return (
            *under(self._layer_rules(), levels, ""),
            *under([head_rule(text)], ("", "language_model."), "decoder."),
            *under(self.tower.rules(), ("model.vision_model.", "vision_model."), "vision."),
            *under([Rule("*", "projector.*")], ("model.multi_modal_projector.", "multi_modal_projector."), ""),
        )

    def _layer_rules(self) -> list[Rule]:
        """Checkpoints number both kinds of layers together."""
        shared = decoder_rules(self.config.text)
        rules = [Rule(r.source, r.target and f"decoder.{r.target}") for r in shared if "layers.{}" not in r.source]
        layer = [r for r in shared if "layers.{}" in r.source]
        own = [index for index in range(self.config.text.num_layers) if index not in self.cross_indices]
        for number, index in enumerate(own):
            for rule in layer:
                target = rule.target and rule.target.replace("layers.{}", f"decoder.layers.{number}")
                rules.append(Rule(rule.source.replace("layers.{}", f"layers.{index}"), target))
        for number, index in enumerate(self.cross_indices):
            rules += under(CROSS_RULES, (f"layers.{index}.",), f"cross.{number}.")
        return rules


def _cross_layers(raw: Mapping[str, Any], text: TextConfig) -> tuple[int, ...]:
    given = (raw.get("text_config") or {}).get("cross_attention_layers") or ()
    if not given or sorted(set(given)) != list(given) or not 0 <= given[0] <= given[-1] < text.num_layers:
        raise ConfigError(
            f"cross_attention_layers {list(given)} must name some of the decoder's {text.num_layers} layers, rising"
        )
    return tuple(given)
