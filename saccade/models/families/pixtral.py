"""Pixtral: a vision tower for images of any size with 2-D RoPE, and LLaVA with this tower."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.checkpoint.config import VisionConfig
from saccade.checkpoint.settings import setting
from saccade.models.families.llava import PROJECTOR_LEVELS, PROJECTOR_RULES, Projector, decoder_biases
from saccade.models.interface import DecoderModel, ModelParts
from saccade.models.layers.decoder import Decoder, decoder_rules, head_rule
from saccade.models.layers.forward_types import Encoding
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import PatchLinear
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import VisionOps, run_blocks_keeping
from saccade.models.vision.blocks import VisionBlock, grid_positions, rotary_dim, vision_config
from saccade.models.vision.clip import drops_first, feature_layers, no_class_token
from saccade.models.vision.preprocess import PatchLayout
from saccade.models.weights import Rule, under
from saccade.types.media import Grid

_EPS = 1e-5  # of the tower's norms; not in the config


class LlavaPixtral(DecoderModel):
    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts)
        params = parts.params
        vision = vision_config(parts.config)
        self.layout = PatchLayout(vision.patch_size, vision.spatial_merge_size)
        self.tower = PixtralTower(params.within("vision"), vision, parts.config.raw)
        self.projector = self.make_projector(params.within("projector"), vision)
        self.decoder = self.make_decoder(params.within("decoder"))

    def make_decoder(self, params: Parameters) -> Decoder:
        return Decoder(params, self.config.text, decoder_biases(self.config.text, self.config.raw))

    def make_projector(self, params: Parameters, vision: VisionConfig) -> Projector:
        if drops_first(self.config.raw):
            raise no_class_token("Pixtral")
        return Projector(params, self.tower.width, self.config.text.hidden_size, self.config.raw)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        features = yield from self.tower.encode(patches, grids, self.ops)
        slots = [grid.patches // self.layout.merge**2 for grid in grids]
        return list(torch.split(self.projector(features), slots))

    def rules(self) -> tuple[Rule, ...]:
        text = self.config.text
        return (
            *under(decoder_rules(text), ("model.language_model.", "language_model.model."), "decoder."),
            *under([head_rule(text)], ("", "language_model."), "decoder."),
            *under(self.tower.rules(), ("model.vision_tower.", "vision_tower."), "vision."),
            *under(self.projector_rules(), PROJECTOR_LEVELS, "projector."),
        )

    def projector_rules(self) -> tuple[Rule, ...]:
        return PROJECTOR_RULES


class PixtralTower:
    """Runs up to the last layer whose output is used. Patches that merge into one token are adjacent."""

    def __init__(self, params: Parameters, vision: VisionConfig, raw: Mapping[str, Any]) -> None:
        self.features = feature_layers({"vision_feature_layer": -1, **raw}, vision.num_layers)
        self.num_layers = vision.num_layers
        self.merge = vision.spatial_merge_size
        self.width = vision.hidden_size * len(self.features)
        self.head_dim = rotary_dim(vision)
        theta = setting(raw["vision_config"], "rope_theta", 10000.0)
        self.theta = float(setting(setting(raw["vision_config"], "rope_parameters", {}), "rope_theta", theta))
        kernel = (vision.in_channels, vision.patch_size, vision.patch_size)
        self.patch = PatchLinear(params.within("patch"), kernel, vision.hidden_size)
        self.norm = RMSNorm(params.within("norm"), vision.hidden_size, _EPS)
        self.blocks = [
            VisionBlock(block, vision, eps=_EPS, is_qkv_fused=False, norm=RMSNorm, has_bias=False)
            for block in params.each("blocks", max(self.features))
        ]

    def encode(self, patches: Tensor, grids: Sequence[Grid], ops: VisionOps) -> Generator[int, None, Tensor]:
        """[patches, patch_dim] -> features [patches, width]; yields after each layer."""
        device = patches.device
        positions = grid_positions(grids, self.head_dim, self.theta, self.merge, device, interleaved=True)
        run = ops.begin([grid.patches for grid in grids], positions, device)
        x = self.norm(self.patch(patches))
        del patches  # or they would stay alive until the last layer
        outputs = yield from run_blocks_keeping(run, self.blocks, x, self.features)
        return torch.cat(outputs, dim=-1)

    def rules(self) -> tuple[Rule, ...]:
        unused = (f"transformer.layers.{i}." for i in range(len(self.blocks), self.num_layers))
        ignored = [Rule(level + rule.source, None) for level in unused for rule in _BLOCK_RULES]
        blocks = under(_BLOCK_RULES, ("transformer.layers.{}.",), "blocks.{}.")
        inputs = (Rule("patch_conv.weight", "patch.weight"), Rule("ln_pre.weight", "norm.weight"))
        return (*ignored, *blocks, *inputs)


_BLOCK_RULES = (
    Rule("attention_norm.weight", "attention_norm.weight"),
    Rule("attention.q_proj.weight", "qkv.q.weight"),
    Rule("attention.k_proj.weight", "qkv.k.weight"),
    Rule("attention.v_proj.weight", "qkv.v.weight"),
    Rule("attention.o_proj.weight", "out.weight"),
    Rule("ffn_norm.weight", "mlp_norm.weight"),
    Rule("feed_forward.gate_proj.weight", "up.gate.weight"),
    Rule("feed_forward.up_proj.weight", "up.up.weight"),
    Rule("feed_forward.down_proj.weight", "down.weight"),
)
