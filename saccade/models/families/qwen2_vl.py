"""Qwen2-VL: a tower for images of any size with 2-D RoPE and a 2x2 merger, and a decoder with M-RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import ModelConfig, VisionConfig
from saccade.checkpoint.settings import setting
from saccade.models.interface import DecoderModel, ModelParts
from saccade.models.layers.decoder import Biases, Decoder, decoder_rules, head_rule
from saccade.models.layers.forward_types import Encoding
from saccade.models.layers.layernorm import LayerNorm, RMSNorm
from saccade.models.layers.linear import Linear, PatchLinear
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import RunBlocks, VisionOps, run_blocks
from saccade.models.vision.blocks import VisionBlock, grid_positions, rotary_dim, vision_config
from saccade.models.vision.preprocess import ImagePixels, PatchLayout, Pixels
from saccade.models.weights import Rule, under
from saccade.types.media import Geometry, Grid

EPS = 1e-6  # of the tower's norms; not in the config


class Qwen2VL(DecoderModel):
    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts)
        vision = vision_config(parts.config)
        self.layout = PatchLayout(vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        self.tower = self.make_tower(parts.params.within("vision"), vision)
        self.decoder = self.make_decoder(parts.params.within("decoder"))

    def make_tower(self, params: Parameters, vision: VisionConfig) -> VisionTower:
        return Tower(params, vision, self.config.text.hidden_size, vision_theta(self.config))

    def make_decoder(self, params: Parameters) -> Decoder:
        return Decoder(params, self.config.text, Biases(qkv=True))

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        if isinstance(image, np.ndarray | Tensor) and image.ndim == 4:
            return self._prepare_group(image, geometry)
        return super().prepare(image, geometry)

    def _prepare_group(self, frames: Pixels | Tensor, geometry: Geometry) -> Tensor:
        """Patches over all frames of a group; missing frames repeat the last one."""
        shape = (geometry.grid.patches, 3, self.layout.frames, self.layout.patch**2)
        patches = torch.empty(shape, dtype=self.params.dtype, device=self.params.device)
        layout = self.layout._replace(frames=1)
        for index, frame in enumerate(frames):
            small = self.ops.resize(frame, geometry.resized, self.pixels.resample).to(self.params.device)
            cut = self.ops.cut(small, geometry.grid, layout, self.pixels, self.params.dtype)
            patches[:, :, index:] = cut.view(len(cut), 3, 1, -1)
        return patches.flatten(1)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        return self.tower.encode(patches, grids, self.ops)

    def rules(self) -> tuple[Rule, ...]:
        decoder = under(decoder_rules(self.config.text), ("model.language_model.", "model."), "decoder.")
        head = under([head_rule(self.config.text)], ("",), "decoder.")
        return (*decoder, *head, *under(self.tower_rules(), ("model.visual.", "visual."), "vision."))

    def tower_rules(self) -> tuple[Rule, ...]:
        mlp = (Rule("blocks.{}.mlp.fc1.*", "blocks.{}.up.*"), Rule("blocks.{}.mlp.fc2.*", "blocks.{}.down.*"))
        return (*COMMON_TOWER_RULES, *mlp, *MERGER_RULES)


class VisionTower(Protocol):
    def encode(self, patches: Tensor, grids: Sequence[Grid], ops: VisionOps) -> Encoding: ...


class Tower:
    norm: type[LayerNorm] | type[RMSNorm] = LayerNorm
    has_patch_bias = False

    def __init__(self, params: Parameters, vision: VisionConfig, outputs: int, theta: float) -> None:
        self.head_dim = rotary_dim(vision)
        self.theta = theta
        self.merge = vision.spatial_merge_size
        kernel = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        self.patch = PatchLinear(params.within("patch"), kernel, vision.hidden_size, bias=self.has_patch_bias)
        blocks = params.each("blocks", vision.num_layers)
        self.blocks = [
            VisionBlock(block, vision, eps=EPS, is_qkv_fused=True, norm=self.norm) for block in blocks
        ]
        self.merger = Merger(params.within("merger"), vision, outputs, self.norm)

    def encode(self, patches: Tensor, grids: Sequence[Grid], ops: VisionOps) -> Encoding:
        run = self.begin(grids, ops, patches.device)
        x = self.patch(patches)
        del patches  # or they would stay alive until the last layer
        x = yield from run_blocks(run, self.blocks, x)
        return self.split(self.merger(x), grids)

    def begin(self, grids: Sequence[Grid], ops: VisionOps, device: torch.device) -> RunBlocks:
        """A pass whose attention stays inside a frame."""
        positions = grid_positions(grids, self.head_dim, self.theta, self.merge, device)
        return ops.begin(frame_lengths(grids), positions, device)

    def split(self, embeddings: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        return list(torch.split(embeddings, [grid.patches // self.merge**2 for grid in grids]))


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """Patches of each frame."""
    return [grid.h * grid.w for grid in grids for _ in range(grid.t)]


class Merger:
    """2x2 patches become one embedding of the decoder's width."""

    def __init__(
        self,
        params: Parameters,
        vision: VisionConfig,
        outputs: int,
        norm: type[LayerNorm] | type[RMSNorm] = LayerNorm,
        *,
        is_norm_merged: bool = False,
    ) -> None:
        merged = vision.hidden_size * vision.spatial_merge_size**2
        self.norm = norm(params.within("norm"), merged if is_norm_merged else vision.hidden_size, EPS)
        self.up = Linear(params.within("up"), merged, merged, bias=True)
        self.down = Linear(params.within("down"), merged, outputs, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        # `patchify` made the patches of a token adjacent, so merging is a reshape.
        normed = self.norm(x.view(-1, *self.norm.weight.shape))
        return self.down(F.gelu(self.up(normed.view(-1, self.up.weight.shape[1]))))


def vision_theta(config: ModelConfig) -> float:
    rope = setting(config.raw["vision_config"], "rope_parameters", {})
    return float(rope.get("rope_theta", 10000.0))


COMMON_TOWER_RULES = (
    Rule("patch_embed.proj.*", "patch.*"),
    Rule("blocks.{}.norm1.*", "blocks.{}.attention_norm.*"),
    Rule("blocks.{}.attn.qkv.*", "blocks.{}.qkv.*"),
    Rule("blocks.{}.attn.proj.*", "blocks.{}.out.*"),
    Rule("blocks.{}.norm2.*", "blocks.{}.mlp_norm.*"),
    Rule("rotary_pos_emb.inv_freq", None),
)
MERGER_RULES = (
    Rule("merger.ln_q.*", "merger.norm.*"),
    Rule("merger.mlp.0.*", "merger.up.*"),
    Rule("merger.mlp.2.*", "merger.down.*"),
)
