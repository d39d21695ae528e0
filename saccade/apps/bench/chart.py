"""A load as an SVG: how times are distributed, or how they grow with the rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from saccade.apps.bench.goodput import Trial
from saccade.apps.bench.load import Result
from saccade.apps.bench.report import Slo, gaps_ms, ttft_ms
from saccade.apps.svg import COLORS, Panel, Point, color_of, curve, dashes, document, legend, steps, text

_PANEL = 470.0  # SVG units from one panel to the next
_WIDTH = 970
_POINTS = 200  # of a curve, at most
_MIN_MS = 0.01  # where a logarithmic axis begins at the lowest


def distributions(groups: Mapping[str, Sequence[Result]], slo: Slo) -> str:
    """The share of first tokens, and of gaps between tokens, that came within a time: a curve a group."""
    good = {name: [r for r in group if r.sample.error is None] for name, group in groups.items()}
    first = {name: [ttft_ms(r) for r in group] for name, group in good.items()}
    between = {name: [ms for r in group for ms in gaps_ms(r)] for name, group in good.items()}
    parts: list[str] = []
    panels = (("first token", first, slo.ttft_ms), ("between tokens", between, slo.itl_ms))
    for place, (title, times, level) in enumerate(panels):
        panel = _panel(place, _decades(times, level), 100.0, is_log=True)
        parts += _axes(panel, f"{title}: % within a time", "milliseconds")
        parts += _level(panel.at(level, 0), panel.at(level, 100), level, anchor="end")
        for row, values in enumerate(times.values()):
            if values:
                parts.append(curve([panel.at(*point) for point in _shares(values)], color_of(row)))
    return document(_WIDTH, 360 + 20 * len(groups), [*parts, *legend(70, 362, list(groups))])


def rates(trials: Sequence[Trial], slo: Slo) -> str:
    """The 99th percentiles against the rate. A filled mark kept to the service levels."""
    trials = sorted((trial for trial in trials if trial.figures.ttft_ms), key=lambda trial: trial.rate)
    highest = max((trial.rate for trial in trials), default=1.0) * 1.05
    parts: list[str] = []
    panels = (("first token", "ttft_ms", slo.ttft_ms), ("between tokens", "itl_ms", slo.itl_ms))
    for place, (title, kind, level) in enumerate(panels):
        marks = [
            (trial, getattr(trial.figures, kind)[-1]) for trial in trials if getattr(trial.figures, kind)
        ]
        panel = _panel(place, (0.0, highest), max([2 * level, *(ms for _, ms in marks)]))
        parts += _axes(panel, f"{title}: p99 in milliseconds", "requests/s")
        parts += _level(panel.at(highest, level), panel.at(0, level), level, anchor="start")
        parts.append(curve([panel.at(trial.rate, ms) for trial, ms in marks], COLORS[place]))
        parts += [_mark(panel.at(trial.rate, ms), COLORS[place], trial.is_kept) for trial, ms in marks]
    words = "filled: within both service levels, without errors"
    return document(_WIDTH, 380, [*parts, text(70, 365, words)])


def _panel(place: int, x: tuple[float, float], highest: float, *, is_log: bool = False) -> Panel:
    return Panel(70 + place * _PANEL, 380, 60, x, (0.0, highest), is_log)


def _shares(values: Sequence[float]) -> list[Point]:
    """(ms, % of the values that are no longer), the longest and the shortest among them."""
    ordered = sorted(max(value, _MIN_MS) for value in values)
    last = len(ordered) - 1
    places = sorted({round(last * i / (_POINTS - 1)) for i in range(_POINTS)})
    return [(ordered[0], 0.0), *((ordered[i], 100 * (i + 1) / len(ordered)) for i in places)]


def _decades(times: Mapping[str, Sequence[float]], level: float) -> tuple[float, float]:
    """Powers of ten around all times and the service level."""
    values = [max(value, _MIN_MS) for group in times.values() for value in group] + [level]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _axes(panel: Panel, title: str, unit: str) -> Iterator[str]:
    yield text(panel.left, 30, title, size=15)
    columns = steps(panel.x)
    if panel.is_log:
        low, high = (round(math.log10(end)) for end in panel.x)
        columns = [10.0**power for power in range(low, high + 1)]
    labels = {value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in columns}
    yield from panel.axes(unit, labels, {value: f"{value:,.0f}" for value in steps(panel.y)})


def _level(start: Point, end: Point, ms: float, anchor: str) -> Iterator[str]:
    line = f"M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"
    yield dashes(line)
    yield text(end[0], end[1] - 4, f"service level: {ms:g} ms", anchor)


def _mark(at: Point, color: str, is_filled: bool) -> str:
    fill = color if is_filled else "#ffffff"
    return f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4" fill="{fill}" stroke="{color}"/>'
