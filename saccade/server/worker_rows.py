"""The workers of a server for its operator: where they are, in which state, how full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade.engine.ipc.supervisor import EngineStatus
from saccade.server.service import Service


def worker_rows(service: Service) -> list[dict[str, Any]]:
    """One for each engine, then one for each encoder worker; `saccade cluster status` shows them."""
    engine = service.engine
    views = enumerate(engine.replicas())
    rows = [_row("engine", index, view.status, view.queued_work, view.stats) for index, view in views]
    if not rows:
        rows.append(_row("engine", 0, engine.status(), None, engine.stats()))
    for index, view in enumerate(service.encoders()):
        rows.append(_row("encoder", index, view.status, None, {"waiting": view.queue}))
    return rows


def _row(
    role: str, index: int, status: EngineStatus, queued_work: int | None, stats: Mapping[str, Any]
) -> dict[str, Any]:
    kv = stats.get("kv", {})
    return {
        "role": role,
        "index": index,
        **{name: getattr(status.place, name, None) for name in ("node", "pid", "device")},
        "state": status.state,
        "restarts": status.restarts,
        "last_error": status.last_error,
        "kv_use": round(kv["used"] / kv["total"], 4) if kv else None,
        "queued_work": queued_work,  # in prompt tokens; None: nothing is routed
        "running": stats.get("running"),
        "waiting": stats.get("waiting"),  # requests, or images of an encoder worker
    }
