"""Qwen3.5: Qwen3-VL's tower, and a hybrid decoder of gated delta nets and gated attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.errors import ConfigError
from saccade.models.families.qwen3_vl import Qwen3VL
from saccade.models.layers.decoder import decoder_rules
from saccade.models.layers.forward_types import Attention, States
from saccade.models.layers.hybrid_decoder import HybridDecoder
from saccade.models.state_dict import Parameters
from saccade.models.weights import Rule, under


class Qwen3_5(Qwen3VL):
    decoder: Any  # a HybridDecoder

    def make_decoder(self, params: Parameters) -> Any:
        linear = self.config.text.linear
        if linear is None:
            raise ConfigError("config.json names no linear_attention layers, which this family is made of")
        if linear.value_heads % linear.key_heads:
            shared = f"{linear.key_heads} key heads"
            raise ConfigError(f"{linear.value_heads} value heads of linear attention cannot share {shared}")
        return HybridDecoder(params, self.config.text, linear)

    def forward(
        self, embeds: Tensor, positions: Tensor, attention: Attention, states: States | None = None
    ) -> Tensor:
        assert states is not None, "layers of this model carry states from window to window"
        hidden: Tensor = self.decoder.forward(embeds, positions, attention, states)
        return hidden

    def rules(self) -> tuple[Rule, ...]:
        names = {
            **{f"in_proj_{part}.*": f"inputs.{part}.*" for part in ("qkv", "z", "b", "a")},
            "conv1d.weight": "conv.weight",
            "A_log": "decay",
            "dt_bias": "decay_bias",
            "norm.weight": "norm.weight",
            "out_proj.*": "out.*",
        }
        inner = [Rule(name, ours) for name, ours in names.items()]
        linear = under(inner, ("layers.{}.linear_attn.",), "layers.{}.linear.")
        mtp = [Rule(f"mtp.{rule.source}", None) for rule in decoder_rules(self.config.text)]
        extra = ("fc", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
        mtp += [Rule(f"mtp.{name}.weight", None) for name in extra]
        return (*super().rules(), *under(linear, ("model.language_model.", "model."), "decoder."), *mtp)
