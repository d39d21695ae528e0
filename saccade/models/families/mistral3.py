"""Mistral 3 and Ministral 3: Pixtral's tower with a patch merger before the projector."""

from __future__ import annotations

from torch import Tensor

from saccade.checkpoint.config import VisionConfig
from saccade.errors import ConfigError
from saccade.models.families.llava import PROJECTOR_RULES, Projector
from saccade.models.families.pixtral import LlavaPixtral
from saccade.models.layers.decoder import Biases, Decoder
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.state_dict import Parameters
from saccade.models.weights import Rule


class Mistral3(LlavaPixtral):
    def make_decoder(self, params: Parameters) -> Decoder:
        if self.config.text.model_type != "ministral3":
            return super().make_decoder(params)
        return Decoder(params, self.config.text, Biases())

    def make_projector(self, params: Parameters, vision: VisionConfig) -> Projector:
        if self.tower.width != vision.hidden_size:
            layers = self.config.raw["vision_feature_layer"]
            only = "patches of one layer alone can be merged"
            raise ConfigError(f"vision_feature_layer is {layers}, but {only}")
        return MergingProjector(params, vision, self)

    def projector_rules(self) -> tuple[Rule, ...]:
        merging = Rule("patch_merger.merging_layer.weight", "merge.weight")
        return (Rule("norm.weight", "norm.weight"), merging, *PROJECTOR_RULES)


class MergingProjector(Projector):
    def __init__(self, params: Parameters, vision: VisionConfig, model: Mistral3) -> None:
        text = model.config.text
        width = vision.hidden_size
        raw = {"multimodal_projector_bias": False, **model.config.raw}
        super().__init__(params, width, text.hidden_size, raw)
        self.patches = vision.spatial_merge_size**2  # of one token
        self.norm = RMSNorm(params.within("norm"), width, text.rms_norm_eps)
        self.merge = Linear(params.within("merge"), width * self.patches, width)

    def __call__(self, features: Tensor) -> Tensor:
        """[patches, width] with the patches of a token adjacent -> [tokens, hidden]"""
        squares = self.norm(features).view(-1, self.patches, features.shape[1])
        channel_first = squares.transpose(1, 2).flatten(1)  # as F.unfold orders them
        return super().__call__(self.merge(channel_first))
