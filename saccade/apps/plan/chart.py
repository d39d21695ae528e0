"""A plan as an SVG: the first token and the time between tokens against requests/s."""

from __future__ import annotations

from collections.abc import Iterator

from saccade.apps.plan.planner import DeploymentPlan
from saccade.apps.plan.throughput import load_at
from saccade.apps.svg import Panel, Point, color_of, curve, dashes, document, legend, steps, text

_POINTS = 60
_MAX_SHARE = 0.98  # of the rate that saturates a GPU: at all of it the queue is endless


def svg(plan: DeploymentPlan) -> str:
    deployment = plan.deployment
    title = f"{deployment.checkpoint.path} on {deployment.hardware.name}"
    workload = deployment.workload
    levels = {"first token": workload.ttft_ms, "between tokens": workload.itl_ms}
    highest = max([5 * plan.demand.first * 1e3, *filter(None, levels.values())]) * 1.1
    panel = Panel(64, 456, 46, (0.0, max(plan.saturated, 1e-9)), (0.0, highest))
    curves = _curves(plan)
    lines = enumerate(curves.values())
    columns = {rate: f"{rate:.3g}" for rate in steps(panel.x)}
    parts = [
        text(panel.left, 22, f"{title}: milliseconds against requests/s", size=15),
        *panel.axes("requests/s", columns, {ms: f"{ms:,.0f}" for ms in steps(panel.y)}),
        panel.upright(plan.rate),
        text(panel.at(plan.rate, 0)[0], panel.top - 6, f"sustained: {plan.rate:.2f}", "end"),
        *_levels(panel, levels),
        *(curve([panel.at(*point) for point in line], color_of(row)) for row, line in lines),
        *legend(panel.right + 20, panel.top + 20, list(curves)),
    ]
    return document(700, 350, parts)


def _curves(plan: DeploymentPlan) -> dict[str, list[Point]]:
    idle = plan.demand.first * 1e3
    curves: dict[str, list[Point]] = {"first token, mean": [], "first token, p99": [], "between tokens": []}
    for step in range(1, _POINTS + 1):
        rate = plan.saturated * _MAX_SHARE * step / _POINTS
        if load := load_at(plan.demand, rate):
            times = (idle + load.wait * 1e3, idle + load.wait_p99 * 1e3, load.between * 1e3)
            for points, ms in zip(curves.values(), times, strict=True):
                points.append((rate, ms))
    return curves


def _levels(panel: Panel, levels: dict[str, float | None]) -> Iterator[str]:
    for name, ms in levels.items():
        if ms is not None:
            y = panel.at(0, ms)[1]
            yield dashes(f"M{panel.left:g} {y:.1f}H{panel.right:g}")
            yield text(panel.left + 4, y - 4, f"service level, {name}: {ms:g} ms")
