"""`saccade cluster status`: the workers of a running server as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.cli.get_json import get_json
from saccade.errors import ConfigError

_COLUMNS = ("worker", "node", "pid", "device", "state", "KV used", "queued", "running", "waiting", "restarts")


def fetch_workers(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """ConfigError if no server names its workers."""
    status, body = get_json(f"{url.rstrip('/')}/v1/engine", api_key, server=url)
    if body is None:
        raise ConfigError(f"what answers at {url} is no Saccade server; --url says where it is")
    if status == 401:
        raise ConfigError(f"the server at {url} wants its key: --api-key KEY")
    workers = body.get("workers") if isinstance(body, dict) else None
    if status != 200 or not isinstance(workers, list):
        problem = f"{url}/v1/engine names no workers (status {status})"
        raise ConfigError(f"{problem}; only an operator's key sees them")
    return workers


def status_table(workers: Sequence[Mapping[str, Any]]) -> str:
    rows = [_COLUMNS, *[_cells(worker) for worker in workers]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for worker in workers:
        if worker["last_error"] and worker["state"] != "ready":
            lines.append(f"{worker['role']} {worker['index']}: {worker['last_error']}")
    return "\n".join(lines)


def _cells(worker: Mapping[str, Any]) -> tuple[str, ...]:
    used = worker["kv_use"]
    values = [
        f"{worker['role']} {worker['index']}",
        *[worker[name] for name in ("node", "pid", "device", "state")],
        None if used is None else f"{used:.0%}",
        *[worker[name] for name in ("queued_work", "running", "waiting", "restarts")],
    ]
    return tuple("-" if value is None else str(value) for value in values)
