"""DeepSeek-V2: MoE with MLA or, in the smallest models, with MHA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade.checkpoint.config import TextConfig
from saccade.errors import ConfigError
from saccade.models.families.llama import Text
from saccade.models.layers.decoder import Biases, Decoder, decoder_rules, head_rule
from saccade.models.layers.mla import LATENT_RULES, LatentDecoder
from saccade.models.state_dict import Parameters
from saccade.models.weights import Rule, under


class DeepseekV2(Text):
    decoder: Any  # a LatentDecoder, or a Decoder

    def make_decoder(self, params: Parameters) -> Any:
        return make_decoder(params, self.config.text, self.config.raw)

    def rules(self) -> tuple[Rule, ...]:
        return language_rules(self.config.text, "")


def make_decoder(params: Parameters, text: TextConfig, nested: Mapping[str, Any]) -> Any:
    """`nested` is the decoder's part of config.json."""
    act = nested.get("hidden_act", "silu")
    if act != "silu":
        raise ConfigError(f"config.json asks for the activation {act!r}; decoders of this line use silu")
    if any(map(nested.get, ("attention_bias", "mlp_bias"))):
        biases = "biases (attention_bias or mlp_bias)"
        raise ConfigError(f"config.json asks for {biases}, which decoders of this line lack")
    return LatentDecoder(params, text, text.mla) if text.mla else Decoder(params, text, Biases())


def language_rules(text: TextConfig, level: str) -> tuple[Rule, ...]:
    """`level` is the prefix of the language model in a checkpoint, with a final dot."""
    mla = under(LATENT_RULES, ("layers.{}.",), "layers.{}.") if text.mla else ()
    layers = under((*mla, *decoder_rules(text)), (f"{level}model.",), "decoder.")
    return (*layers, *under([head_rule(text)], (level,), "decoder."))
