"""Colours by name, and backgrounds they can be told from."""

from __future__ import annotations

from random import Random

Rgb = tuple[int, int, int]

COLORS: dict[str, Rgb] = {
    "red": (220, 30, 35),
    "green": (30, 150, 55),
    "blue": (35, 75, 215),
    "yellow": (245, 220, 40),
    "orange": (245, 130, 20),
    "purple": (125, 40, 165),
    "pink": (250, 135, 190),
    "brown": (120, 72, 32),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
    "gray": (128, 128, 128),
}
NAMES = tuple(COLORS)
_DISTANCE = 95  # between a background and what is drawn on it; the sum over channels is weighted as eyes do


def shade(rng: Random, name: str, spread: int = 14) -> Rgb:
    """A colour that goes by this name."""
    red, green, blue = (min(255, max(0, v + rng.randint(-spread, spread))) for v in COLORS[name])
    return red, green, blue


def luminance(color: Rgb) -> float:
    return 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]


def distance(a: Rgb, b: Rgb) -> float:
    return 0.6 * abs(a[0] - b[0]) + abs(a[1] - b[1]) + 0.5 * abs(a[2] - b[2])


def is_clear(one: Rgb, other: Rgb) -> bool:
    """Whether the one can be told from the other where it is drawn on it."""
    return distance(one, other) > _DISTANCE


def background(rng: Random, drawn: list[Rgb]) -> tuple[Rgb, str | None]:
    """A background far from every colour in `drawn`, and its name if it has one."""
    for _ in range(20):
        named = rng.choice(("white", "white", "black", "gray", *NAMES)) if rng.random() < 0.5 else None
        color = shade(rng, named, 8) if named else _plain(rng)
        if all(is_clear(color, other) for other in drawn):
            return color, named
    options = sorted(NAMES, key=lambda n: -min((distance(COLORS[n], other) for other in drawn), default=0.0))
    return COLORS[options[0]], options[0]


def ink(rng: Random, paper: Rgb) -> tuple[Rgb, str | None]:
    """A colour that text on `paper` can be read in, and its name if it has one."""
    for _ in range(20):
        named = rng.choice(NAMES) if rng.random() < 0.7 else None
        color = shade(rng, named) if named else (rng.randrange(256), rng.randrange(256), rng.randrange(256))
        if abs(luminance(color) - luminance(paper)) > 80:
            return color, named
    return (COLORS["black"], "black") if luminance(paper) > 128 else (COLORS["white"], "white")


def _plain(rng: Random) -> Rgb:
    """Mostly light, sometimes dark, sometimes anything."""
    kind = rng.random()
    low, high = (195, 255) if kind < 0.6 else (0, 70) if kind < 0.85 else (0, 255)
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)
