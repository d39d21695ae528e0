"""dots.ocr: Qwen2's decoder, and a tower like Qwen2-VL's with RMS norms, gated MLPs and a norm at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from saccade.checkpoint.config import VisionConfig
from saccade.models.families import qwen2_vl
from saccade.models.families.qwen2_vl import MERGER_RULES, Merger, Qwen2VL
from saccade.models.layers.decoder import decoder_rules, head_rule
from saccade.models.layers.forward_types import Encoding
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import PatchLinear
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import VisionOps, run_blocks
from saccade.models.vision.blocks import VisionBlock, rotary_dim
from saccade.models.weights import Rule, under
from saccade.types.media import Grid


class DotsOCR(Qwen2VL):
    def make_tower(self, params: Parameters, vision: VisionConfig) -> Tower:
        return Tower(params, vision, self.config.text.hidden_size, self.config.raw["vision_config"])

    def rules(self) -> tuple[Rule, ...]:
        text = (*under(decoder_rules(self.config.text), ("model.",), ""), head_rule(self.config.text))
        return (*under(text, ("",), "decoder."), *under(_TOWER_RULES, ("vision_tower.",), "vision."))


class Tower(qwen2_vl.Tower):
    def __init__(
        self, params: Parameters, vision: VisionConfig, outputs: int, raw: Mapping[str, Any]
    ) -> None:
        eps = raw.get("rms_norm_eps", 1e-5)
        bias = raw.get("use_bias", False)
        width = vision.hidden_size
        self.head_dim = rotary_dim(vision)
        self.theta = 10000.0
        self.merge = vision.spatial_merge_size
        kernel = (vision.in_channels, vision.patch_size, vision.patch_size)
        self.patch = PatchLinear(params.within("patch"), kernel, width, bias=True)
        self.patch_norm = RMSNorm(params.within("patch_norm"), width, eps)
        self.blocks = [
            VisionBlock(block, vision, eps=eps, is_qkv_fused=True, norm=RMSNorm, has_bias=bias)
            for block in params.each("blocks", vision.num_layers)
        ]
        self.last_norm = RMSNorm(params.within("norm"), width, eps) if raw.get("post_norm", True) else None
        self.merger = Merger(params.within("merger"), vision, outputs)

    def encode(self, patches: Tensor, grids: Sequence[Grid], ops: VisionOps) -> Encoding:
        run = self.begin(grids, ops, patches.device)
        x = self.patch_norm(self.patch(patches))
        del patches  # or they would stay alive until the last layer
        x = yield from run_blocks(run, self.blocks, x)
        return self.split(self.merger(self.last_norm(x) if self.last_norm else x), grids)


_TOWER_RULES = (
    Rule("patch_embed.patchifier.proj.*", "patch.*"),
    Rule("patch_embed.patchifier.norm.weight", "patch_norm.weight"),
    Rule("blocks.{}.norm1.weight", "blocks.{}.attention_norm.weight"),
    Rule("blocks.{}.attn.qkv.*", "blocks.{}.qkv.*"),
    Rule("blocks.{}.attn.proj.*", "blocks.{}.out.*"),
    Rule("blocks.{}.norm2.weight", "blocks.{}.mlp_norm.weight"),
    Rule("blocks.{}.mlp.fc1.*", "blocks.{}.up.gate.*"),
    Rule("blocks.{}.mlp.fc3.*", "blocks.{}.up.up.*"),
    Rule("blocks.{}.mlp.fc2.*", "blocks.{}.down.*"),
    Rule("post_trunk_norm.weight", "norm.weight"),
    *MERGER_RULES,
)
