"""How image processors of Transformers resize a picture, or cut it into tiles and an overview.

Pure functions of a size and of settings. Which image processor has which is in `counting_table.json`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from saccade.errors import RequestError
from saccade.processor.families import base
from saccade.processor.families.qwen2_vl import enlarged, fit, shrunk
from saccade.types.media import Size

Settings = Mapping[str, Any]
MERGES = {"4x": 2, "16x": 4}  # patches along a side of a token, by how many fewer embeddings there are
_IDEFICS_SIDE = 4096


class Cut(NamedTuple):
    """Sizes in pixels."""

    tile: Size  # of each tile, or of the picture
    columns: int = 1
    rows: int = 1
    overview: Size | None = None  # beside the tiles
    padded_area: int | None = None  # pixels that the tower reads; None: those of all tiles and the overview

    @property
    def resized(self) -> Size:
        return Size(self.tile.width * self.columns, self.tile.height * self.rows)

    @property
    def area(self) -> int:
        if self.padded_area is not None:
            return self.padded_area
        tiles = self.columns * self.rows * math.prod(self.tile)
        return tiles if self.overview is None else tiles + math.prod(self.overview)


def refused(size: Size) -> RequestError:
    message = f"the model's own processor takes no pictures of {size.width}x{size.height} pixels"
    return RequestError(message, code="invalid_image")


def _with_overview(tile: Size, columns: int, rows: int) -> Cut:
    """Of several tiles."""
    if columns * rows == 1:
        return Cut(tile)
    return Cut(tile, columns, rows, tile)


def one_size(size: Size, settings: Settings) -> Cut:
    return Cut(_box(settings["size"]))


def _box(size: Any) -> Size:
    if isinstance(size, int):
        return Size(size, size)
    return Size(size["width"], size["height"])


def frames_of(settings: Settings) -> int:
    """For which limits of pixels are meant."""
    return int(settings["temporal_patch_size"] ** int(settings.get("counts_frames", False)))


def rounded(size: Size, settings: Settings) -> Cut:
    """To whole tokens within limits of pixels, which some count for each frame of a patch."""
    side = settings["patch_size"] * settings["merge_size"] * settings.get("patch_expand_factor", 1)
    size = _ENLARGED[settings.get("enlarged", "")](size, side)
    base.check_aspect_ratio(size)
    frames = frames_of(settings)
    limits = settings["min_pixels"], settings["max_pixels"]
    return Cut(fit(size, side, *limits, frames=frames, group=frames))


def _enlarged_down(size: Size, side: int) -> Size:
    if min(size) >= side:
        return size
    scale = max(side / size.height, side / size.width)
    return Size(int(size.width * scale), int(size.height * scale))


def _enlarged_near(size: Size, side: int) -> Size:
    width, height = size
    if height < side:
        width = round((width * side) / height)
        height = side
    if width < side:
        height = round((height * side) / width)
        width = side
    return Size(width, height)


_ENLARGED: Mapping[str, Callable[[Size, int], Size]] = {
    "": lambda size, side: size,
    "down": _enlarged_down,
    "near": _enlarged_near,
}


def filled(size: Size, settings: Settings) -> Cut:
    """As large as fits so many soft tokens, and padded to as many patches."""
    patch = settings["patch_size"]
    pool = settings["pooling_kernel_size"]
    tokens = settings["max_soft_tokens"]
    side = settings["patch_size"] * settings["pooling_kernel_size"]
    maximum = tokens * pool**2 * patch**2
    factor = math.sqrt(maximum / (size.height * size.width))
    height = math.floor(factor * size.height / side) * side
    width = math.floor(factor * size.width / side) * side
    if height == width == 0:
        raise refused(size)
    if not height:
        height = side
        width = min(size.width // size.height, tokens) * side
    elif not width:
        width = side
        height = min(size.height // size.width, tokens) * side
    if height * width > maximum:
        raise refused(size)
    return Cut(Size(width, height), padded_area=maximum)


def padded(size: Size, settings: Settings) -> Cut:
    """Made smaller for limits of patches, never larger, and padded to whole tokens."""
    patch = settings["patch_size"]
    maximum = settings["size"]["max_height"] * settings["patch_size"]
    patches = max(1.0, size.height // patch) * max(1.0, size.width // patch)
    scale = min(
        1.0, math.sqrt(settings["max_patches"] / patches), maximum / size.height, maximum / size.width
    )
    side = patch * settings["merge_size"]
    return Cut(Size(*(-(-min(max(1, int(length * scale)), maximum) // side) * side for length in size)))


def longest_edge(size: Size, settings: Settings) -> Cut:
    maximum = settings["size"]["longest_edge"]
    side = settings["patch_size"]
    if isinstance(side, Mapping):
        side = side["height"]
    ratio = max(1, size.height / maximum, size.width / maximum)
    lengths = [math.floor(length / ratio) for length in size]
    if 0 in lengths:
        raise refused(size)
    return Cut(Size(*(((length - 1) // side + 1) * side for length in lengths)))


def patch_budget(size: Size, settings: Settings) -> Cut:
    patch = settings["patch_size"]
    merge = round(1 / settings["downsample_ratio"])
    minimum = settings["min_num_patches"]
    maximum = settings["max_num_patches"]
    budget = max((settings["max_model_len"] - 4) * merge**2, minimum)
    if maximum:
        budget = max(min(budget, maximum), minimum)
    rows = round(size.height / patch + 0.5)
    columns = round(size.width / patch + 0.5)
    factor = min(math.sqrt(budget / (rows * columns)), 1.0)
    rows = math.floor(factor * rows)
    columns = math.floor(factor * columns)
    if budget > minimum > rows * columns:
        factor = math.sqrt(minimum / (rows * columns))
        rows = math.ceil(factor * rows)
        columns = math.ceil(factor * columns)
    rows = _whole(rows, merge, budget // max(columns, 1))
    columns = _whole(columns, merge, budget // rows)
    return Cut(Size(columns * patch, rows * patch))


def _whole(length: int, step: int, maximum: int) -> int:
    """The next multiple, or the one below if that is too many."""
    above = -(-length // step) * step
    if length < above and above > maximum:
        return max(step, above - step)
    return above


def closest_tiles(size: Size, settings: Settings) -> Cut:
    """Tiles in the shape nearest to the picture's, and an overview."""
    tile = _box(settings.get("tile_size", settings["size"]))
    minimum = settings["min_patches"]
    maximum = settings["max_patches"]
    grids = _grids(minimum, maximum, min(maximum, settings.get("max_side", maximum)))
    columns, rows = _closest(size, grids, tile.width * tile.height)
    if "tile_size" not in settings:
        return _with_overview(tile, columns, rows) if settings["crop_to_patches"] else Cut(tile)
    overview = _box(settings["size"])
    if max(size) <= tile.width:
        return Cut(overview)
    return Cut(tile, columns, rows, overview)


