"""A plan as an SVG: the first token and the time between tokens against requests/s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from saccade.apps.plan.planner import DeploymentPlan
from saccade.apps.plan.throughput import load_at
from saccade.apps.svg import COLORS, Point, curve, document, text

_POINTS = 60
_SHOWN = 0.98  # of the rate that saturates a GPU: at all of it the queue is endless
_TICKS = 5


class _Frame(NamedTuple):
    """The plot area in SVG units, and what its edges stand for."""

    rate: float
    ms: float
    left: float = 64
    right: float = 520
    top: float = 46
    bottom: float = 300

    def at(self, rate: float, ms: float) -> Point:
        x = self.left + (self.right - self.left) * rate / self.rate
        return x, self.bottom - (self.bottom - self.top) * min(ms / self.ms, 1.0)


def svg(plan: DeploymentPlan) -> str:
    deployment = plan.deployment
    rates = [plan.saturated * _SHOWN * step / _POINTS for step in range(1, _POINTS + 1)]
    idle = plan.demand.first * 1e3
    curves: dict[str, list[Point]] = {"first token, mean": [], "first token, p99": [], "between tokens": []}
    for rate in rates:
        if load := load_at(plan.demand, rate):
            times = (idle + load.wait * 1e3, idle + load.wait_p99 * 1e3, load.between * 1e3)
            for points, ms in zip(curves.values(), times, strict=True):
                points.append((rate, ms))
    highest = max([5 * idle, *filter(None, (deployment.workload.ttft_ms, deployment.workload.itl_ms))])
    frame = _Frame(max(plan.saturated, 1e-9), highest * 1.1)
    title = f"{deployment.checkpoint.path} on {deployment.hardware.name}: milliseconds against requests/s"
    parts = [
        text(frame.left, 22, title, size=15),
        *_axes(frame),
        *_marks(frame, plan),
        *_curves(frame, curves),
    ]
    return document(700, 350, parts)


def _axes(frame: _Frame) -> Iterator[str]:
    for tick in range(_TICKS + 1):
        ms = frame.ms * tick / _TICKS
        y = frame.at(0, ms)[1]
        yield f'<path d="M{frame.left} {y:.1f}H{frame.right}" stroke="#e3e3e3"/>'
        yield text(frame.left - 8, y + 4, f"{ms:,.0f}", anchor="end")
        rate = frame.rate * tick / _TICKS
        yield text(frame.at(rate, 0)[0], frame.bottom + 20, f"{rate:.3g}", anchor="middle")
    yield text((frame.left + frame.right) / 2, frame.bottom + 40, "requests/s", anchor="middle")


def _marks(frame: _Frame, plan: DeploymentPlan) -> Iterator[str]:
    """The sustained rate, and the service level."""
    x = frame.at(plan.rate, 0)[0]
    yield f'<path d="M{x:.1f} {frame.top}V{frame.bottom}" stroke="#333333" stroke-dasharray="4 4"/>'
    yield text(x, frame.top - 6, f"sustained: {plan.rate:.2f}", "end")
    workload = plan.deployment.workload
    for name, ms in (("first token", workload.ttft_ms), ("between tokens", workload.itl_ms)):
        if ms is not None:
            y = frame.at(0, ms)[1]
            yield f'<path d="M{frame.left} {y:.1f}H{frame.right}" stroke="#888888" stroke-dasharray="2 3"/>'
            yield text(frame.left + 4, y - 4, f"service level, {name}: {ms:g} ms")


def _curves(frame: _Frame, curves: dict[str, list[Point]]) -> Iterator[str]:
    for row, (name, points) in enumerate(curves.items()):
        yield curve([frame.at(*point) for point in points], COLORS[row])
        y = frame.top + 20 + 20 * row
        yield f'<path d="M{frame.right + 20} {y - 4:.1f}h18" stroke="{COLORS[row]}" stroke-width="3"/>'
        yield text(frame.right + 44, y, name)
