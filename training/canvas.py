"""Drawing with Pillow, cheaply, while noting what lies under each patch. Knows shapes and text, not questions."""

from __future__ import annotations

import math
import string
from functools import cache
from random import Random

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from saccade.apps.evaluation.image_noise import Field, Grain, add_grain
from training.fonts import Font, advance
from training.palette import Rgb
from training.samples import Picture

PATCH = 8
TOKEN = 16  # a token is 2x2 patches
FRAMES = 2  # of a video share their patches; a still picture is shown twice
KINDS = ("circle", "square", "triangle", "rectangle", "oval", "diamond", "star", "cross", "ring", "heart", "hexagon")
GLYPHS = string.ascii_letters + string.digits
GLYPH_CLASSES = {char: index + 1 for index, char in enumerate(GLYPHS)}
OTHER_GLYPH = len(GLYPHS) + 1
KIND_CLASSES = {kind: OTHER_GLYPH + 1 + index for index, kind in enumerate(KINDS)}
BAR_CLASS = OTHER_GLYPH + 1 + len(KINDS)
NUM_GLYPH_CLASSES = BAR_CLASS + 1
NUM_LINKS = 4  # labels of a patch: two letters of the heading above it, two of the label beside it
NUM_LETTER_CLASSES = OTHER_GLYPH + 1
_SMOOTH = 3  # shapes are drawn this much larger and reduced

Points = list[tuple[float, float]]


class Canvas:
    """A picture in the making. `size` is what the image processor will make of it, `drawn` what is drawn."""

    def __init__(self, size: tuple[int, int], drawn: tuple[int, int], paper: Rgb) -> None:
        self.size = size
        self.width, self.height = drawn
        self.image = Image.new("RGB", drawn, paper)
        self.draw = ImageDraw.Draw(self.image)
        grid = size[1] // PATCH, size[0] // PATCH
        self._scale = grid[1] / self.width, grid[0] / self.height
        self._glyphs, self._colors = np.zeros(grid, np.uint8), np.zeros(grid, np.uint8)
        self._links = np.zeros((NUM_LINKS, *grid), np.uint8)

    def shape(
        self, points: Points, hole: Points, center: tuple[float, float], color: Rgb, classes: tuple[int, int]
    ) -> None:
        """Fill `points` (pixels around `center`), less `hole`; `classes` are of the kind and of the colour."""
        reach = math.ceil(max(max(abs(x), abs(y)) for x, y in points)) + 1
        left, top = round(center[0]) - reach, round(center[1]) - reach
        dx, dy = center[0] - left, center[1] - top
        mask = Image.new("L", (2 * reach * _SMOOTH, 2 * reach * _SMOOTH))
        pen = ImageDraw.Draw(mask)
        pen.polygon([((x + dx) * _SMOOTH, (y + dy) * _SMOOTH) for x, y in points], fill=255)
        if hole:
            pen.polygon([((x + dx) * _SMOOTH, (y + dy) * _SMOOTH) for x, y in hole], fill=0)
        smooth = mask.reduce(_SMOOTH)
        self.image.paste(color, (left, top), smooth)
        self._mark_mask(left, top, np.asarray(smooth) > 127, classes)

    def bar(self, box: tuple[int, int, int, int], color: Rgb, color_class: int, *, below: str = "") -> None:
        self.draw.rectangle(box, fill=color)
        self._mark(box, BAR_CLASS, color_class)
        self._link(box, below, "")

    def text(
        self,
        at: tuple[int, int],
        text: str,
        font: Font,
        color: Rgb,
        color_class: int = 0,
        *,
        below: str = "",
        beside: str = "",
    ) -> None:
        """Draw one line with its top left corner at `at`; `below` and `beside` are the labels that say what it is."""
        self.draw.text(at, text, fill=color, font=font)
        _, top, _, bottom = font.getbbox(text)
        x, y = float(at[0]), at[1]
        first = x
        for char in text:
            end = x + advance(font, char)
            if char != " ":
                self._mark((x, y + top, end, y + bottom), GLYPH_CLASSES.get(char, OTHER_GLYPH), color_class)
            x = end
        if below or beside:
            self._link((first, y + top, x, y + bottom), below, beside)

    def finish(self, rng: Random) -> Picture:
        """Add what cameras and compressors add, to half of the pictures."""
        grain = _grain(self.image, rng) if rng.random() < 0.5 else None
        image = add_grain(self.image, noise_field(), grain) if grain else self.image
        return Picture(image, self.size, self._glyphs, self._colors, self.image, grain, self._links)

    def _mark(self, box: tuple[float, float, float, float], glyph: int, color: int) -> None:
        """Label the patches whose middles lie in the box."""
        columns, rows = self._middles(0, box[0], box[2]), self._middles(1, box[1], box[3])
        self._glyphs[rows, columns], self._colors[rows, columns] = glyph, color

    def _link(self, box: tuple[float, float, float, float], below: str, beside: str) -> None:
        """Label the patches of a value with the first two letters of its heading and of its row's label."""
        columns, rows = self._middles(0, box[0], box[2]), self._middles(1, box[1], box[3])
        for index, char in enumerate(f"{below:2.2}{beside:2.2}"):
            if char != " ":
                self._links[index, rows, columns] = GLYPH_CLASSES.get(char, OTHER_GLYPH)

    def _mark_mask(self, left: int, top: int, mask: npt.NDArray[np.bool_], classes: tuple[int, int]) -> None:
        """Label the patches whose middles the mask covers."""
        columns, rows = self._middles(0, left, left + mask.shape[1]), self._middles(1, top, top + mask.shape[0])
        xs = ((np.arange(columns.start, columns.stop) + 0.5) / self._scale[0] - left).astype(np.intp)
        ys = ((np.arange(rows.start, rows.stop) + 0.5) / self._scale[1] - top).astype(np.intp)
        covered = mask[np.ix_(ys.clip(0, len(mask) - 1), xs.clip(0, mask.shape[1] - 1))]
        self._glyphs[rows, columns][covered], self._colors[rows, columns][covered] = classes

    def _middles(self, axis: int, start: float, end: float) -> slice:
        """The patches along an axis whose middles lie in start..end, pixels as drawn."""
        scale, count = self._scale[axis], self.size[axis] // PATCH
        first, last = math.ceil(start * scale - 0.5), math.ceil(end * scale - 0.5)
        return slice(min(max(first, 0), count), min(max(last, 0), count))