@lru_cache(maxsize=16)
def _grids(minimum: int, maximum: int, longest: int) -> list[tuple[int, int]]:
    sides = range(1, longest + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if minimum <= columns * rows <= maximum]
    return sorted(grids, key=math.prod)


@lru_cache(maxsize=16)
def _grids_of_a_set(minimum: int, maximum: int) -> list[tuple[int, int]]:
    """The same in the order of a set, which decides between equals."""
    counts = range(minimum, maximum + 1)
    pairs = ((i, j) for n in counts for i in range(1, n + 1) for j in range(1, n + 1))
    return sorted({(i, j) for i, j in pairs if minimum <= i * j <= maximum}, key=math.prod)


def _closest(size: Size, grids: list[tuple[int, int]], tile: int) -> tuple[int, int]:
    """Of equally near ones the last that the picture fills by more than half."""
    best = (1, 1)
    nearest = math.inf
    for columns, rows in grids:
        difference = abs(size.width / size.height - columns / rows)
        is_filled = size.width * size.height > 0.5 * tile * columns * rows
        if (difference, not is_filled) < (nearest, True):
            best = (columns, rows)
            nearest = difference
    return best


def min_enlarged(size: Size, settings: Settings) -> Cut:
    tile = _box(settings["size"])
    maximum = settings["max_patches"]
    if not settings["crop_to_patches"]:
        return Cut(tile)
    grids = _grids(1, maximum, maximum)
    scales = [min(grid[0] * tile.height / size.width, grid[1] * tile.height / size.height) for grid in grids]
    if max(scales) < 1:
        best = scales.index(max(scales))
    else:
        best = min(range(len(grids)), key=lambda i: scales[i] if scales[i] >= 1 else 10e9)
    columns, rows = grids[best]
    return _with_overview(tile, columns, rows)


