"""Pieces of SVG charts, as text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

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


def curve(points: Sequence[Point], color: str) -> str:
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>'
