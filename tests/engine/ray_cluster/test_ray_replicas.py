"""Replicas on a Ray cluster, with fake engines: the faults of local ones, and those that only a cluster has."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saccade.engine.ray_cluster.launcher import ray_launcher
from saccade.engine.replicas.replica_set import ReplicaSet
from saccade.errors import ConfigError, EngineUnavailable
from tests.helpers.engine.scheduling import make_request
from tests.helpers.fakes.fake_worker import (
    CONFIG,
    HANGS_REPLICA,
    collect,
    endless,
    fake_client,
    is_running,
    pids_of,
    run_bounded,
    run_replicas,
    started,
    submit,
    until,
)
from tests.helpers.servers.ray_cluster import RayCluster, parent_of, ray_cluster
from tests.helpers.servers.serving import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]

FILES = SimpleNamespace(path=Path("/"), config=CONFIG, image_processor={})
SECONDS = 120.0  # after which a test is given up


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(2, 2) as cluster:
        yield cluster


def on(cluster: RayCluster, num_cpus: int = 1) -> dict[str, Any]:
    return {"launch": ray_launcher(cluster.address, num_cpus, "tests.helpers.fakes.fake_worker"), "checkpoint": FILES}


def workers_of(replicas: ReplicaSet) -> list[int]:
    return [view.status.place.pid for view in replicas.replicas() if view.status.place is not None]


def run(cluster: RayCluster, test: Callable[[ReplicaSet], Awaitable[None]], **how: Any) -> None:
    """Of two replicas. Neither Ray workers nor bridges may be left."""
    workers: list[int] = []

    async def body(replicas: ReplicaSet) -> None:
        workers.extend(workers_of(replicas))
        assert len(workers) == 2
        await test(replicas)
        workers.extend(workers_of(replicas))

    run_replicas(body, seconds=SECONDS, **on(cluster), **how)
    run_bounded(until(lambda: not any(is_running(pid) for pid in workers)))


def is_ready(replicas: ReplicaSet) -> bool:
    return [view.status.state for view in replicas.replicas()] == ["ready", "ready"]


def test_requests_are_answered_by_engines_on_two_nodes(cluster: RayCluster) -> None:
    async def test(replicas: ReplicaSet) -> None:
        async def one(index: int) -> None:
            assert (
                len(await collect(await submit(replicas, make_request(str(index), [index] * 9, max_tokens=20)))) == 20
            )

        await asyncio.gather(*[one(index) for index in range(20)])
        await until(lambda: all(view.stats.get("steps") for view in replicas.replicas()))
        first, second = workers_of(replicas)
        assert parent_of(first) != parent_of(second)  # each its node's raylet

    run(cluster, test)


def test_a_killed_worker_is_replaced_and_its_requests_move_or_get_the_error(cluster: RayCluster) -> None:
    async def test(replicas: ReplicaSet) -> None:
        lost, other = [await submit(replicas, endless(str(number))) for number in range(2)]
        await anext(lost)
        await anext(other)
        moving = await submit(replicas, make_request("moving", [HANGS_REPLICA] * 9, max_tokens=2))
        os.kill(workers_of(replicas)[0], signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="send the request again"):
            await collect(lost)
        assert len(await collect(moving)) == 2
        before = other.num_tokens
        await until(lambda: other.num_tokens > before)
        other.cancel()
        await collect(other)
        await until(lambda: is_ready(replicas))
        assert "Ray worker" in str(replicas.replicas()[0].status.last_error)
        assert [view.status.restarts for view in replicas.replicas()] == [1, 0]

    run(cluster, test)


def test_a_killed_bridge_takes_its_engine_with_it(cluster: RayCluster) -> None:
    async def test(replicas: ReplicaSet) -> None:
        worker = workers_of(replicas)[0]
        os.kill(pids_of(replicas)[0], signal.SIGKILL)
        await until(lambda: not is_running(worker))
        await until(lambda: is_ready(replicas) and workers_of(replicas)[0] != worker)

    run(cluster, test)


def test_over_a_network_that_drops_requests_move_and_the_engine_is_replaced(cluster: RayCluster) -> None:
    async def test(replicas: ReplicaSet) -> None:
        worker = workers_of(replicas)[0]
        os.kill(pids_of(replicas)[0], signal.SIGSTOP)  # nothing passes any more, no connection is closed
        events = await collect(await submit(replicas, make_request("moving", [HANGS_REPLICA] * 9, max_tokens=3)))
        assert len(events) == 3 and replicas.stats()["moved"] == 1
        assert "no sign of life" in str(replicas.replicas()[0].status.last_error)
        await until(lambda: is_ready(replicas) and workers_of(replicas)[0] != worker)

    run(cluster, test, heartbeat_timeout=2)


def test_a_model_that_a_node_does_not_have_is_named_with_the_node(cluster: RayCluster) -> None:
    async def body() -> None:
        files = SimpleNamespace(path=Path("/no/such/model"), config=CONFIG, image_processor={})
        client = fake_client(**{**on(cluster), "checkpoint": files})
        with pytest.raises(ConfigError, match=rf"/no/such/model is not on node {os.uname().nodename}"):
            async with started(client):
                pass

    run_bounded(body(), seconds=SECONDS)


def test_an_engine_that_no_node_can_hold_waits_and_can_be_stopped(cluster: RayCluster) -> None:
    async def body() -> None:
        client = fake_client(**on(cluster, num_cpus=99))
        starting = asyncio.create_task(client.start())
        await until(lambda: client.status().pid)
        bridge = client.status().pid
        assert bridge is not None
        await client.stop()
        assert not is_running(bridge) and not starting.done()
        starting.cancel()

    run_bounded(body(), seconds=SECONDS)


def test_without_a_cluster_the_start_fails_and_says_so() -> None:
    async def body() -> None:
        address = f"127.0.0.1:{free_port()}"
        launch = ray_launcher(address, 1, "tests.helpers.fakes.fake_worker")
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at {address}.*ray start"):
            await fake_client(launch=launch, checkpoint=FILES).start()

    run_bounded(body(), seconds=SECONDS)


def test_engines_come_back_with_the_cluster_when_its_head_was_killed() -> None:
    with ray_cluster(4) as cluster:

        async def test(replicas: ReplicaSet) -> None:
            stream = await submit(replicas, endless())
            await anext(stream)
            await asyncio.to_thread(cluster.kill_head)
            with pytest.raises(EngineUnavailable):
                await collect(stream)
            await until(lambda: replicas.status().state == "restarting")
            with pytest.raises(EngineUnavailable, match="the engine is restarting"):
                await submit(replicas, make_request("refused", 3))
            await until(lambda: "no Ray cluster" in str(replicas.status().last_error))
            await asyncio.to_thread(cluster.start_head, 4)
            await until(lambda: is_ready(replicas))
            assert len(await collect(await submit(replicas, make_request("again", 9, max_tokens=5)))) == 5

        run(cluster, test)
