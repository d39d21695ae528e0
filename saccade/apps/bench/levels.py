"""A load at several numbers of clients, one after the other: a row for each, with what the server says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from saccade.apps.bench.report import Figures, as_json

SERVER_SECONDS = {  # our metrics, as the table calls them. Sums over requests
    "queue": "saccade:queue_seconds_sum",
    "pixels": "saccade:media_decode_seconds_sum",  # decoded or rendered, and prepared
    "encode": "saccade:encode_seconds_sum",
    "prefill": "saccade:prefill_seconds_sum",
    "processor": "saccade:tenant_processor_seconds_total",
}
_SAMPLE = re.compile(r"^([\w:]+)(?:\{[^\n]*\})? ([0-9.e+-]+)$", re.MULTILINE)
_COLUMNS = (
    ("at a time", 9),
    ("requests/s", 12),
    ("errors", 8),
    ("tokens out/s", 14),
    ("first token p50 / p99", 24),
    ("between tokens p50 / p99", 26),
)


class LoadLevel(NamedTuple):
    clients: int
    figures: Figures
    server_ms: Mapping[str, float]  # of a request; empty where the server does not tell

    def row(self) -> str:
        row = self.figures
        times = [f"{ms[0]:.1f} / {ms[-1]:.1f}" if ms else "-" for ms in (row.ttft_ms, row.itl_ms)]
        rates = [f"{row.requests_per_s:.2f}", str(row.errors), f"{row.output_tokens_per_s:.0f}"]
        server = [f"{ms:.1f}" for ms in self.server_ms.values()]
        return _aligned([str(self.clients), *rates, *times], server)

    def as_json(self) -> dict[str, Any]:
        return {"clients": self.clients, **as_json(self.figures), "server_ms": dict(self.server_ms)}


def title(server_ms: Mapping[str, float]) -> str:
    """Two lines. Times are milliseconds."""
    names = _aligned([name for name, _ in _COLUMNS], list(server_ms))
    if not server_ms:
        return names
    width = sum(width for _, width in _COLUMNS)
    return f"{'':{width}}   the server's, of a request\n{names}"


def seconds_of(metrics: str) -> dict[str, float]:
    """From the text of `/metrics`: those that are there."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics):
        sums[name] = sums.get(name, 0.0) + float(value)
    return {short: sums[name] for short, name in SERVER_SECONDS.items() if name in sums}


def ms_between(before: Mapping[str, float], after: Mapping[str, float], requests: int) -> dict[str, float]:
    return {name: 1e3 * (after[name] - before.get(name, 0.0)) / max(1, requests) for name in after}


def _aligned(ours: list[str], server: list[str]) -> str:
    cells = [f"{text:>{width}}" for text, (_, width) in zip(ours, _COLUMNS, strict=True)]
    return "".join(cells + [f"{text:>11}" for text in server])