def covered(size: Size, settings: Settings) -> Cut:
    """The fewest tiles that show 90 % of the picture without making it smaller."""
    tile = _box(settings["size"])
    maximum = settings["max_patches"]
    if not settings["crop_to_patches"]:
        return Cut(tile)
    if not settings["use_covering_area_grid"]:
        return closest_tiles(size, settings)
    shares = {grid: _share(size, *grid, tile.height) for grid in _grids(1, maximum, maximum)}
    enough = [grid for grid, share in shares.items() if share > 0.9]
    if enough:
        columns, rows = min(enough, key=lambda grid: (math.prod(grid), -shares[grid]))
    else:
        columns, rows = min(shares, key=lambda grid: (-shares[grid], math.prod(grid)))
    return _with_overview(tile, columns, rows)


def _share(size: Size, rows: int, columns: int, side: int) -> float:
    """That a grid of squares shows. The last tiles take what division leaves."""
    heights = [size.height // rows] * (rows - 1) + [size.height - size.height // rows * (rows - 1)]
    widths = [size.width // columns] * (columns - 1) + [size.width - size.width // columns * (columns - 1)]
    shown = sum(_shown(width, height, side) for height in heights for width in widths)
    return shown / (size.width * size.height)


def _shown(width: int, height: int, side: int) -> float:
    short, long = sorted((float(width), float(height)))
    if long > side:
        long, short = side, short / long * side
    return long * short


def best_canvas(size: Size, settings: Settings) -> Cut:
    """The canvas of tiles that enlarges least, else the one that shrinks least; then the smallest."""
    tile = _box(settings["size"])
    maximum = settings["max_patches"]
    grids = [(rows, n // rows) for n in range(maximum, 0, -1) for rows in range(1, n + 1) if not n % rows]
    by_shape: dict[float, list[tuple[int, int]]] = {}
    for grid in grids:
        by_shape.setdefault(grid[0] / grid[1], []).append(grid)
    canvases = np.array([grid for group in by_shape.values() for grid in group]) * tile.height
    sides = np.array([size.height, size.width], np.float32)
    scales = (canvases.astype(np.float32) / sides).min(axis=1)
    large = scales[scales >= 1]
    best = scales.max(initial=0)
    if not settings["resize_to_max_canvas"]:
        best = large.min(initial=best)
    height, width = min(canvases[scales == best].tolist(), key=math.prod)
    columns = width // tile.width
    rows = height // tile.height
    return _with_overview(tile, columns, rows)


def longest_split(size: Size, settings: Settings) -> Cut:
    """The longest edge to a length, then both to whole tiles."""
    tile = settings["max_image_size"]["longest_edge"]
    longest = settings["size"]["longest_edge"]
    small = _with_edge(size, longest, 2)
    if max(small) > _IDEFICS_SIDE:
        small = _with_edge(small, _IDEFICS_SIDE)
    whole = _with_edge(small, -(-max(small) // tile) * tile)
    columns, rows = (-(-length // tile) for length in whole)
    if not settings["do_image_splitting"]:
        return Cut(Size(tile, tile))
    return _with_overview(Size(tile, tile), columns, rows)


def _with_edge(size: Size, edge: int, step: int = 1) -> Size:
    """The other length is rounded up to steps."""
    aspect = size.width / size.height
    if size.width >= size.height:
        short = int(edge / aspect)
        return Size(edge, max(1, short + short % step))
    short = int(edge * aspect)
    return Size(max(1, short + short % step), edge)


def rounded_or_tiled(size: Size, settings: Settings) -> Cut:
    patch = settings["encoder_patch_size"]
    factor = settings["downsample_factor"]
    side = patch * factor
    tile = settings["tile_size"]
    minimum, maximum = (settings[name] * side**2 for name in ("min_image_tokens", "max_image_tokens"))
    small = Size(*(max(side, round(length / side) * side) for length in size))
    if math.prod(small) > maximum:
        small = shrunk(size, side, maximum)
    elif math.prod(small) < minimum:
        small = enlarged(size, side, minimum)
    min_tiles = settings["min_tiles"]
    max_tiles = settings["max_tiles"]
    each = max(maximum, tile**2 * int(settings["do_image_splitting"]))
    area = math.prod(max(patch, round(length / side) * side) for length in size)
    grids = _grids_of_a_set(min_tiles, max_tiles)
    if len(grids) == 1 or area <= maximum * settings["max_pixels_tolerance"]:
        return Cut(small, padded_area=each)
    columns, rows = _closest(size, grids, tile * tile)
    parts = columns * rows + int(columns * rows > 1)
    return Cut(Size(tile, tile), columns, rows, small if parts > 1 else None, parts * each)


def slices(size: Size, settings: Settings) -> Cut:
    """An overview, and slices of about the same number of pixels if the picture has more."""
    side = settings["scale_resolution"]
    step = settings["patch_size"] * MERGES[settings["downsample_mode"]]
    grid = _slice_grid(size, settings["max_slice_nums"], side)
    overview = _near(size, side, step, enlarges=grid is None)
    if grid is None:
        return Cut(overview)
    rows, columns = grid
    part = (max(round(length / n) * n, n) / n for length, n in zip(size, (columns, rows), strict=True))
    return Cut(_near(tuple(part), side, step, enlarges=True), columns, rows, overview)


def _near(size: tuple[float, ...], side: int, step: int, *, enlarges: bool) -> Size:
    width, height = size
    if height * width > side * side or enlarges:
        aspect = width / height
        height = int(side / math.sqrt(aspect))
        width = int(height * aspect)
    return Size(*(max(round(length / step) * step, step) for length in (width, height)))


def _slice_grid(size: Size, maximum: int, side: int) -> tuple[int, int] | None:
    """Rows and columns."""
    ideal = min(math.ceil(size.width * size.height / (side * side)), maximum)
    if ideal <= 1:
        return None
    shape = math.log(size.width / size.height)
    best = (1, 1)
    error = math.inf
    for count in (count for count in (ideal - 1, ideal, ideal + 1) if 1 != count <= maximum):
        for rows in (rows for rows in range(1, count + 1) if not count % rows):
            off = abs(shape - math.log(count // rows / rows))
            if (off, -rows) < (error, -best[0]):
                best = (rows, count // rows)
                error = off
    return best


def crops(size: Size, settings: Settings) -> Cut:
    """As many squares as cover the picture, and an overview; padding is at the right or at the bottom."""
    tile = _box(settings["size"])
    maximum = settings["dynamic_hd"]
    columns, rows = (math.ceil(length / float(tile.width)) for length in size)
    if columns * rows > maximum:
        columns, rows = _closest(size, _grids_of_a_set(1, maximum), tile.width**2)
    if min(unpadded(size, Size(columns * tile.width, rows * tile.width))) < 10:
        raise refused(size)
    return Cut(tile, columns, rows, tile)


def unpadded(size: Size, canvas: Size) -> Size:
    across = canvas.width / size.width
    down = canvas.height / size.height
    if across < down:
        return Size(canvas.width, int(size.height * across))
    return Size(int(size.width * down), canvas.height)


CUTS: Mapping[str, Callable[[Size, Settings], Cut]] = {
    function.__name__: function
    for function in (
        *(one_size, rounded, filled, padded, longest_edge, patch_budget, closest_tiles, min_enlarged),
        *(covered, best_canvas, longest_split, rounded_or_tiled, slices, crops),
    )
}
