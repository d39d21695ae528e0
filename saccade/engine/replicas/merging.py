"""One view of several engines: the limits that hold for all of them, their common state, summed counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from saccade.engine.ipc.client import EngineInfo
from saccade.engine.ipc.supervisor import EngineStatus, State

_MINIMA = ("max_model_len", "num_blocks", "encoder_budget", "encoder_cache_slots")
_STATES: tuple[State, ...] = (
    "ready",
    "draining",
    "starting",
    "restarting",
    "sleeping",
    "stopped",
)  # best first
_NOT_SUMMED = (
    "recent_steps",
    "embedding_bytes_per_slot",
    "kv_bytes_per_block",
    "kv_bytes_per_token",
    "kv_cache_dtype",
)


def merged_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """A request may go to any replica, so the smallest limits hold."""
    first = infos[0]
    minima = {name: min(getattr(info.limits, name) for info in infos) for name in _MINIMA}
    reasons = [f"{len(infos)} replicas"] + [f"engine 0: {reason}" for reason in first.reasons]
    for index, info in enumerate(infos[1:], 1):
        reasons += [f"engine {index}: {reason}" for reason in info.reasons if reason not in first.reasons]
    start_seconds = max(info.start_seconds for info in infos)
    return EngineInfo(replace(first.limits, **minima), tuple(reasons), start_seconds)


def merged_status(statuses: Sequence[EngineStatus]) -> EngineStatus:
    """The state and the heartbeat of the replica that is best off."""
    best = min(statuses, key=lambda status: (_STATES.index(status.state), status.heartbeat_age))
    return EngineStatus(
        state=best.state,
        heartbeat_age=best.heartbeat_age,
        restarts=sum(status.restarts for status in statuses),
        last_error=next((status.last_error for status in statuses if status.last_error), None),
        pid=None,
    )


def merged_stats(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums; the latest steps are those of the replica with the most running requests."""
    parts = [part for part in stats if part]
    if not parts:
        return {}
    busiest = max(parts, key=lambda part: part["running"])
    return {**_summed(parts), **{name: busiest[name] for name in _NOT_SUMMED if name in busiest}}


def _summed(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, Mapping):
                sums[name] = _summed([sums.get(name, {}), value])
            elif isinstance(value, (int, float)):
                sums[name] = sums.get(name, 0) + value
    return sums
