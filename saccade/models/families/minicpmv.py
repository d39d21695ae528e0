"""MiniCPM-V: SigLIP for views of any size, a resampler for each view, and the decoder of Qwen or Llama."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import VisionConfig
from saccade.checkpoint.settings import setting
from saccade.models.families.llama import variant_of
from saccade.models.interface import DecoderModel, ModelParts
from saccade.models.layers.decoder import Decoder, decoder_rules, head_rule
from saccade.models.layers.forward_types import Encoding
from saccade.models.layers.layernorm import LayerNorm
from saccade.models.layers.linear import PatchLinear
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import VisionOps, run_blocks
from saccade.models.vision.blocks import VisionBlock, vision_config
from saccade.models.vision.clip import BLOCK_RULES
from saccade.models.vision.preprocess import ImagePixels, PatchLayout, pixel_policy
from saccade.models.vision.resampler import RESAMPLER_END_RULES, RESAMPLER_RULES, Resampler
from saccade.models.weights import Rule, under
from saccade.types.media import Geometry, Grid, Size
from saccade.util.torch_utils import to_device

_HALF = [0.5] * 3  # mean and deviation where preprocessor_config.json is silent


class MiniCPMV(DecoderModel):
    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts)
        config = parts.config
        params = parts.params
        vision = vision_config(config)
        tower = config.raw["vision_config"]
        mean, std = (setting(parts.image_processor, name, _HALF) for name in ("norm_mean", "norm_std"))
        self.pixels = pixel_policy({"image_mean": mean, "image_std": std})
        self.layout = PatchLayout(vision.patch_size)
        self.tower = Tower(params.within("vision"), vision, tower)
        widths = (vision.hidden_size, config.text.hidden_size)
        self.resampler = WaveResampler(params.within("resampler"), *widths, tower["n_queries"])
        variant = variant_of(config.text.model_type, config.raw["text_config"])
        decoder = params.within("decoder")
        self.decoder = Decoder(decoder, config.text, variant.biases, has_qk_norms=variant.has_qk_norms)

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        """Patches of the whole image, then of each slice in reading order."""
        whole = self._patches(image, geometry.overview or geometry.resized)
        if geometry.tiling is None:
            return whole
        columns, rows, *_ = geometry.tiling
        return torch.cat((whole, self._patches(image, geometry.resized, columns, rows)))

    def _patches(self, image: ImagePixels, size: Size, columns: int = 1, rows: int = 1) -> Tensor:
        """Of the image in this size, cut into views that are stacked as one tall image."""
        small = self.ops.resize(image, size, self.pixels.resample)
        width = size.width // columns
        views = small.view(rows, size.height // rows, columns, width, 3).transpose(1, 2)
        tall = views.reshape(-1, width, 3).to(self.params.device)
        grid = Grid(1, len(tall) // self.layout.patch, width // self.layout.patch)
        return self.ops.cut(tall, grid, self.layout, self.pixels, self.params.dtype)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        """Each frame of a grid is a view."""
        views = [grid._replace(t=1) for grid in grids for _ in range(grid.t)]
        layers = self.tower.encode(patches, views, self.ops)
        del patches  # the tower drops it after the patch embedding; no other reference may stay
        features = yield from layers
        # One by one: the resampler is several times as wide as the tower.
        parts = torch.split(features, [view.patches for view in views])
        embeddings = iter([self.resampler(part, [view])[0] for part, view in zip(parts, views, strict=True)])
        return [torch.cat(list(islice(embeddings, grid.t))) for grid in grids]

    def encode_images(self, patches: Tensor, geometries: Sequence[Geometry]) -> Encoding:
        views = [views_of(geometry, self.layout.patch) for geometry in geometries]
        layers = self.encode(patches, list(chain(*views)))
        del patches
        embeddings = iter((yield from layers))
        return [torch.cat(list(islice(embeddings, len(own)))) for own in views]

    def rules(self) -> tuple[Rule, ...]:
        text = self.config.text
        return (
            *under(decoder_rules(text), ("llm.model.",), "decoder."),
            *under([head_rule(text)], ("llm.",), "decoder."),
            *under(_TOWER_RULES, ("vpm.",), "vision."),
            *under((*RESAMPLER_RULES, *RESAMPLER_END_RULES), ("resampler.",), "resampler."),
        )


def views_of(geometry: Geometry, patch: int) -> list[Grid]:
    """The whole image, and its slices as one grid: they have one size."""
    whole = geometry.overview or geometry.resized
    views = [Grid(1, whole.height // patch, whole.width // patch)]
    if geometry.tiling is not None:
        columns, rows, kept, _ = geometry.tiling
        views.append(Grid(columns * rows, kept.height // rows, kept.width // columns))
    return views


class Tower:
    """SigLIP whose learned positions lie on a fine square grid, from which a view of any size takes some."""

    def __init__(self, params: Parameters, vision: VisionConfig, raw: Mapping[str, Any]) -> None:
        eps = raw.get("layer_norm_eps", 1e-6)
        kernel = (vision.in_channels, vision.patch_size, vision.patch_size)
        self.patch = PatchLinear(params.within("patch"), kernel, vision.hidden_size, bias=True)
        places = raw["num_position_embeddings"]
        self.side = int(places**0.5)
        self.positions = params.new("positions.weight", places, vision.hidden_size)
        blocks = params.each("blocks", vision.num_layers)
        self.blocks = [VisionBlock(block, vision, eps=eps, is_qkv_fused=False) for block in blocks]
        self.norm = LayerNorm(params.within("norm"), vision.hidden_size, eps)

    def encode(self, patches: Tensor, views: Sequence[Grid], ops: VisionOps) -> Generator[int, None, Tensor]:
        """Packed patches -> [patches, hidden]; yields after each layer."""
        device = patches.device
        places = torch.cat([_places(view, self.side) for view in views])
        run = ops.begin([view.patches for view in views], None, device)
        x = self.patch(patches).add_(F.embedding(to_device(places, device), self.positions))
        del patches  # or they would stay alive until the last layer
        x = yield from run_blocks(run, self.blocks, x)
        return self.norm(x)


@lru_cache(maxsize=64)
def _places(view: Grid, side: int) -> Tensor:
    """The learned position of each patch of a view: int64 [patches], on the CPU."""
    rows, columns = (_spread(count, side) for count in (view.h, view.w))
    return (rows[:, None] * side + columns).flatten()


def _spread(count: int, side: int) -> Tensor:
    """The place among `side` of each of `count`. In float32, whose rounding decides at the borders."""
    step = (1 / torch.tensor(count)).item()
    borders = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(torch.arange(0, 1 - 1e-6, step), borders, right=True)


class WaveResampler(Resampler):
    """Keys get sines and cosines of their column, then of their row."""

    def key_positions(self, grids: Sequence[Grid], like: Tensor) -> Tensor:
        return torch.cat([_waves(grid, like) for grid in grids])


def _waves(grid: Grid, like: Tensor) -> Tensor:
    """[patches, width]"""
    quarter = like.shape[1] // 4
    speeds = 10000.0 ** -(torch.arange(quarter, device=like.device) / quarter)
    rows, columns = (_wave(side, speeds) for side in (grid.h, grid.w))
    cells = (columns.expand(grid.h, -1, -1), rows[:, None].expand(-1, grid.w, -1))
    return torch.cat(cells, dim=-1).flatten(0, 1).to(like.dtype)


def _wave(count: int, speeds: Tensor) -> Tensor:
    angles = torch.arange(count, device=speeds.device)[:, None] * speeds
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


_TOWER_RULES = (
    Rule("embeddings.patch_embedding.*", "patch.*"),
    Rule("embeddings.position_embedding.weight", "positions.weight"),
    *under(BLOCK_RULES, ("encoder.layers.{}.",), "blocks.{}."),
    Rule("post_layernorm.*", "norm.*"),
)
