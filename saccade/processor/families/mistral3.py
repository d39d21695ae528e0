"""Mistral 3 and Pixtral: any size up to a longest edge; a break token ends each row, an end token the last.

IMG IMG IMG BREAK
IMG IMG IMG END         an image of 2 x 3 tokens: six embeddings, eight positions
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from saccade.checkpoint.tokenizer_json import added_tokens
from saccade.errors import ConfigError
from saccade.processor.families import base
from saccade.processor.families.base import Expansion, Files
from saccade.types.media import Geometry, Grid, Size

_LONGEST_EDGE = 1024  # what the image processor assumes when a checkpoint is silent


@dataclass(frozen=True, slots=True)
class Mistral3:
    patch_size: int  # pixels along one side of a patch
    merge_size: int  # patches along one side of a token
    edges: Size  # the checkpoint's own limit on either side
    image_token_id: int
    break_token_id: int
    end_token_id: int
    settings: Mapping[str, Any]
    is_fixed_size: bool = False

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        vision, token = base.vision_and_token(files)
        image_processor = files.image_processor
        base.check_does(image_processor, "do_resize", "pictures must be resized to whole patches")
        break_token = base.setting("image_break_token", files.processor, default="[IMG_BREAK]")
        end_token = base.setting("image_end_token", files.processor, default="[IMG_END]")
        break_id, end_id = _token_ids(files.path, [break_token, end_token], token)
        return cls(
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            edges=_edges(image_processor.get("size")),
            image_token_id=token,
            break_token_id=break_id,
            end_token_id=end_id,
            settings=base.pixel_settings(image_processor),
        )

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        return self.image_token_id, self.break_token_id, self.end_token_id

    @property
    def token_side(self) -> int:
        """Pixels along one side of the square that becomes one token."""
        return self.patch_size * self.merge_size

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        return base.limits(min_pixels, max_pixels, 1, self._max_pixels)  # small images stay small

    @property
    def _max_pixels(self) -> int:
        """Pixels of the largest image, with its sides rounded up to whole tokens."""
        tokens = math.prod(_up(edge, self.token_side) for edge in self.edges)
        return tokens * self.token_side**2

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        sides = {"patch": self.patch_size, "merge": self.merge_size, "edges": self.edges}
        return base.tag({**self.settings, **sides, "min_pixels": min_pixels, "max_pixels": max_pixels})

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        base.check_aspect_ratio(size)
        fitted = self._fitted(size, min_pixels, max_pixels)
        side = self.token_side
        columns = _up(fitted.width, side)
        rows = _up(fitted.height, side)
        if max_pixels < self._max_pixels and columns * rows * side**2 > max_pixels:
            columns = max(1, fitted.width // side)
            rows = max(1, fitted.height // side)
        return self._of(columns, rows)

    def _fitted(self, size: Size, min_pixels: int, max_pixels: int) -> Size:
        """Shrunk to the longest edge as the Hugging Face processor does; further only for a pixel limit."""
        shrink = max(size.height / self.edges.height, size.width / self.edges.width)
        if max_pixels < self._max_pixels:
            shrink = max(shrink, math.sqrt(size.width * size.height / max_pixels))
        enlarge = math.sqrt(min_pixels / (size.width * size.height))
        if shrink > 1:
            return Size(max(1, math.floor(size.width / shrink)), max(1, math.floor(size.height / shrink)))
        if enlarge > 1:
            factor = min(enlarge, 1 / shrink)
            return Size(math.floor(size.width * factor), math.floor(size.height * factor))
        return size

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        """The maximum of tokens and the maximum of embeddings, though perhaps not of the same image."""
        shapes = [self._of(*shape) for shape in self._shapes(max_pixels)]
        maximum = max(shapes, key=lambda geometry: geometry.slots)
        return replace(maximum, tokens=max(geometry.tokens for geometry in shapes))

    def _shapes(self, max_pixels: int) -> Iterator[tuple[int, int]]:
        """(columns, rows): for every number of rows the maximum of columns."""
        side = self.token_side
        max_columns = _up(self.edges.width, side)
        max_rows = _up(self.edges.height, side)
        max_tokens = max(1, max_pixels // side**2)
        thin = max(1, math.isqrt(base.MAX_ASPECT_RATIO * max_pixels) // side)  # less than a token wide
        yield min(max_columns, max(max_tokens, thin)), 1
        yield 1, min(max_rows, max(max_tokens, thin))
        for rows in range(1, min(max_rows, max_tokens) + 1):
            yield min(max_columns, max_tokens // rows), rows

    def _of(self, columns: int, rows: int) -> Geometry:
        resized = Size(columns * self.token_side, rows * self.token_side)
        grid = Grid(1, rows * self.merge_size, columns * self.merge_size)
        return Geometry(resized, grid, tokens=rows * (columns + 1), slots=rows * columns)

    def expand(self, geometry: Geometry) -> Expansion:
        rows = geometry.grid.h // self.merge_size
        ids = np.full((rows, geometry.tokens // rows), self.image_token_id, np.int64)
        ids[:, -1] = self.break_token_id
        ids[-1, -1] = self.end_token_id
        row = [True] * (ids.shape[1] - 1) + [False]
        return Expansion(ids.ravel(), tuple(row * rows))

    positions = base.sequential_positions


def _up(length: int, side: int) -> int:
    """Tokens that cover so many pixels."""
    return -(-length // side)


def _edges(size: Any) -> Size:
    if size is None:
        return Size(_LONGEST_EDGE, _LONGEST_EDGE)
    if isinstance(size, int):
        return Size(size, size)
    width, height = (
        base.setting("longest_edge", size, default=size.get(name)) for name in ("width", "height")
    )
    if not width or not height:
        message = f"the image processor's size needs longest_edge, or height and width, not {dict(size)}"
        raise ConfigError(message)
    return Size(width, height)


def _token_ids(folder: Path, names: Sequence[str], without: int) -> list[int]:
    """Ids of control tokens; `without` for a folder that has no tokenizer, which is enough for counting."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return [without] * len(names)
    ids = added_tokens(file)
    absent = [name for name in names if name not in ids]
    if absent:
        reason = f"tokenizer.json has no token {' and '.join(absent)}, which ends a picture's rows"
        raise ConfigError(f"{reason} (image_break_token and image_end_token in processor_config.json)")
    return [ids[name] for name in names]
