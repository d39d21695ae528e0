"""Qwen2-VL and later: any size, rounded to whole tokens within limits (smart_resize); M-RoPE positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from saccade.errors import ConfigError
from saccade.processor.families import base
from saccade.processor.families.base import Files, Positions, TokenIds
from saccade.types.media import Geometry, Grid, Size
from saccade.types.prompt import Span

_MIN_PIXELS = 56 * 56  # what the image processor assumes when a checkpoint is silent
_MAX_PIXELS = 28 * 28 * 1280
_SLACK = 1 + 1e-9  # for the rounding error of a square root


@dataclass(frozen=True, slots=True)
class Qwen2VL:
    patch_size: int  # pixels along one side of a patch
    merge_size: int  # patches along one side of a token
    min_pixels: int  # the checkpoint's own limits
    max_pixels: int
    image_token_id: int
    placeholder_ids: tuple[int, ...]
    settings: Mapping[str, Any]
    is_fixed_size: bool = False

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        vision, token = base.vision_and_token(files)
        image_processor = files.image_processor
        base.check_does(image_processor, "do_resize", "pictures must be resized to whole patches")
        base.check_agreement("the image processor", image_processor, base.tower_sides(vision))
        lowest, highest = pixel_limits(image_processor, _MIN_PIXELS, _MAX_PIXELS)
        return cls(
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            min_pixels=lowest,
            max_pixels=highest,
            image_token_id=token,
            placeholder_ids=tuple(i for i in (token, files.config.video_token_id) if i is not None),
            settings=base.pixel_settings(image_processor),
        )

    @classmethod
    def published(cls) -> Self:
        """The settings of the checkpoints on the hub, 2B to 72B."""
        image_token = 151655
        return cls(14, 2, 56 * 56, 28 * 28 * 16384, image_token, (image_token, 151656), settings={})

    @property
    def token_side(self) -> int:
        """Pixels along one side of the square that becomes one token."""
        return self.patch_size * self.merge_size

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        return base.limits(min_pixels, max_pixels, self.min_pixels, self.max_pixels)

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        sides = {"patch": self.patch_size, "merge": self.merge_size}
        return base.tag({**self.settings, **sides, "min_pixels": min_pixels, "max_pixels": max_pixels})

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        base.check_aspect_ratio(size)
        return self._of(fit(size, self.token_side, min_pixels, max_pixels))

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        return self._of(largest_fit(self.token_side, min_pixels, max_pixels))

    def _of(self, resized: Size) -> Geometry:
        grid = Grid(1, resized.height // self.patch_size, resized.width // self.patch_size)
        tokens = grid.patches // self.merge_size**2
        return Geometry(resized, grid, tokens, tokens)

    expand = base.expand_to_embeddings

    def positions(
        self, token_ids: TokenIds, spans: Sequence[Span], geometries: Sequence[Geometry]
    ) -> Positions:
        """Text counts up on all three axes; an image spreads over two and advances by its longer side.

            text  image of 2 x 3 tokens     text
        t   0 1   2 2 2 2 2 2               5
        h   0 1   2 2 2 3 3 3               5
        w   0 1   2 3 4 2 3 4               5
        """
        positions = np.empty((3, len(token_ids)), np.int32)  # [axes, tokens]
        end = 0  # tokens written
        shift = 0  # RoPE position minus index, for the text that comes next
        for span, geometry in zip(spans, geometries, strict=True):
            grid = geometry.grid
            positions[:, end : span.start] = np.arange(end + shift, span.start + shift, dtype=np.int32)
            first = span.start + shift
            h = grid.h // self.merge_size
            w = grid.w // self.merge_size
            positions[:, span.start : span.end] = _image_positions(grid.t, h, w) + first
            end = span.end
            shift = first + max(h, w) - span.end
        positions[:, end:] = np.arange(end + shift, len(token_ids) + shift, dtype=np.int32)
        return positions, len(token_ids) + shift


@lru_cache(maxsize=64)
def _image_positions(t: int, h: int, w: int) -> npt.NDArray[np.int32]:  # [3, t * h * w]
    return np.indices((t, h, w), dtype=np.int32).reshape(3, -1)


def fit(size: Size, side: int, min_pixels: int, max_pixels: int, *, frames: int = 1, group: int = 1) -> Size:
    """`smart_resize`: round each side to whole tokens, then scale until all frames are within the limits.

    A thin strip keeps one token across and can so exceed `max_pixels`, as in the Hugging Face processor.
    """
    width, height = size
    rounded = Size(round(width / side) * side, round(height / side) * side)
    pixels = round(frames / group) * group * rounded.width * rounded.height
    if pixels > max_pixels:
        return shrunk(size, side, max_pixels, frames)
    return enlarged(size, side, min_pixels, frames) if pixels < min_pixels else rounded


def shrunk(size: Size, side: int, max_pixels: int, frames: int = 1) -> Size:
    scale = math.sqrt(frames * size.height * size.width / max_pixels)
    return Size(*(max(side, math.floor(length / scale / side) * side) for length in size))


def enlarged(size: Size, side: int, min_pixels: int, frames: int = 1) -> Size:
    scale = math.sqrt(min_pixels / (frames * size.height * size.width))
    return Size(*(math.ceil(length * scale / side) * side for length in size))


def largest_fit(side: int, min_pixels: int, max_pixels: int) -> Size:
    """A size that `fit` never exceeds in tokens: the worst of three cases."""
    cases = (_fullest(max_pixels // side**2), _thinnest(side, max_pixels), _max_enlarged(side, min_pixels))
    rows, columns = max(cases, key=math.prod)
    return Size(columns * side, rows * side)


def _fullest(tokens: int) -> tuple[int, int]:
    """The largest rectangle of at most so many tokens; of several, the squarest."""
    if tokens < 1:
        return 1, 1
    return max(((rows, tokens // rows) for rows in range(math.isqrt(tokens), 0, -1)), key=math.prod)


def _thinnest(side: int, max_pixels: int) -> tuple[int, int]:
    """A strip at the aspect ratio limit, shrunk: one token across always stays."""
    return 1, max(1, math.floor(math.sqrt(max_pixels * base.MAX_ASPECT_RATIO) / side * _SLACK))


def _max_enlarged(side: int, min_pixels: int) -> tuple[int, int]:
    """Enlarging rounds both sides up; the worst sizes are just above a whole number of columns."""
    tokens = min_pixels / side**2 * _SLACK
    squarest = math.floor(math.sqrt(tokens))
    widest = math.floor(math.sqrt(tokens * base.MAX_ASPECT_RATIO))
    shapes = [(math.ceil(tokens / columns), columns + 1) for columns in range(max(1, squarest), widest + 1)]
    return max([(1, 1), *shapes], key=math.prod)


def pixel_limits(processor: Mapping[str, Any], lowest: int, highest: int) -> tuple[int, int]:
    """min_pixels and max_pixels of a checkpoint, in newer ones under the edges of `size`; or these."""
    size = base.setting("size", processor, default={})
    if isinstance(size, int):
        message = f"the image processor says size={size}; shortest_edge and longest_edge are needed inside it"
        raise ConfigError(message)
    edges = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    places = (processor, edges, size, {"min_pixels": lowest, "max_pixels": highest})
    return int(base.setting("min_pixels", *places)), int(base.setting("max_pixels", *places))
