"""LLaVA-NeXT (1.6): a picture is seen whole in one square and again, larger, in tiles; plain rotary positions.

+-----+     +-----+-----+     the picture keeps its aspect ratio inside the tiles; black fills what is left, and
| all |     | 1   | 2   |     the patches of whole black rows (or columns) are dropped behind the tower. Each row
+-----+     +-----+-----+     of patches across all tiles ends in a newline embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from saccade.checkpoint.config import VisionConfig
from saccade.errors import ConfigError
from saccade.processor.families.base import (
    Expansion,
    Files,
    check_aspect_ratio,
    in_order,
    pixel_settings,
    plain_positions,
    tag,
    vision_and_token,
)
from saccade.types import Geometry, Grid, Size, Span, Tiling

_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))  # height, width: the published ones


@dataclass(frozen=True, slots=True)
class LlavaNext:
    tile: int  # pixels along one side of a tile
    patch_size: int
    pinpoints: tuple[Size, ...]  # sizes of all tiles together, in the checkpoint's order
    image_token_id: int
    placeholder_ids: tuple[int, ...]
    settings: Mapping[str, Any]
    is_fixed_size: bool = False

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        vision, token = vision_and_token(files)
        given, raw = files.image_processor, files.config.raw
        if raw.get("vision_feature_select_strategy", "default") != "default":
            raise ConfigError("vision_feature_select_strategy must be default: tiles have no place for class tokens")
        tile = tile_side(given, vision)
        return cls(
            tile=tile,
            patch_size=vision.patch_size,
            pinpoints=read_pinpoints(given.get("image_grid_pinpoints") or raw.get("image_grid_pinpoints"), tile)
            or tuple(Size(width, height) for height, width in _PINPOINTS),
            image_token_id=token,
            placeholder_ids=(token,),
            settings=pixel_settings(given),
        )

    @property
    def side(self) -> int:
        """Patches along one side of a tile."""
        return self.tile // self.patch_size

    # --- limits ---------------------------------------------------------------------------------------------------

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        """Pixels of all tiles together. Pictures are always enlarged to fill their tiles, so there is no minimum."""
        areas = [_area(pinpoint) for pinpoint in self.pinpoints]
        highest = max(areas) if max_pixels is None else max_pixels
        lowest = min(*areas, highest) if min_pixels is None else min_pixels
        return in_order(lowest, highest)

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        allowed = self._allowed(max_pixels)
        return tag({**self.settings, "tile": self.tile, "patch": self.patch_size, "pinpoints": allowed})

    def _allowed(self, max_pixels: int) -> list[Size]:
        """Those within the limit; the smallest is always allowed, for a picture needs some."""
        within = [pinpoint for pinpoint in self.pinpoints if _area(pinpoint) <= max_pixels]
        return within or [min(self.pinpoints, key=_area)]

    # --- sizes ----------------------------------------------------------------------------------------------------

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        check_aspect_ratio(size)
        target = best_canvas(size, self._allowed(max_pixels))
        return self._of(target, _fitted(size, target), self._kept(size, target))

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        """The picture with the most tiles, and the most tokens that any can have, though perhaps not the same one."""
        allowed = self._allowed(max_pixels)
        all_sizes = [self._of(target, target, kept) for target in allowed for kept in self._possible(target)]
        maximum = max(all_sizes, key=lambda geometry: geometry.tokens)
        tiled = max(all_sizes, key=lambda geometry: geometry.grid.patches)
        return replace(tiled, tokens=maximum.tokens, slots=maximum.slots)

    def _of(self, target: Size, resized: Size, kept: Size) -> Geometry:
        columns, rows = target.width // self.tile, target.height // self.tile
        joined = self.joined(kept)
        slots = self.side**2 + joined.height * (joined.width + 1)
        grid = Grid(1 + rows * columns, self.side, self.side)
        return Geometry(resized, grid, slots, slots, Tiling(columns, rows, kept, joined))

    def _kept(self, size: Size, target: Size) -> Size:
        """Patches across all tiles without those that are wholly padding, as the model counts them."""
        width, height = self._patches(target)
        if size.width / size.height > width / height:
            filled = int(round(size.height * (width / size.width), 7))
            return Size(width, height - (height - filled) // 2 * 2)
        filled = int(round(size.width * (height / size.height), 7))
        return Size(width - (width - filled) // 2 * 2, height)

    def _possible(self, target: Size) -> Iterator[Size]:
        """Every size that `_kept` can give: padding takes as much from either end of one side."""
        width, height = self._patches(target)
        yield from (Size(width, kept) for kept in range(height, 0, -2))
        yield from (Size(kept, height) for kept in range(width, 0, -2))

    def _patches(self, target: Size) -> Size:
        return Size(target.width // self.tile * self.side, target.height // self.tile * self.side)

    def joined(self, kept: Size) -> Size:
        """Embeddings that the kept patches become."""
        return kept

    # --- the prompt -----------------------------------------------------------------------------------------------

    def expand(self, geometry: Geometry) -> Expansion:
        return Expansion(np.full(geometry.tokens, self.image_token_id, np.int64), None)

    def positions(
        self, token_ids: Sequence[int] | npt.NDArray[np.int64], spans: Sequence[Span], grids: Sequence[Grid]
    ) -> tuple[npt.NDArray[np.int32], int]:
        return plain_positions(token_ids)


# --- what a checkpoint says ---------------------------------------------------------------------------------------


def tile_side(given: Mapping[str, Any], vision: VisionConfig) -> int:
    """The tower's input. An image processor that makes other sizes belongs to another model."""
    if not given.get("do_resize", True):
        raise ConfigError("the image processor says do_resize=false; the vision tower takes tiles of one size only")
    sides = {side for name in ("size", "crop_size") for side in _sides(given.get(name))}
    if vision.image_size is None or sides - {vision.image_size}:
        raise ConfigError(
            f"the image processor makes tiles of {sorted(sides)} pixels, but the vision tower takes "
            f"{vision.image_size} (vision_config.image_size)"
        )
    return vision.image_size


def _sides(size: Any) -> Iterable[int]:
    if isinstance(size, int):
        return [size]
    return [side for side in (size or {}).values() if side is not None]


def read_pinpoints(given: Any, tile: int) -> tuple[Size, ...]:
    """[height, width] each; nothing where the checkpoint is silent."""
    sizes = tuple(Size(int(width), int(height)) for height, width in given or ())
    wrong = [size for size in sizes if size.width % tile or size.height % tile or not min(size)]
    if wrong:
        raise ConfigError(
            f"image_grid_pinpoints holds {list(reversed(wrong[0]))}, which is not made of tiles of {tile}x{tile} pixels"
        )
    return sizes


# --- arithmetic ---------------------------------------------------------------------------------------------------


def _area(size: Size) -> int:
    return size.width * size.height


def best_canvas(size: Size, pinpoints: Sequence[Size]) -> Size:
    """Where most of the picture's own pixels survive, then where least is wasted, then the first."""

    def worth(pinpoint: Size) -> tuple[int, int]:
        scale = min(pinpoint.width / size.width, pinpoint.height / size.height)
        shown = min(int(size.width * scale) * int(size.height * scale), _area(size))
        return shown, shown - _area(pinpoint)

    return max(pinpoints, key=worth)


def _fitted(size: Size, target: Size) -> Size:
    """The picture as large as fits the target; rounded up, unlike the patches that are kept of it."""
    across, down = target.width / size.width, target.height / size.height
    if across < down:
        return Size(target.width, min(math.ceil(size.height * across), target.height))
    return Size(min(math.ceil(size.width * down), target.width), target.height)
