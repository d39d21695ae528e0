"""Scenes of coloured shapes: which, where and how they are drawn. `shape_questions` asks about them."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from random import Random

from training.canvas import KIND_CLASSES, KINDS, Canvas, outline
from training.palette import NAMES, Rgb, background, shade
from training.records import Record, number_field, text_field
from training.samples import Picture, Question
from training.shape_questions import ASK
from training.sheet import Sheet


@dataclass(frozen=True, slots=True)
class Shape:
    kind: str
    color: str
    x: float  # centre, pixels
    y: float
    radius: float

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"


class ShapeScene:
    skills: tuple[str, ...] = (
        "color",
        "shape",
        "size",
        "position",
        "position",
        "count",
        "count",
        "absent",
        "json",
        "caption",
        "extract",
    )

    def __init__(
        self, rng: Random, sheet: Sheet, skill: str, most: int = 6, palette: list[tuple[str, str]] | None = None
    ) -> None:
        """`palette` holds the (kind, colour) pairs to draw from; without it they are chosen to suit the skill."""
        self.sheet = sheet
        palette = palette or _palette(rng, skill)
        shades = {color: shade(rng, color) for _, color in palette}
        self.paper, self.paper_name = background(rng, list(shades.values()))
        self._shades = shades
        if self.paper_name in shades:
            self.paper_name = None
        places = _place(rng, sheet, _how_many(rng, skill, most), crowded=skill == "count")
        self.shapes = [Shape(*rng.choice(palette), *place) for place in places]
        self.shapes.sort(key=lambda s: s.x)  # lists in answers run from left to right
        self.pictures: tuple[Picture, ...] = (_drawn(rng, sheet, self.paper, self.shapes, shades),)

    def ask(self, rng: Random, skill: str) -> Question | None:
        return ASK[skill](self, rng)

    def record(self) -> Record:
        """The shapes from left to right, and how many there are."""
        count = number_field(("count", "number", "number_of_shapes"), str(len(self.shapes)))
        rows = tuple(
            (text_field(("shape", "kind"), s.kind), text_field(("color", "colour"), s.color)) for s in self.shapes
        )
        return Record("picture", (count,), rows, ("shapes", "objects"))

    def redrawn(self, rng: Random, shapes: list[Shape]) -> ShapeScene:
        """Other shapes on the same paper, in the same shades; a shape's outline depends on its place alone."""
        other = copy(self)
        other.shapes = shapes
        shades = {name: self._shades.get(name) or shade(rng, name) for name in NAMES}
        other.pictures = (_drawn(rng, self.sheet, self.paper, shapes, shades, is_steady=True),)
        return other

    # --- naming shapes without ambiguity ---

    def having(self, kind: str | None = None, color: str | None = None) -> list[Shape]:
        return [s for s in self.shapes if kind in (None, s.kind) and color in (None, s.color)]

    def unique(self) -> list[Shape]:
        return [s for s in self.shapes if len(self.having(s.kind, s.color)) == 1]

    def fraction(self, shape: Shape) -> tuple[float, float]:
        return shape.x / self.sheet.drawn[0], shape.y / self.sheet.drawn[1]


# --- drawing ------------------------------------------------------------------------------------------------------


def _palette(rng: Random, skill: str) -> list[tuple[str, str]]:
    """The (kind, colour) pairs a scene draws from: few where counting needs repetition, many elsewhere."""
    if skill == "count" and rng.random() < 0.8:
        kinds, colors = rng.sample(KINDS, rng.randint(1, 2)), rng.sample(NAMES, rng.randint(1, 2))
        return [(kind, color) for kind in kinds for color in colors]
    kinds, colors = rng.sample(KINDS, 6), rng.sample(NAMES, 6)
    return list(zip(kinds, colors, strict=True)) + [(rng.choice(kinds), rng.choice(colors)) for _ in range(3)]


def _how_many(rng: Random, skill: str, most: int) -> int:
    if skill == "count":
        return min(most, rng.randint(1, 6))
    if skill in ("json", "caption", "extract"):
        return min(most, rng.choice((1, 1, 2, 2, 3, 3, 4)))
    if skill == "size":
        return min(most, rng.choice((1, 2, 2, 3, 4)))
    return min(most, rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5)))


def _place(rng: Random, sheet: Sheet, count: int, crowded: bool) -> list[tuple[float, float, float]]:
    """Places (x, y, radius) that do not touch; fewer than `count` where the sheet is too full."""
    width, height = sheet.drawn
    most = sheet.short * (0.5 if count == 1 else 0.36 if count == 2 else 0.62 / math.sqrt(count + 1))
    least = max(9.0, sheet.short * 0.07)
    common = rng.uniform(least, max(least, most)) if crowded and rng.random() < 0.5 else None
    placed: list[tuple[float, float, float]] = []
    for _ in range(40 * count):
        radius = (common or least + (most - least) * rng.random() ** 1.3) * rng.uniform(0.85, 1.0)
        x, y = rng.uniform(radius + 1, width - radius - 1), rng.uniform(radius + 1, height - radius - 1)
        if all(math.hypot(x - a, y - b) > radius + r + 3 for a, b, r in placed):
            placed.append((x, y, radius))
        if len(placed) == count:
            break
    return placed


def _drawn(
    rng: Random, sheet: Sheet, paper: Rgb, shapes: list[Shape], shades: dict[str, Rgb], *, is_steady: bool = False
) -> Picture:
    canvas = Canvas(sheet.size, sheet.drawn, paper)
    for s in shapes:
        points, hole = outline(s.kind, s.radius, Random(f"{s.x} {s.y}") if is_steady else rng)
        canvas.shape(points, hole, (s.x, s.y), shades[s.color], (KIND_CLASSES[s.kind], NAMES.index(s.color) + 1))
    return canvas.finish(rng)
