"""Charts as SVG text: plot areas with axes, curves, legends."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

COLORS = ("#c0392b", "#1f6fb2", "#2e8b57", "#b8860b", "#7d3c98", "#00838f", "#8d6e63", "#5d6d7e")
Point = tuple[float, float]


def document(width: int, height: int, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    font = 'font-family="sans-serif" font-size="12">'
    background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head + font, background, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" fill="#222222"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(words)}</text>'


def color_of(row: int) -> str:
    return COLORS[row % len(COLORS)]


def curve(points: Sequence[Point], color: str) -> str:
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>'


def dashes(path: str) -> str:
    return f'<path d="{path}" stroke="#888888" stroke-dasharray="2 3"/>'


def legend(x: float, y: float, names: Sequence[str]) -> Iterator[str]:
    """A row for each curve, in the order of the colors."""
    for row, name in enumerate(names):
        yield f'<path d="M{x:g} {y - 4 + 20 * row:.1f}h18" stroke="{color_of(row)}" stroke-width="3"/>'
        yield text(x + 24, y + 20 * row, name)


class Panel(NamedTuple):
    """A plot area in SVG units, and what its edges stand for."""

    left: float
    width: float
    top: float
    x: tuple[float, float]
    y: tuple[float, float]
    is_log: bool = False  # the x axis
    bottom: float = 300

    @property
    def right(self) -> float:
        return self.left + self.width

    def at(self, x: float, y: float) -> Point:
        low, high, x = (math.log10(value) if self.is_log else value for value in (*self.x, x))
        across = min(max((x - low) / ((high - low) or 1.0), 0.0), 1.0)
        up = min(max((y - self.y[0]) / (self.y[1] - self.y[0]), 0.0), 1.0)
        return self.left + self.width * across, self.bottom - (self.bottom - self.top) * up

    def axes(
        self, unit: str, columns: Mapping[float, str], rows: Mapping[float, str], tick: int = 0
    ) -> Iterator[str]:
        """Values with their labels: of the x axis, with ticks of a length, and of the y axis, with lines."""
        for value, words in rows.items():
            y = self.at(self.x[0], value)[1]
            yield f'<path d="M{self.left:g} {y:.1f}H{self.right:g}" stroke="#e3e3e3"/>'
            yield text(self.left - 8, y + 4, words, anchor="end")
        for value, words in columns.items():
            x = self.at(value, self.y[0])[0]
            if tick:
                yield f'<path d="M{x:.1f} {self.bottom:g}v{tick}" stroke="#555555"/>'
            yield text(x, self.bottom + 20, words, anchor="middle")
        yield text((self.left + self.right) / 2, self.bottom + 40, unit, anchor="middle")

    def upright(self, x: float) -> str:
        """A dashed line over the whole height."""
        column = f"M{self.at(x, self.y[0])[0]:.1f} {self.top:g}V{self.bottom:g}"
        return f'<path d="{column}" stroke="#333333" stroke-dasharray="4 4"/>'


def steps(ends: tuple[float, float], number: int = 5) -> list[float]:
    """Evenly spaced values of an axis."""
    low, high = ends
    return [low + (high - low) * step / number for step in range(number + 1)]
