"""LLaVA 1.5: a tower for square images of one size, a two-layer projector, a Llama-like decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.checkpoint.settings import setting
from saccade.errors import ConfigError
from saccade.models.interface import DecoderModel, ModelParts
from saccade.models.layers.activation import activation
from saccade.models.layers.decoder import Biases, Decoder, decoder_rules, head_rule
from saccade.models.layers.forward_types import Encoding
from saccade.models.layers.linear import Linear
from saccade.models.state_dict import Parameters
from saccade.models.vision.blocks import vision_config
from saccade.models.vision.clip import image_size, square_tower
from saccade.models.vision.preprocess import ImagePixels, PatchLayout, centre_crop
from saccade.models.weights import Rule, under
from saccade.types.media import Geometry, Grid, Size


class Llava(DecoderModel):
    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts)
        config = parts.config
        params = parts.params
        raw = config.raw
        vision = vision_config(config)
        self.square = Size(image_size(vision), image_size(vision))
        self.layout = PatchLayout(vision.patch_size)
        self.tower = square_tower(params.within("vision"), vision, raw)
        self.projector = Projector(params.within("projector"), self.tower.width, config.text.hidden_size, raw)
        self.decoder = Decoder(params.within("decoder"), config.text, decoder_biases(config.text, raw))

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        small = self.ops.resize(image, geometry.resized, self.pixels.resample)
        square = centre_crop(small, self.square).to(self.params.device)
        return self.ops.cut(square, geometry.grid, self.layout, self.pixels, self.params.dtype)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        features = yield from self.tower.encode(patches, len(grids), self.ops)
        return list(self.projector(features))

    def rules(self) -> tuple[Rule, ...]:
        text = self.config.text
        levels = ("model.vision_tower.", "vision_tower.")
        towers = (*levels, *(f"{level}vision_model." for level in levels))
        return (
            *under(decoder_rules(text), ("model.language_model.", "language_model.model."), "decoder."),
            *under([head_rule(text)], ("", "language_model."), "decoder."),
            *under(self.tower.rules(), towers, "vision."),
            *under(PROJECTOR_RULES, PROJECTOR_LEVELS, "projector."),
        )


class Projector:
    """Two layers from the tower's width to the decoder's."""

    def __init__(self, params: Parameters, inputs: int, outputs: int, raw: Mapping[str, Any]) -> None:
        bias = raw.get("multimodal_projector_bias", True)
        self.up = Linear(params.within("up"), inputs, outputs, bias=bias)
        self.act = activation(raw.get("projector_hidden_act", "gelu"))
        self.down = Linear(params.within("down"), outputs, outputs, bias=bias)

    def __call__(self, features: Tensor) -> Tensor:
        return self.down(self.act(self.up(features)))


def decoder_biases(text: TextConfig, raw: Mapping[str, Any]) -> Biases:
    nested = setting(raw, "text_config", {})
    if text.model_type == "qwen2":
        return Biases(qkv=True)
    if text.model_type == "mistral":
        return Biases()
    if text.model_type == "llama":
        attention = nested.get("attention_bias", False)
        return Biases(qkv=attention, out=attention, mlp=nested.get("mlp_bias", False))
    raise ConfigError(
        f"a {raw['model_type']} model with a {text.model_type!r} decoder is not supported "
        "(text_config.model_type); known are llama, mistral and qwen2"
    )


PROJECTOR_LEVELS = ("model.multi_modal_projector.", "multi_modal_projector.")
PROJECTOR_RULES = (Rule("linear_1.*", "up.*"), Rule("linear_2.*", "down.*"))