def outline(kind: str, radius: float, rng: Random) -> tuple[Points, Points]:
    """The corners of a shape around the origin, within `radius`, and of the hole in it."""
    points = [(x * radius, y * radius) for x, y in _unit(kind)]
    if kind in ("oval", "rectangle"):
        flat, is_wide = rng.uniform(0.42, 0.6), rng.random() < 0.5
        points = [(x, y * flat) if is_wide else (x * flat, y) for x, y in points]
    turn = math.radians(rng.uniform(-8, 8)) if rng.random() < 0.5 else 0.0
    cos, sin = math.cos(turn), math.sin(turn)
    points = [(x * cos - y * sin, x * sin + y * cos) for x, y in points]
    return points, [(0.55 * x, 0.55 * y) for x, y in points] if kind == "ring" else []


@cache
def _unit(kind: str) -> Points:
    if kind in ("circle", "oval", "ring"):
        return _around([1.0] * 36)
    if kind in ("square", "rectangle"):
        return [(-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)]
    if kind == "triangle":
        return [(0.0, -0.95), (0.95, 0.75), (-0.95, 0.75)]
    if kind == "diamond":
        return [(0.0, -1.0), (0.68, 0.0), (0.0, 1.0), (-0.68, 0.0)]
    if kind == "star":
        return _around([1.0, 0.42] * 5)
    if kind == "cross":
        arm = 0.3
        quarter = [(-arm, -1.0), (arm, -1.0), (arm, -arm)]
        return [_turned(p, quarters) for quarters in range(4) for p in quarter]
    if kind == "hexagon":
        return _around([1.0] * 6)
    assert kind == "heart", f"unknown kind of shape {kind!r}"
    angles = [2 * math.pi * i / 32 for i in range(32)]
    return [
        (math.sin(a) ** 3, -(13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 16)
        for a in angles
    ]


def _around(radii: list[float]) -> Points:
    step = 2 * math.pi / len(radii)
    return [(r * math.sin(i * step), -r * math.cos(i * step)) for i, r in enumerate(radii)]


def _turned(point: tuple[float, float], quarters: int) -> tuple[float, float]:
    x, y = point
    for _ in range(quarters):
        x, y = -y, x
    return x, y


def _grain(image: Image.Image, rng: Random) -> Grain:
    """A window of a fixed field of noise; drawing fresh noise would cost more than the picture."""
    height, width, _ = noise_field().shape
    top, left = rng.randrange(height - image.height), rng.randrange(width - image.width)
    return Grain(left, top, rng.randint(2, 9))


@cache
def noise_field() -> Field:
    return (np.random.default_rng(0).standard_normal((1024, 1024, 3)) * 16).astype(np.int16)
