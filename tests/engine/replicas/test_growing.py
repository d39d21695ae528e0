"""A set of replicas that grows and shrinks, with fake engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from saccade.engine import autoscale
from saccade.engine.ipc import worker_places
from saccade.engine.ipc.kv_event_publisher import KVEventEndpoints
from saccade.engine.replicas.replica_set import ReplicaSet
from saccade.options.engine import Options
from tests.helpers.engine.scheduling import make_request
from tests.helpers.fakes.fake_worker import collect, endless, is_running, pids_of, run_replicas, submit, until


def states(replicas: ReplicaSet) -> list[str]:
    return [view.status.state for view in replicas.replicas()]


def test_a_replica_that_is_added_takes_requests() -> None:
    async def test(replicas: ReplicaSet) -> None:
        assert states(replicas) == ["ready", "stopped"]
        await replicas.grow()
        assert states(replicas) == ["ready", "ready"]
        for number in range(4):
            await collect(await submit(replicas, make_request(str(number), [number] * 9, max_tokens=3)))
        await until(lambda: all(view.stats.get("steps") for view in replicas.replicas()))
        await replicas.grow()  # there is no place for a third
        assert len(pids_of(replicas)) == 2

    run_replicas(test, 1, bounds=(1, 2))


def test_a_replica_that_is_removed_finishes_its_requests_first() -> None:
    async def test(replicas: ReplicaSet) -> None:
        stay, leave = [await submit(replicas, endless(str(number))) for number in range(2)]
        more = await submit(replicas, endless("more"))  # on replica 0, which has more to do then
        for stream in (stay, leave, more):
            await anext(stream)
        pid = pids_of(replicas)[1]
        removal = asyncio.create_task(replicas.shrink())
        await until(lambda: states(replicas) == ["ready", "draining"])
        before = leave.num_tokens
        await until(lambda: leave.num_tokens > before)
        new = await submit(replicas, make_request("new", 5, max_tokens=2))
        assert len(await collect(new)) == 2 and not removal.done()
        leave.cancel()
        assert (await collect(leave))[-1].finish_reason == "abort"
        await removal
        assert states(replicas) == ["ready", "stopped"] and not is_running(pid)
        await replicas.grow()  # into the same place
        assert states(replicas) == ["ready", "ready"]
        for stream in (stay, more):
            stream.cancel()
            await collect(stream)

    run_replicas(test, 2, bounds=(1, 2), step_seconds=0.01)


def test_the_last_replica_is_never_removed() -> None:
    async def test(replicas: ReplicaSet) -> None:
        await replicas.shrink()
        assert states(replicas) == ["ready", "stopped"]

    run_replicas(test, 1, bounds=(1, 2))


def test_a_replica_that_cannot_start_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def test(replicas: ReplicaSet) -> None:
        make = replicas._make_client
        replicas._make_client = lambda **how: make(options=Options(device="abacus"), **how)
        replicas._places.workers[1] = replicas._new_client(1)
        await replicas.grow()
        assert states(replicas) == ["ready", "stopped"] and "no device abacus" in caplog.text
        assert len(await collect(await submit(replicas, make_request("a", 9, max_tokens=3)))) == 3

    run_replicas(test, 1, bounds=(1, 2))


def test_load_adds_a_replica_and_its_end_removes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_places, "AUTOSCALE_SECONDS", 0.02)
    monkeypatch.setattr(autoscale, "HIGH_WORK", 10)
    monkeypatch.setattr(autoscale, "SHRINK_AFTER", 3)

    async def test(replicas: ReplicaSet) -> None:
        stream = await submit(replicas, endless())
        await until(lambda: states(replicas) == ["ready", "ready"])
        stream.cancel()
        await collect(stream)
        await until(lambda: sorted(states(replicas)) == ["ready", "stopped"])

    run_replicas(test, 1, bounds=(1, 2), step_seconds=0.01)


def test_places_of_replicas_keep_their_addresses_of_kv_events_until_the_end(tmp_path: Path) -> None:
    endpoints = KVEventEndpoints(f"ipc://{tmp_path}/events")

    async def test(replicas: ReplicaSet) -> None:
        await replicas.grow()
        await replicas.shrink()
        await replicas.grow()

    for _ in range(2):  # the second set takes the addresses of the first
        run_replicas(test, 1, bounds=(1, 3), kv_events=endpoints)
