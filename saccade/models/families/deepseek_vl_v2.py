"""DeepSeek-VL2: SigLIP over tiles, a projector that merges patches, and a DeepSeek-V2 decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.settings import setting
from saccade.errors import ConfigError
from saccade.models.families.deepseek_v2 import language_rules, make_decoder
from saccade.models.interface import DecoderModel, ModelParts
from saccade.models.layers.forward_types import Encoding
from saccade.models.layers.linear import Linear
from saccade.models.state_dict import Parameters
from saccade.models.vision.blocks import vision_config
from saccade.models.vision.clip import image_size
from saccade.models.vision.preprocess import ImagePixels, PatchLayout, cut_tiles, pixel_policy
from saccade.models.vision.timm_siglip import TIMM_SIGLIP_RULES, TimmSiglip
from saccade.models.weights import Rule, under
from saccade.types.media import Geometry, Grid, Size

_PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # defaults of processor_config.json


class DeepseekVL2(DecoderModel):
    decoder: Any  # a LatentDecoder, or a Decoder

    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts)
        config = parts.config
        params = parts.params
        raw = config.raw
        vision = vision_config(config)
        pixels = {**_PIXELS, **parts.image_processor}
        self.pixels = pixel_policy(pixels)
        self.grey = [int(level * 255) for level in pixels["image_mean"]]  # padding
        self.square = Size(image_size(vision), image_size(vision))
        self.layout = PatchLayout(vision.patch_size)
        self.has_whole_first = raw.get("global_view_pos", "head") == "head"
        self.tower = TimmSiglip(params.within("vision"), vision)
        self.projector = Projector(params.within("projector"), setting(raw, "projector_config", {}), config)
        self.newline = params.new("newline", config.text.hidden_size)
        self.separator = params.new("separator", config.text.hidden_size)
        nested = setting(raw, "language_config", {})
        self.decoder = make_decoder(params.within("decoder"), config.text, nested)

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        """The whole image on one tile, then its tiles in reading order, cut as one tall image."""
        assert geometry.tiling is not None, "the family's rules give every image tiles"
        source = Size(image.shape[1], image.shape[0])
        side = self.square.width
        canvas = Size(geometry.tiling.columns * side, geometry.tiling.rows * side)
        whole = self._padded(image, source.inside(self.square), self.square)
        padded = self._padded(image, geometry.resized, canvas)
        tiles = torch.cat((whole[None], cut_tiles(padded, geometry.tiling, side)))
        span = geometry.grid.w * self.layout.patch  # pixels of whole patches
        column = tiles[:, :span, :span].reshape(-1, span, 3).to(self.params.device)
        grid = Grid(1, geometry.grid.t * geometry.grid.h, geometry.grid.w)
        return self.ops.cut(column, grid, self.layout, self.pixels, self.params.dtype)

    def _padded(self, image: ImagePixels, size: Size, canvas: Size) -> Tensor:
        """The image in this size, centred on a grey canvas, with Pillow's rounding of halves."""
        small = self.ops.resize(image, size, self.pixels.resample)
        if size == canvas:
            return small
        left = round((canvas.width - size.width) * 0.5)
        top = round((canvas.height - size.height) * 0.5)
        grey = torch.tensor(self.grey, dtype=torch.uint8, device=small.device)
        whole = grey.expand(canvas.height, canvas.width, 3).clone()
        whole[top : top + size.height, left : left + size.width] = small
        return whole

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        tiles = [grid.t for grid in grids]
        features = yield from self.tower.encode(patches, sum(tiles), self.ops)
        return list(torch.split(self.projector(features), tiles))  # [tiles, tokens of one, hidden] each

    def join(self, features: Tensor, geometry: Geometry) -> Tensor:
        """Both views with a newline after each row, and the separator between them."""
        tiling = geometry.tiling
        assert tiling is not None, "the family's rules give every image tiles"
        whole = self._rows_with_newlines(features[:1], 1, 1)
        tiles = self._rows_with_newlines(features[1:], tiling.rows, tiling.columns)
        between = self.separator[None]
        return torch.cat((whole, between, tiles) if self.has_whole_first else (tiles, between, whole))

    def _rows_with_newlines(self, tiles: Tensor, rows: int, columns: int) -> Tensor:
        """[rows * columns, tokens, hidden] -> [slots, hidden]: rows across all tiles, each with a newline."""
        side = int(tiles.shape[1] ** 0.5)
        by_row = tiles.view(rows, columns, side, side, -1).transpose(1, 2)
        cells = by_row.reshape(rows * side, columns * side, -1)
        return torch.cat((cells, self.newline.expand(len(cells), 1, -1)), dim=1).flatten(0, 1)

    def rules(self) -> tuple[Rule, ...]:
        return (
            *language_rules(self.config.text, "language."),
            *under(TIMM_SIGLIP_RULES, ("vision.",), "vision."),
            Rule("projector.layers.{}.*", "projector.{}.*"),
            Rule("image_newline", "newline"),
            Rule("view_seperator", "separator"),  # the checkpoints' own spelling
        )


class Projector:
    """Concatenates squares of patches, padded with zeros, then an MLP to the decoder's width."""

    def __init__(self, params: Parameters, projector: Mapping[str, Any], config: ModelConfig) -> None:
        self.merge = vision_config(config).spatial_merge_size
        tower = vision_config(config).hidden_size
        width = projector.get("n_embed", 2048)
        depth = projector.get("depth", 2)
        _check(projector, tower, config.text.hidden_size)
        wide = width * projector.get("mlp_ratio", 1)
        sizes = [tower * self.merge**2, *[wide] * (depth - 1), width]
        # Activations count as layers in checkpoints, so linear layers have even numbers.
        pairs = enumerate(pairwise(sizes))
        self.layers = [Linear(params.within(2 * i), *pair, bias=True) for i, pair in pairs]

    def __call__(self, features: Tensor) -> Tensor:
        """[squares, patches, width] -> [squares, tokens, hidden]"""
        first, *later = self.layers
        x = first(self._merged(features))
        for layer in later:
            x = layer(F.gelu(x))
        return x

    def _merged(self, features: Tensor) -> Tensor:
        """A token's patches as one row, channel by channel (F.unfold)."""
        squares, patches, width = features.shape
        side = int(patches**0.5)
        merge = self.merge
        padding = -side % merge
        cells = F.pad(features.view(squares, side, side, width), (0, 0, 0, padding, 0, padding))
        tokens = (side + padding) // merge
        blocks = cells.view(squares, tokens, merge, tokens, merge, width).permute(0, 1, 3, 5, 2, 4)
        return blocks.reshape(squares, tokens**2, -1)


def _check(projector: Mapping[str, Any], tower: int, hidden: int) -> None:
    kind = projector.get("projector_type", "downsample_mlp_gelu")
    if kind != "downsample_mlp_gelu" or projector.get("token_pooling"):
        pooling = " with token_pooling" if projector.get("token_pooling") else ""
        names = "known is downsample_mlp_gelu"
        raise ConfigError(f"a projector of type {kind!r}{pooling} is not supported; {names}")
    inputs = projector.get("input_dim", 1152)
    outputs = projector.get("n_embed", 2048)
    depth = projector.get("depth", 2)
    if (inputs, outputs) != (tower, hidden) or depth < 2:
        raise ConfigError(
            f"projector_config goes from {inputs} to {outputs} values in {depth} steps, but the tower gives "
            f"{tower}, the decoder takes {hidden}, and two are least"
        )
