"""Text models: Llama, Qwen2, Qwen3, Mistral and Ministral 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from saccade.errors import ConfigError
from saccade.models.interface import DecoderModel, ModelParts
from saccade.models.layers.decoder import Biases, Decoder, decoder_rules, head_rule
from saccade.models.state_dict import Parameters
from saccade.models.vision.preprocess import ImagePixels
from saccade.models.weights import Rule, under
from saccade.types.media import Geometry, Grid


class Variant(NamedTuple):
    biases: Biases
    has_qk_norms: bool


class Text(DecoderModel):
    """A decoder without a vision tower."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts)
        self.decoder = self.make_decoder(parts.params.within("decoder"))

    def make_decoder(self, params: Parameters) -> Decoder:
        act = self.config.raw.get("hidden_act", "silu")
        if act != "silu":
            raise ConfigError(f"config.json asks for the activation {act!r}; decoders of this line use silu")
        variant = variant_of(self.config.model_type, self.config.raw)
        return Decoder(params, self.config.text, variant.biases, has_qk_norms=variant.has_qk_norms)

    def prepare(self, image: ImagePixels, geometry: Geometry) -> NoReturn:
        raise AssertionError("a model without a vision tower has no encoder stage")

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> NoReturn:
        raise AssertionError("a model without a vision tower has no encoder stage")

    def rules(self) -> tuple[Rule, ...]:
        decoder = under(decoder_rules(self.config.text), ("model.",), "decoder.")
        return (*decoder, *under([head_rule(self.config.text)], ("",), "decoder."))


def variant_of(model_type: str, config: Mapping[str, Any]) -> Variant:
    """Biases and norms of a decoder; `config` is its part of config.json."""
    if model_type == "qwen2":
        return Variant(Biases(qkv=True), False)
    if model_type in ("mistral", "ministral3"):
        return Variant(Biases(), False)
    attention = bool(config.get("attention_bias"))
    if model_type in ("qwen3", "qwen3_moe"):
        return Variant(Biases(qkv=attention, out=attention), True)
    return Variant(Biases(qkv=attention, out=attention, mlp=bool(config.get("mlp_bias"))), False)
