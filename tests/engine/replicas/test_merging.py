"""One view of several engines: limits, state and counters."""

from __future__ import annotations

from saccade.engine.ipc.client import EngineInfo
from saccade.engine.ipc.supervisor import EngineStatus, State
from saccade.engine.replicas.merging import merged_info, merged_stats, merged_status
from tests.helpers.engine.scheduling import make_config


def status(state: State, age: float, restarts: int = 0, error: str | None = None) -> EngineStatus:
    return EngineStatus(state, age, restarts, error, pid=1)


def test_the_smallest_limits_hold_and_reasons_are_told_once() -> None:
    infos = [
        EngineInfo(make_config(num_blocks=90, max_model_len=50), ("device cpu", "90 blocks"), 2.0),
        EngineInfo(make_config(num_blocks=80, max_model_len=60), ("device cpu", "80 blocks"), 3.0),
    ]
    merged = merged_info(infos)
    assert (merged.limits.num_blocks, merged.limits.max_model_len, merged.start_seconds) == (80, 50, 3.0)
    assert merged.reasons == ("2 replicas", "engine 0: device cpu", "engine 0: 90 blocks", "engine 1: 80 blocks")


def test_the_state_is_that_of_the_replica_that_is_best_off() -> None:
    merged = merged_status([status("restarting", 0.1, 2, "it died"), status("ready", 9.0), status("ready", 0.2)])
    assert (merged.state, merged.heartbeat_age, merged.restarts, merged.last_error) == ("ready", 0.2, 2, "it died")
    assert merged_status([status("restarting", 0.1), status("starting", 9.0)]).state == "starting"


def test_counters_are_summed_and_constants_are_not() -> None:
    parts = [
        {
            "running": 1,
            "kv": {"used": 3},
            "embedding_bytes_per_slot": 8,
            "recent_steps": [1],
            "tenants": {"a": {"n": 1}},
        },
        {
            "running": 2,
            "kv": {"used": 4},
            "embedding_bytes_per_slot": 8,
            "recent_steps": [2],
            "tenants": {"b": {"n": 5}},
        },
    ]
    assert merged_stats([*parts, {}]) == {
        "running": 3,
        "kv": {"used": 7},
        "embedding_bytes_per_slot": 8,
        "recent_steps": [2],
        "tenants": {"a": {"n": 1}, "b": {"n": 5}},
    }
    assert merged_stats([{}, {}]) == {}
