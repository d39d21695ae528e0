"""MiniCPM-V: the whole image and, if it is large, slices of it, each 64 embeddings; sequential positions.

<image> 64 </image> <slice> 64 </slice> <slice> 64 </slice>     two columns
          line feed <slice> 64 </slice> <slice> 64 </slice>     two rows
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from saccade.checkpoint.tokenizer_json import added_tokens, all_tokens
from saccade.errors import ConfigError
from saccade.processor.families import base
from saccade.processor.families.base import Expansion, Files
from saccade.types.media import Geometry, Grid, Size, Tiling

_WRITTEN = re.compile(re.escape("(<image>./</image>)"))
_NAMES = ("<unk>", "<image>", "</image>", "<slice>", "</slice>")
_WORDS = {"n_queries", "num_position_embeddings", "window_size"}  # of a config.json of the architecture
_NUMBER = ("<image_id>", "</image_id>")
_LINES = ("Ċ", "\n", "<0x0A>")  # names of a line feed


class Marks(NamedTuple):
    """Ids of tokens."""

    embedded: int  # of which embeddings take the place; also an image in a prompt before expansion
    image: tuple[int, int]  # before and after the whole
    slice: tuple[int, int]
    line: int  # a line feed between rows of slices
    number: tuple[int, ...] = ()  # before and after the number of an image


_UNKNOWN = Marks(0, (1, 2), (3, 4), 5)  # of a folder without a tokenizer: counting needs none


@dataclass(frozen=True, slots=True)
class MiniCPMV:
    patch_size: int
    scale: int  # a view has about so many pixels squared
    max_slices: int
    queries: int  # embeddings of a view
    marks: Marks
    has_numbers: bool  # images of a prompt are numbered
    settings: Mapping[str, Any]
    is_fixed_size: bool = False
    grows: ClassVar[bool] = True
    markup: ClassVar[tuple[str, ...]] = tuple(
        f"<{end}{name}>" for name in ("ref", "box", "quad", "point") for end in ("", "/")
    )

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        vision = files.config.vision
        if vision is None:
            raise ConfigError("config.json has no vision_config, so this model takes no pictures")
        settings = files.image_processor
        tower = files.config.raw["vision_config"]
        if not tower.keys() >= _WORDS or "text_config" not in files.config.raw:
            names = files.config.raw.get("architectures")
            raise ConfigError(f"config.json: architectures is {names!r:.80}, but ['MiniCPMV'] is needed")
        queries = tower["n_queries"]
        ours = {
            "patch_size": vision.patch_size,
            "image_feature_size": queries,
            "scale_resolution": tower["window_size"],
        }
        base.check_agreement("preprocessor_config.json", settings, ours)
        base.check_does(settings, "slice_mode", "pictures must be resized to whole patches")
        return cls(
            patch_size=vision.patch_size,
            scale=base.setting("scale_resolution", settings, default=448),
            max_slices=base.setting("max_slice_nums", settings, default=9),
            queries=queries,
            marks=_read_marks(files.path),
            has_numbers=bool(settings.get("use_image_id")),
            settings={name: settings[name] for name in ("norm_mean", "norm_std") if name in settings},
        )

    @property
    def image_token_id(self) -> int:
        return self.marks.embedded

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        return (self.marks.embedded, *self.marks.image, *self.marks.slice, *self.marks.number)

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        """Limits on all slices together. A view always has its size, so there is no minimum."""
        area = self.scale**2
        return base.limits(min_pixels, max_pixels, area, self.max_slices * area)

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        shape = {"scale": self.scale, "patch": self.patch_size, "queries": self.queries}
        return base.tag({**self.settings, **shape, "slices": self._slices(max_pixels)})

    def _slices(self, max_pixels: int) -> int:
        """At most; 1: the image is not sliced."""
        return min(self.max_slices, max(1, max_pixels // self.scale**2))

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        base.check_aspect_ratio(size)
        wanted = math.ceil(size.width * size.height / self.scale**2)
        slices = self._slices(max_pixels)
        if min(wanted, slices) == 1:
            return self._of(self._view(*size))
        grid = best_grid(size, wanted, slices)
        width, height = (_nearest(length, count) / count for length, count in zip(size, grid, strict=True))
        return self._of(self._view(*size), self._view(width, height), grid)

    def _view(self, width: float, height: float) -> Size:
        """As many pixels as a view has, aspect ratio kept, in whole patches."""
        ratio = width / height
        tall = int(self.scale / math.sqrt(ratio))
        return Size(_nearest(int(tall * ratio), self.patch_size), _nearest(tall, self.patch_size))

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        """Views of the most patches, slices below each other: their line feeds are tokens."""
        slices = self._slices(max_pixels)
        view = largest_view(self.scale, self.patch_size)
        image = self._of(view, view, (1, slices)) if slices > 1 else self._of(view)
        views = image.slots // self.queries
        return replace(image, grid=Grid(views, *(side // self.patch_size for side in reversed(view))))

    def _of(self, whole: Size, view: Size | None = None, grid: tuple[int, int] = (0, 0)) -> Geometry:
        """`grid`: columns and rows of slices."""
        columns, rows = grid
        patch = self.patch_size
        slots = (1 + columns * rows) * self.queries
        tokens = slots + 2 * (1 + columns * rows) + max(0, rows - 1)
        patches = math.prod(whole) // patch**2
        if view is None:
            return Geometry(whole, Grid(1, patches, 1), tokens, slots)
        resized = Size(columns * view.width, rows * view.height)
        kept = Size(resized.width // patch, resized.height // patch)
        every = Grid(1, patches + math.prod(kept), 1)
        return Geometry(resized, every, tokens, slots, Tiling(columns, rows, kept, kept), overview=whole)

    def expand(self, geometry: Geometry) -> Expansion:
        tokens = self._marked(self.marks.image)
        if geometry.tiling is not None:
            row = self._marked(self.marks.slice) * geometry.tiling.columns
            tokens += row + [self.marks.line, *row] * (geometry.tiling.rows - 1)
        token_ids = np.array(tokens, np.int64)
        return Expansion(token_ids, tuple((token_ids == self.marks.embedded).tolist()))

    def _marked(self, ends: tuple[int, int]) -> list[int]:
        return [ends[0], *[self.marks.embedded] * self.queries, ends[1]]

    positions = base.sequential_positions

    def spelled(self, text: str) -> str:
        """Images as their prompt has them: numbered, if they are, and a token for what follows."""
        numbers = itertools.count()

        def image(_: re.Match[str]) -> str:
            return f"<image_id>{next(numbers)}</image_id><unk>" if self.has_numbers else "<unk>"

        return _WRITTEN.sub(image, text)

    def framed(self, token_ids: npt.NDArray[np.int64], images: int) -> npt.NDArray[np.int64]:
        return token_ids


def best_grid(size: Size, wanted: int, slices: int) -> tuple[int, int]:
    """Columns and rows whose shape is nearest to the image's, of about as many slices as it wants."""
    middle = min(wanted, slices)
    counts = [n for n in (middle - 1, middle, middle + 1) if 1 < n <= slices]
    grids = [(columns, n // columns) for n in counts for columns in range(1, n + 1) if n % columns == 0]
    shape = math.log(size.width / size.height)
    return min(grids, key=lambda grid: abs(shape - math.log(grid[0] / grid[1])))


@lru_cache(maxsize=8)
def largest_view(scale: int, patch: int) -> Size:
    """The most patches: a side is rounded down to pixels, then up or down to patches."""
    reach = math.sqrt(base.MAX_ASPECT_RATIO)
    heights = range(max(1, int(scale / reach)), int(scale * reach) + 1)
    sizes = (Size(_nearest(scale**2 // height, patch), _nearest(height, patch)) for height in heights)
    return max(sizes, key=math.prod)


def _nearest(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)


def _read_marks(folder: Path) -> Marks:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _UNKNOWN
    ids, everything = added_tokens(file), all_tokens(file)  # texts become marks, and are kept from it
    lines = [everything[name] for name in _LINES if name in everything]
    absent = [name for name in _NAMES if name not in ids]
    if absent or not lines:
        raise ConfigError(
            f"tokenizer.json has no token {[*absent, *_LINES][0]!r}, which prompts need; add it"
        )
    embedded, *ends = (ids[name] for name in _NAMES)
    number = tuple(ids[name] for name in _NUMBER if name in ids)
    return Marks(embedded, (ends[0], ends[1]), (ends[2], ends[3]), lines[0], number)
