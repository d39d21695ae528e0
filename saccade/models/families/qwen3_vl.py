"""Qwen3-VL: a tower with learned positions beside RoPE, and deepstack features for the decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import VisionConfig
from saccade.checkpoint.settings import setting
from saccade.errors import ConfigError
from saccade.models.families import qwen2_vl
from saccade.models.families.qwen2_vl import COMMON_TOWER_RULES, Merger, Qwen2VL, vision_theta
from saccade.models.layers.decoder import Biases, Decoder
from saccade.models.layers.forward_types import Encoding
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import VisionOps, run_blocks
from saccade.models.vision.blocks import by_token
from saccade.models.weights import Rule, under
from saccade.types.media import Grid


class Qwen3VL(Qwen2VL):
    """An image embedding is 1 + n concatenated vectors: the first is the decoder's input, the others are
    added after its layers 0 to n - 1. Text has zeros there.
    """

    def make_tower(self, params: Parameters, vision: VisionConfig) -> Tower:
        positions = int(setting(self.config.raw["vision_config"], "num_position_embeddings", 2304))
        return Tower(params, vision, self.config.text.hidden_size, vision_theta(self.config), positions)

    def make_decoder(self, params: Parameters) -> Decoder:
        text = self.config.text
        if text.num_deepstack > text.num_layers:
            layers = f"deepstack_visual_indexes names {text.num_deepstack} layers"
            raise ConfigError(f"{layers}, the decoder has {text.num_layers}")
        has_bias = bool(setting(self.config.raw, "text_config", {}).get("attention_bias", False))
        return Decoder(params, text, Biases(qkv=has_bias, out=has_bias), has_qk_norms=True)

    def tower_rules(self) -> tuple[Rule, ...]:
        names = {"norm": "norm", "linear_fc1": "up", "linear_fc2": "down"}
        merger = tuple(Rule(f"{name}.*", f"{ours}.*") for name, ours in names.items())
        return (
            *COMMON_TOWER_RULES,
            Rule("pos_embed.weight", "positions.table"),
            Rule("blocks.{}.mlp.linear_fc1.*", "blocks.{}.up.*"),
            Rule("blocks.{}.mlp.linear_fc2.*", "blocks.{}.down.*"),
            *under(merger, ("merger.",), "merger."),
            *under(merger, ("deepstack_merger_list.{}.",), "deep.{}."),
        )


class Tower(qwen2_vl.Tower):
    has_patch_bias = True

    def __init__(
        self, params: Parameters, vision: VisionConfig, outputs: int, theta: float, positions: int
    ) -> None:
        super().__init__(params, vision, outputs, theta)
        self.outputs = outputs
        self.deepstack_layers = sorted(vision.deepstack_layers)
        self.positions = Positions(params.within("positions"), positions, vision.hidden_size)
        deep = params.each("deep", len(self.deepstack_layers))
        self.deepstack_mergers = [Merger(inner, vision, outputs, is_norm_merged=True) for inner in deep]

    def encode(self, patches: Tensor, grids: Sequence[Grid], ops: VisionOps) -> Encoding:
        run = self.begin(grids, ops, patches.device)
        x = self.patch(patches)
        del patches  # or they would stay alive until the last layer
        self.positions.add_to(x, grids, self.merge)
        embeddings = x.new_empty(0)
        first = 0
        for index, layer in enumerate(self.deepstack_layers):
            x = yield from run_blocks(run, self.blocks[first : layer + 1], x)
            if not len(embeddings):  # allocated when needed
                tokens = len(x) // self.merge**2
                embeddings = x.new_empty(tokens, self.outputs * (1 + len(self.deepstack_layers)))
            self._part(embeddings, 1 + index).copy_(self.deepstack_mergers[index](x))
            first = layer + 1
        x = yield from run_blocks(run, self.blocks[first:], x)
        if not self.deepstack_layers:
            return self.split(self.merger(x), grids)
        self._part(embeddings, 0).copy_(self.merger(x))
        return self.split(embeddings, grids)

    def _part(self, embeddings: Tensor, index: int) -> Tensor:
        return embeddings[:, index * self.outputs : (index + 1) * self.outputs]


class Positions:
    """Learned position embeddings on a square grid, interpolated to an image's grid."""

    def __init__(self, params: Parameters, count: int, hidden: int) -> None:
        self.side = math.isqrt(count)
        if self.side**2 != count:
            raise ConfigError(f"vision_config: num_position_embeddings={count} is not the area of a square")
        self.table = params.new("table", count, hidden)

    def add_to(self, x: Tensor, grids: Sequence[Grid], merge: int) -> None:
        """x [patches of all images, hidden], in place; all frames have the same positions."""
        for rows, grid in zip(torch.split(x, [grid.patches for grid in grids]), grids, strict=True):
            rows.view(grid.t, grid.h * grid.w, -1).add_(by_token(self.interpolated(grid), merge))

    def interpolated(self, grid: Grid) -> Tensor:
        """[h, w, hidden]: bilinear, with aligned corners."""
        square = self.table.view(1, self.side, self.side, -1).permute(0, 3, 1, 2)  # [1, hidden, side, side]
        spread = F.interpolate(square, (grid.h, grid.w), mode="bilinear", align_corners=True)
        return spread[0].permute(1, 2, 0).contiguous()
