"""LLaVA-NeXT (1.6): one square of the whole image plus tiles of a larger one; sequential RoPE positions.

+-----+     +-----+-----+     The image keeps its aspect ratio inside the tiles, padded with black. Patches
| all |     | 1   | 2   |     of black rows or columns are dropped after the tower. Each row of patches across
+-----+     +-----+-----+     all tiles ends in a newline embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from saccade.checkpoint.config import VisionConfig
from saccade.errors import ConfigError
from saccade.processor.families import base
from saccade.processor.families.base import Files
from saccade.types.media import Geometry, Grid, Size, Tiling

_PINPOINTS = (Size(672, 336), Size(336, 672), Size(672, 672), Size(336, 1008), Size(1008, 336))  # published


@dataclass(frozen=True, slots=True)
class LlavaNext:
    tile: int  # pixels along one side of a tile
    patch_size: int
    pinpoints: tuple[Size, ...]  # possible sizes of all tiles together, in the checkpoint's order
    image_token_id: int
    placeholder_ids: tuple[int, ...]
    settings: Mapping[str, Any]
    is_fixed_size: bool = False

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        vision, token = base.vision_and_token(files)
        image_processor = files.image_processor
        if files.config.raw.get("vision_feature_select_strategy", "default") != "default":
            message = "vision_feature_select_strategy must be default: tiles have no place for class tokens"
            raise ConfigError(message)
        tile = tile_side(image_processor, vision)
        return cls(
            tile=tile,
            patch_size=vision.patch_size,
            pinpoints=read_pinpoints(files, tile) or _PINPOINTS,
            image_token_id=token,
            placeholder_ids=(token,),
            settings=base.pixel_settings(image_processor),
        )

    @property
    def side(self) -> int:
        """Patches along one side of a tile."""
        return self.tile // self.patch_size

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        """Limits on all tiles together. Images always fill their tiles, so there is no minimum."""
        areas = [area(pinpoint) for pinpoint in self.pinpoints]
        return base.limits(min_pixels, max_pixels, min(areas), max(areas))

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        pinpoints = self._allowed(max_pixels)
        return base.tag(
            {**self.settings, "tile": self.tile, "patch": self.patch_size, "pinpoints": pinpoints}
        )

    def _allowed(self, max_pixels: int) -> list[Size]:
        """Pinpoints within the limit, or the smallest one."""
        within = [pinpoint for pinpoint in self.pinpoints if area(pinpoint) <= max_pixels]
        return within or [min(self.pinpoints, key=area)]

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        base.check_aspect_ratio(size)
        target = best_canvas(size, self._allowed(max_pixels))
        return self._of(target, _fitted(size, target), self._kept(size, target))

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        """The maximum of tiles and the maximum of tokens, though perhaps not of the same image."""
        pinpoints = self._allowed(max_pixels)
        all_sizes = [
            self._of(target, target, cells) for target in pinpoints for cells in self._possible(target)
        ]
        maximum = max(all_sizes, key=lambda geometry: geometry.tokens)
        tiled = max(all_sizes, key=lambda geometry: geometry.grid.patches)
        return replace(tiled, tokens=maximum.tokens, slots=maximum.slots)

    def _of(self, target: Size, resized: Size, cells: Size) -> Geometry:
        columns = target.width // self.tile
        rows = target.height // self.tile
        joined = self.joined(cells)
        slots = self.side**2 + joined.height * (joined.width + 1)
        grid = Grid(1 + rows * columns, self.side, self.side)
        return Geometry(resized, grid, slots, slots, Tiling(columns, rows, cells, joined))

    def _kept(self, size: Size, target: Size) -> Size:
        """Patches across all tiles without padding, counted as the model does."""
        width, height = self._patches(target)
        if size.width / size.height > width / height:
            filled = int(round(size.height * (width / size.width), 7))
            return Size(width, height - (height - filled) // 2 * 2)
        filled = int(round(size.width * (height / size.height), 7))
        return Size(width - (width - filled) // 2 * 2, height)

    def _possible(self, target: Size) -> Iterator[Size]:
        """Every size that `_kept` can return: padding is removed symmetrically along one side."""
        width, height = self._patches(target)
        yield from (Size(width, side) for side in range(height, 0, -2))
        yield from (Size(side, height) for side in range(width, 0, -2))

    def _patches(self, target: Size) -> Size:
        return Size(target.width // self.tile * self.side, target.height // self.tile * self.side)

    def joined(self, cells: Size) -> Size:
        """Embeddings that the kept patches become."""
        return cells

    expand = base.expand_to_embeddings
    positions = base.sequential_positions


def tile_side(image_processor: Mapping[str, Any], vision: VisionConfig) -> int:
    """The tower's input size, which the image processor must agree with."""
    base.check_does(image_processor, "do_resize", "the vision tower takes tiles of one size only")
    sides = {side for name in ("size", "crop_size") for side in _sides(image_processor.get(name))}
    if vision.image_size is None or sides - {vision.image_size}:
        tiles = f"the image processor makes tiles of {sorted(sides)} pixels"
        tower = f"the vision tower takes {vision.image_size} (vision_config.image_size)"
        raise ConfigError(f"{tiles}, but {tower}")
    return vision.image_size


def _sides(size: Any) -> Iterable[int]:
    if isinstance(size, int):
        return [size]
    return [side for side in (size or {}).values() if side is not None]


def read_pinpoints(files: Files, tile: int) -> tuple[Size, ...]:
    """[height, width] each; empty if the checkpoint names none."""
    name = "image_grid_pinpoints"
    pinpoints = base.setting(name, files.image_processor, files.config.raw, default=())
    sizes = tuple(Size(int(width), int(height)) for height, width in pinpoints)
    wrong = [size for size in sizes if size.width % tile or size.height % tile or not min(size)]
    if wrong:
        first = list(reversed(wrong[0]))
        raise ConfigError(f"{name} holds {first}, which is not made of tiles of {tile}x{tile} pixels")
    return sizes


def area(size: Size) -> int:
    return size.width * size.height


def best_canvas(size: Size, pinpoints: Sequence[Size]) -> Size:
    """The canvas that keeps most of the image's pixels, then the least padding, then the first."""

    def worth(pinpoint: Size) -> tuple[int, int]:
        scale = min(pinpoint.width / size.width, pinpoint.height / size.height)
        pixels = min(int(size.width * scale) * int(size.height * scale), area(size))
        return pixels, pixels - area(pinpoint)

    return max(pinpoints, key=worth)


def _fitted(size: Size, target: Size) -> Size:
    """The image as large as fits the target; rounded up, unlike `_kept`."""
    scale_x = target.width / size.width
    scale_y = target.height / size.height
    if scale_x < scale_y:
        return Size(target.width, min(math.ceil(size.height * scale_x), target.height))
    return Size(min(math.ceil(size.width * scale_y), target.width), target.height)
