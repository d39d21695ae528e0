"""Llama 3.2 Vision: an image is cut into tiles and is one token, which later tokens cross-attend to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from saccade import costs
from saccade.errors import ConfigError
from saccade.processor.families import base
from saccade.processor.families.base import Expansion, Files
from saccade.types.media import Geometry, Grid, Size

_DEFAULT_SIDE = 224  # what the image processor assumes when a checkpoint is silent
_DEFAULT_TILES = 4

Arrangement = tuple[int, int]
"""Rows and columns of tiles."""


@dataclass(frozen=True, slots=True)
class Mllama:
    tile: int  # side, in pixels
    max_tiles: int
    patch_size: int
    slots_per_tile: int  # encoder cache slots: a tile's keys and values in every cross-attention layer
    image_token_id: int
    settings: Mapping[str, Any]
    is_fixed_size: bool = False

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        vision, token = base.vision_and_token(files)
        config = files.config
        image_processor = files.image_processor
        tile, max_tiles = _tiling(image_processor)
        _check_tower(config.raw["vision_config"], tile, max_tiles)
        states = (tile // vision.patch_size) ** 2 + 1  # the tower adds a class token to each tile
        return cls(
            tile=tile,
            max_tiles=max_tiles,
            patch_size=vision.patch_size,
            slots_per_tile=states * costs.cross_slots_per_state(config.text),
            image_token_id=token,
            settings=base.pixel_settings(image_processor),
        )

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        return (self.image_token_id,)

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        """The maximum limits the canvas, to at least one tile. A minimum has no effect."""
        return base.limits(min_pixels, max_pixels, self.tile**2, self.max_tiles * self.tile**2)

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        return base.tag({**self.settings, "tile": self.tile, "tiles": self._tiles_within(max_pixels)})

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        base.check_aspect_ratio(size)
        arrangement = choose(size, self.tile, self._tiles_within(max_pixels))
        return self._of(fit(size, self.tile, arrangement), arrangement)

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        columns = self._tiles_within(max_pixels)
        return self._of(Size(columns * self.tile, self.tile), (1, columns))

    def expand(self, geometry: Geometry) -> Expansion:
        """The token keeps its own embedding; cross-attention layers read the tower's output."""
        return Expansion(np.array([self.image_token_id], np.int64), (False,), is_cross_attended=True)

    positions = base.sequential_positions

    def _tiles_within(self, max_pixels: int) -> int:
        return max(1, min(self.max_tiles, max_pixels // self.tile**2))

    def _of(self, resized: Size, arrangement: Arrangement) -> Geometry:
        rows, columns = arrangement
        side = self.tile // self.patch_size
        grid = Grid(1, rows * side, columns * side)
        return Geometry(resized, grid, tokens=1, slots=rows * columns * self.slots_per_tile)


def arrangements(max_tiles: int) -> list[Arrangement]:
    """All arrangements, in the order of the tower's aspect ratio ids."""
    sides = range(1, max_tiles + 1)
    return [(rows, columns) for rows in sides for columns in sides if rows * columns <= max_tiles]


def choose(size: Size, tile: int, max_tiles: int) -> Arrangement:
    """The canvas that enlarges the image least, or if none enlarges it, the one that shrinks it least."""
    scales = {
        (rows, columns): min(rows * tile / size.height, columns * tile / size.width)
        for rows, columns in arrangements(max_tiles)
    }
    best = min((scale for scale in scales.values() if scale >= 1), default=max(scales.values()))
    fitting = [arrangement for arrangement, scale in scales.items() if scale == best]
    return min(fitting, key=math.prod)


def fit(size: Size, tile: int, arrangement: Arrangement) -> Size:
    """The image's size on its canvas: no side is enlarged beyond one tile; the aspect ratio stays."""
    height = min(max(size.height, tile), arrangement[0] * tile)
    width = min(max(size.width, tile), arrangement[1] * tile)
    by_height = height / size.height
    by_width = width / size.width
    if by_width < by_height:
        return Size(width, min(max(1, math.floor(size.height * by_width)), height))
    return Size(min(max(1, math.floor(size.width * by_height)), width), height)


def _tiling(image_processor: Mapping[str, Any]) -> tuple[int, int]:
    for name in ("do_resize", "do_pad"):
        base.check_does(image_processor, name, "pictures must be resized and padded to tiles")
    size = image_processor.get("size", {"height": _DEFAULT_SIDE, "width": _DEFAULT_SIDE})
    if not isinstance(size, Mapping) or not size.get("height") or size.get("height") != size.get("width"):
        message = f"the image processor's size must have one height and width, the side of a tile, not {size}"
        raise ConfigError(message)
    return int(size["height"]), int(base.setting("max_image_tiles", image_processor, default=_DEFAULT_TILES))


def _check_tower(vision: Mapping[str, Any], tile: int, max_tiles: int) -> None:
    trained = vision.get("max_num_tiles", _DEFAULT_TILES)
    if (vision.get("image_size"), trained) != (tile, max_tiles):
        cut = f"the image processor cuts {max_tiles} tiles of {tile} pixels"
        tower = f"the vision tower takes {trained} of {vision.get('image_size')} (size, image_size)"
        raise ConfigError(f"{cut}, but {tower}; the two files do not belong together")
    ratios = vision.get("supported_aspect_ratios")
    if ratios is not None and [tuple(ratio) for ratio in ratios] != arrangements(max_tiles):
        message = f"supported_aspect_ratios {ratios} are not all arrangements of {max_tiles} tiles, in order"
        raise ConfigError(message)
