"""Results of `saccade tune` as a table, as bars for the terminal and as an SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from saccade.apps.evaluation.questions import QuestionSet
from saccade.apps.evaluation.tune import Advice, Measurement
from saccade.apps.svg import COLORS, curve, document, text

_BAR = 20  # characters
_MAX_BARS = 2  # groups beside the whole; more do not fit a terminal


def tuned_table(measured: Sequence[Measurement]) -> str:
    lines = ["max_pixels  accuracy  worst skill       tokens/picture  first token  requests in KV"]
    for one in measured:
        skill, share = one.worst()
        tokens = "-" if one.tokens_per_image is None else f"{one.tokens_per_image:.1f}"
        fit = "-" if one.concurrency is None else f"{one.concurrency:,}"
        quality = f"{one.accuracy:>9.1%}  {f'{skill} {share:.0%}':<17}"
        cost = f"{tokens:>14} {one.first_token_ms:>9.0f} ms {fit:>15}"
        lines.append(f"{one.max_pixels:>10,} {quality} {cost}")
    return "\n".join(lines)


def text_chart(measured: Sequence[Measurement], advice: Advice, questions: QuestionSet) -> str:
    """A bar per setting for all questions, and for the groups that lose most."""
    groups = questions.grouped()
    names = [cliff.group for cliff in advice.cliffs][:_MAX_BARS]
    lines = ["max_pixels  " + "  ".join(f"{name:<{_BAR + 5}}" for name in ["all", *names]).rstrip()]
    for one in measured:
        shares = [one.accuracy, *(one.of(groups[name]) for name in names)]
        bars = "  ".join(f"{_bar(share)} {share:>4.0%}" for share in shares)
        mark = "  <- recommended" if one.max_pixels == advice.max_pixels else ""
        lines.append(f"{one.max_pixels:>10,}  {bars}{mark}")
    return "\n".join(lines)


def _bar(share: float) -> str:
    filled = round(share * _BAR)
    return "█" * filled + "·" * (_BAR - filled)


class _Frame(NamedTuple):
    """The plot area in SVG units, and the range of max_pixels."""

    lowest: int
    highest: int
    left: float = 56
    right: float = 520
    top: float = 46
    bottom: float = 300

    def x(self, pixels: int) -> float:
        span = math.log(self.highest / self.lowest) or 1.0
        return self.left + (self.right - self.left) * math.log(pixels / self.lowest) / span

    def y(self, share: float) -> float:
        return self.bottom - (self.bottom - self.top) * share


def svg(measured: Sequence[Measurement], advice: Advice, questions: QuestionSet) -> str:
    """Accuracy of each group against pixels on a logarithmic axis, the recommendation marked."""
    sizes = [one.max_pixels for one in measured]
    frame = _Frame(min(sizes), max(sizes))
    parts = [
        text(frame.left, 22, f"{questions.name}: accuracy against max_pixels", size=15),
        *_axes(frame, sizes),
        *_mark(frame, advice.max_pixels),
        *_curves(frame, measured, questions),
    ]
    return document(680, 350, parts)


def _axes(frame: _Frame, sizes: Sequence[int]) -> Iterator[str]:
    for percent in range(0, 101, 20):
        y = frame.y(percent / 100)
        yield f'<path d="M{frame.left} {y:.1f}H{frame.right}" stroke="#e3e3e3"/>'
        yield text(frame.left - 8, y + 4, f"{percent} %", anchor="end")
    for pixels in sizes:
        yield f'<path d="M{frame.x(pixels):.1f} {frame.bottom}v5" stroke="#555555"/>'
        yield text(frame.x(pixels), frame.bottom + 20, f"{pixels:,}", anchor="middle")
    yield text((frame.left + frame.right) / 2, frame.bottom + 40, "max_pixels", anchor="middle")


def _mark(frame: _Frame, pixels: int) -> Iterator[str]:
    x = frame.x(pixels)
    yield f'<path d="M{x:.1f} {frame.top}V{frame.bottom}" stroke="#333333" stroke-dasharray="4 4"/>'
    anchor = "middle" if x < frame.right - 60 else "end"
    yield text(x, frame.top - 8, f"recommended: {pixels:,}", anchor)


def _curves(frame: _Frame, measured: Sequence[Measurement], questions: QuestionSet) -> Iterator[str]:
    """Curves with a legend, ordered by accuracy at the left end, since they meet at the right."""
    lowest = min(measured, key=lambda one: one.max_pixels)
    groups = sorted(questions.grouped().items(), key=lambda item: -lowest.of(item[1]))
    for row, (name, skills) in enumerate(groups):
        color = COLORS[row % len(COLORS)]
        points = [(frame.x(one.max_pixels), frame.y(one.of(skills))) for one in measured]
        yield curve(points, color)
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points)
        y = frame.top + 20 + 20 * row
        yield f'<path d="M{frame.right + 20} {y - 4:.1f}h18" stroke="{color}" stroke-width="3"/>'
        yield text(frame.right + 44, y, name)
