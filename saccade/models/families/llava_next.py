"""LLaVA-NeXT (1.6): LLaVA over tiles, whose patches are joined with a newline after each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.models.families.llava import Llava
from saccade.models.interface import ModelParts
from saccade.models.layers.forward_types import Encoding
from saccade.models.vision.preprocess import ImagePixels, cut_tiles
from saccade.models.weights import Rule, under
from saccade.types.media import Geometry, Grid, Size, Tiling


class LlavaNext(Llava):
    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts)
        self.newline = parts.params.new("newline", parts.config.text.hidden_size)

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        """The image resized to one tile, then its tiles in reading order, cut as one tall image."""
        assert geometry.tiling is not None, "the family's rules give every image tiles"
        whole = self.ops.resize(image, self.square, self.pixels.resample)
        fitted = self.ops.resize(image, geometry.resized, self.pixels.resample)
        tiles = torch.cat((whole[None], _tiles(fitted, geometry.tiling, self.square.width)))
        side = geometry.grid.w * self.layout.patch  # pixels of whole patches
        column = tiles[:, :side, :side].reshape(-1, side, 3).to(self.params.device)
        grid = Grid(1, geometry.grid.t * geometry.grid.h, geometry.grid.w)
        return self.ops.cut(column, grid, self.layout, self.pixels, self.params.dtype)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        tiles = [grid.t for grid in grids]
        features = yield from self.tower.encode(patches, sum(tiles), self.ops)
        return list(torch.split(self.projector(features), tiles))  # [tiles, patches, hidden] each

    def join(self, features: Tensor, geometry: Geometry) -> Tensor:
        assert geometry.tiling is not None, "the family's rules give every image tiles"
        # [rows, columns, hidden]
        rows = self.reduce(_joined(features[1:], geometry.tiling), geometry.tiling.joined)
        newline = self.newline.expand(len(rows), 1, -1)
        return torch.cat((features[0], torch.cat((rows, newline), dim=1).flatten(0, 1)))

    def reduce(self, rows: Tensor, size: Size) -> Tensor:
        """Interpolate to [size.height, size.width, hidden], in families with a limit on embeddings."""
        return rows

    def rules(self) -> tuple[Rule, ...]:
        return (*super().rules(), *under([Rule("image_newline", "newline")], ("model.", ""), ""))


def _tiles(fitted: Tensor, tiling: Tiling, side: int) -> Tensor:
    """uint8 [H, W, 3] centred on black, cut into [rows * columns, side, side, 3]"""
    height = tiling.rows * side - fitted.shape[0]  # of the padding
    width = tiling.columns * side - fitted.shape[1]
    top = height // 2
    left = width // 2
    return cut_tiles(F.pad(fitted, (0, 0, left, width - left, top, height - top)), tiling, side)


def _joined(tiles: Tensor, tiling: Tiling) -> Tensor:
    """[tiles, patches, hidden] -> the patches of all tiles without padding [rows, columns, hidden]"""
    side = int(tiles.shape[1] ** 0.5)
    cells = tiles.view(tiling.rows, tiling.columns, side, side, -1).transpose(1, 2)
    whole = cells.reshape(tiling.rows * side, tiling.columns * side, -1)
    top = (len(whole) - tiling.kept.height) // 2
    left = (whole.shape[1] - tiling.kept.width) // 2
    return whole[top : top + tiling.kept.height, left : left + tiling.kept.width]
