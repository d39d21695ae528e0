"""`saccade cluster status`: the workers of a running server as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.cli.get_json import get_json
from saccade.errors import ConfigError, member

_COLUMNS = ("worker", "node", "pid", "device", "state", "KV used", "queued", "running", "waiting", "restarts")


def add(command: argparse.ArgumentParser) -> None:
    verbs = command.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    status = verbs.add_parser(
        "status",
        help="who is where, in which state, how full",
        description="Show a running server's engines and encoder workers: machine, process, device, state, "
        "KV blocks in use, queued work in prompt tokens, requests that run and wait.",
        epilog="Example: saccade cluster status --url http://10.0.0.1:8000 --api-key KEY",
    )
    add = status.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server (default: http://127.0.0.1:8000)")
    add("--api-key", metavar="KEY", help="of the server, if it wants one")
    add("--json", action="store_true", help="print a JSON list instead of a table")
    add("--debug", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    workers = fetch_workers(args.url, args.api_key)
    print(json.dumps(workers, indent=2) if args.json else status_table(workers))
    return 0


def fetch_workers(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """ConfigError if no server names its workers."""
    status, body = get_json(f"{url.rstrip('/')}/v1/engine", api_key, server=url)
    if body is None:
        raise ConfigError(f"what answers at {url} is no Saccade server; --url says where it is")
    if status == 401:
        raise ConfigError(f"the server at {url} wants its key: --api-key KEY")
    workers = member(body, "workers")
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
    kv_use = worker["kv_use"]
    values = [
        f"{worker['role']} {worker['index']}",
        *[worker[name] for name in ("node", "pid", "device", "state")],
        None if kv_use is None else f"{kv_use:.0%}",
        *[worker[name] for name in ("queued_work", "running", "waiting", "restarts")],
    ]
    return tuple("-" if value is None else str(value) for value in values)
