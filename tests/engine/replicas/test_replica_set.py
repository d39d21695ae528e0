"""Several engines as one, with fake workers: routing, deaths before and after the first token, restarts, stopping."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from saccade.engine.replicas import replica_set
from saccade.engine.replicas.replica_set import ReplicaSet
from saccade.errors import ConfigError, EngineUnavailable, RequestError
from saccade.options.engine import Options
from tests.helpers.engine.scheduling import FakeImage, make_config, make_request
from tests.helpers.fakes.fake_worker import (
    BREAKS_THE_CORE,
    HANGS_REPLICA,
    collect,
    endless,
    fake_client,
    is_running,
    pids_of,
    run_bounded,
    run_replicas,
    submit,
    until,
)

PHOTO = FakeImage("photo", 200)


def states(replicas: ReplicaSet) -> list[str]:
    return [view.status.state for view in replicas.replicas()]


def encoded(replicas: ReplicaSet) -> list[int]:
    return [view.stats.get("encoder", {}).get("encoded", 0) for view in replicas.replicas()]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# --- all goes well --------------------------------------------------------------------------------------------------


def test_many_requests_at_once_are_all_answered_by_all_replicas() -> None:
    async def test(replicas: ReplicaSet) -> None:
        async def one(index: int) -> None:
            events = await collect(await submit(replicas, make_request(str(index), [index] * 9, max_tokens=20)))
            assert len(events) == 20 and {event.request_id for event in events} == {str(index)}

        await asyncio.gather(*[one(index) for index in range(40)])
        await until(lambda: all(view.stats.get("steps") for view in replicas.replicas()))
        replicas.check()
        assert replicas.stats()["steps"] == sum(view.stats["steps"] for view in replicas.replicas())

    run_replicas(test, 3)


def test_requests_with_one_image_go_where_it_is() -> None:
    async def test(replicas: ReplicaSet) -> None:
        for number in range(6):
            await collect(await submit(replicas, make_request(str(number), [number] * 9, PHOTO, 5)))
        await until(lambda: sum(encoded(replicas)))
        assert sorted(encoded(replicas)) == [0, 1]
        for number in range(4):  # others go to the other, too
            await collect(await submit(replicas, make_request(f"new {number}", FakeImage(str(number), 50))))
        await until(lambda: sum(encoded(replicas)) == 5)
        assert min(encoded(replicas)) >= 1

    run_replicas(test)


def test_a_refusal_reaches_the_caller() -> None:
    async def test(replicas: ReplicaSet) -> None:
        assert replicas.info is not None and replicas.info.limits == make_config()
        with pytest.raises(RequestError, match="--max-model-len"):
            await submit(replicas, make_request("long", 20_000))
        replicas.check()

    run_replicas(test)


def test_replicas_that_cannot_start_say_why_and_leave_nothing() -> None:
    async def body() -> None:
        replicas = ReplicaSet(lambda **how: fake_client(options=Options(device="abacus"), **how), 2, (2, 2))
        with pytest.raises(ConfigError, match="no device abacus"):
            await replicas.start()
        with pytest.raises(EngineUnavailable):
            await submit(replicas, make_request("a", 3))
        pids = pids_of(replicas)
        await replicas.stop()
        assert not any(is_running(pid) for pid in pids)

    run_bounded(body())


# --- a replica dies -------------------------------------------------------------------------------------------------


def test_a_request_without_a_token_moves_and_its_reader_does_not_notice() -> None:
    async def test(replicas: ReplicaSet) -> None:
        first, second = pids_of(replicas)
        os.kill(first, signal.SIGSTOP)  # it does not even admit it
        waiting = asyncio.create_task(submit(replicas, make_request("a", 9, max_tokens=7)))
        await until(lambda: replicas.replicas()[0].queued_work)
        kill(first)
        events = await collect(await waiting)
        assert len(events) == 7 and events[-1].finish_reason == "length"
        assert replicas.stats()["moved"] == 1
        assert is_running(second)

    run_replicas(test)


def test_an_admitted_request_moves_too() -> None:
    async def test(replicas: ReplicaSet) -> None:
        stream = await submit(replicas, make_request("a", [HANGS_REPLICA] * 9, max_tokens=2))
        kill(pids_of(replicas)[0])
        assert len(await collect(stream)) == 2

    run_replicas(test)


def test_a_request_with_tokens_gets_the_error_and_the_other_replica_goes_on() -> None:
    async def test(replicas: ReplicaSet) -> None:
        lost, other = [await submit(replicas, endless(str(number))) for number in range(2)]
        await anext(lost)
        await anext(other)
        kill(pids_of(replicas)[0])
        with pytest.raises(EngineUnavailable, match="send the request again"):
            await collect(lost)
        before = other.num_tokens
        await until(lambda: other.num_tokens > before)
        assert replicas.status().state == "ready"
        assert states(replicas)[1] == "ready"
        other.cancel()
        assert (await collect(other))[-1].finish_reason == "abort"

    run_replicas(test)


def test_a_replica_that_restarts_gets_no_requests_and_begins_empty() -> None:
    async def test(replicas: ReplicaSet) -> None:
        for number in range(2):
            await collect(await submit(replicas, make_request(f"{number}", [number] * 9, FakeImage(str(number), 100))))
        await until(lambda: encoded(replicas) == [1, 1])
        kill(pids_of(replicas)[0])
        await until(lambda: states(replicas)[0] == "restarting")
        for number in range(4):  # also those whose image the dead one had
            await collect(await submit(replicas, make_request(f"a{number}", 9, FakeImage("0", 100))))
        await until(lambda: states(replicas) == ["ready", "ready"])
        await collect(await submit(replicas, make_request("b", 9, FakeImage("0", 100))))
        await until(lambda: sum(encoded(replicas)) >= 2)
        assert encoded(replicas)[1] == 2 and replicas.status().restarts == 1

    run_replicas(test)


def test_a_request_under_which_two_replicas_died_is_not_moved_again() -> None:
    async def test(replicas: ReplicaSet) -> None:
        other = await submit(replicas, endless())  # on replica 0
        await anext(other)
        with pytest.raises(EngineUnavailable):
            await collect(await submit(replicas, make_request("bad", [BREAKS_THE_CORE] * 9)))
        await until(lambda: replicas.status().restarts == 2)
        alive = [view.status.restarts for view in replicas.replicas()]
        assert sorted(alive) == [0, 1, 1] and alive[0] == 0
        before = other.num_tokens
        await until(lambda: other.num_tokens > before)

    run_replicas(test, 3)


def test_a_refusal_after_a_move_ends_the_stream_with_its_error() -> None:
    async def test(replicas: ReplicaSet) -> None:
        await anext(await submit(replicas, endless()))  # replica 0 is full
        moving = await submit(replicas, make_request("a", [HANGS_REPLICA + 1] * 9))
        kill(pids_of(replicas)[1])
        last = (await collect(moving))[-1]
        assert last.finish_reason == "error" and last.error is not None and last.error.code == "overloaded"

    run_replicas(test, options=Options(max_waiting=0, max_num_seqs=1))


def test_a_cancelled_request_does_not_move() -> None:
    async def test(replicas: ReplicaSet) -> None:
        stream = await submit(replicas, make_request("a", [HANGS_REPLICA] * 9))
        stream.cancel()
        kill(pids_of(replicas)[0])
        with pytest.raises(EngineUnavailable):
            await collect(stream)
        await until(replicas.stats)
        assert replicas.stats()["moved"] == 0

    run_replicas(test)


def test_when_all_are_dead_requests_are_told() -> None:
    async def test(replicas: ReplicaSet) -> None:
        stream = await submit(replicas, endless())
        for pid in pids_of(replicas):
            kill(pid)
        with pytest.raises(EngineUnavailable):
            await collect(stream)
        await until(lambda: "ready" not in states(replicas))
        with pytest.raises(EngineUnavailable, match="the engine is restarting") as caught:
            await submit(replicas, make_request("a", 3))
        assert caught.value.retry_after > 0

    run_replicas(test, step_seconds=0.1)


def test_a_hung_replica_gets_no_new_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "_SILENT_SECONDS", 1.5)

    async def test(replicas: ReplicaSet) -> None:
        hung = pids_of(replicas)[0]
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: replicas.replicas()[0].status.heartbeat_age > 1.5)
        for number in range(3):
            await collect(await submit(replicas, make_request(str(number), [number] * 9)))
        os.kill(hung, signal.SIGCONT)

    run_replicas(test)


# --- stopping -------------------------------------------------------------------------------------------------------


def test_stopping_moves_nothing_and_tells_open_streams() -> None:
    streams: list[Any] = []

    async def test(replicas: ReplicaSet) -> None:
        streams.extend([await submit(replicas, endless(str(number))) for number in range(4)])
        await replicas.stop()
        for stream in streams:
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await collect(stream)

    run_replicas(test, step_seconds=0.1)


def test_draining_refuses_new_requests_and_finishes_open_ones() -> None:
    async def test(replicas: ReplicaSet) -> None:
        stream = await submit(replicas, make_request("open", 5, max_tokens=20))
        replicas.drain()
        with pytest.raises(EngineUnavailable, match="draining"):
            await submit(replicas, make_request("new", 3))
        assert len(await collect(stream)) == 20

    run_replicas(test, step_seconds=0.005)
