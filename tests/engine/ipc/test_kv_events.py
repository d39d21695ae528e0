"""KV events over real sockets: readers that keep up and that come late; engines that die; settings."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from itertools import count

import pytest
import zmq

from saccade.engine.ipc.client import EngineClient
from saccade.engine.ipc.kv_event_publisher import KVEventEndpoints, KVEventPublisher, endpoint_of_rank
from saccade.engine.ipc.kv_events import block_hash, encode_events
from saccade.engine.replicas.replica_set import ReplicaSet
from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.options.server import ServerOptions
from tests.helpers.engine.scheduling import BLOCK, FakeImage, Rig, make_request
from tests.helpers.fakes.fake_worker import collect, pid_of, run, run_replicas, submit, until
from tests.helpers.servers.kv_event_reader import Reader
from tests.helpers.servers.serving import free_port


@pytest.fixture
def publisher(endpoints: KVEventEndpoints) -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher(endpoints, 0)
    yield publisher
    publisher.close()


@pytest.fixture
def reader(endpoints: KVEventEndpoints) -> Iterator[Reader]:
    assert endpoints.replay is not None
    reader = Reader(endpoints.publish, endpoints.replay)
    yield reader
    reader.close()


# --- readers --------------------------------------------------------------------------------------------------------


def test_a_reader_that_joins_in_the_middle_rebuilds_the_cache_of_a_scheduler(
    publisher: KVEventPublisher, reader: Reader
) -> None:
    rig = Rig(num_blocks=60, host_blocks=30, max_num_batched_tokens=30)
    log = rig.scheduler.log_kv_events()
    rng = random.Random(7)
    for number in range(40):
        parts = [rng.choice([[1] * 8, [2] * 12, FakeImage("p", 9), FakeImage("q", 5)]) for _ in range(4)]
        rig.add(str(number), *parts, max_tokens=rng.randrange(1, 12))
        rig.drain()
        events = encode_events(log.take(), BLOCK)
        if events:
            publisher.publish(events)
    rig.scheduler.index()
    assert log.take() == []
    while reader.next < publisher.num_batches:
        reader.replay()
    pool = rig.scheduler._kv_cache
    assert len(pool.prefixes.by_digest) > 30 and len(pool.host.index.by_digest) > 10
    assert reader.index.device.keys() == {block_hash(digest) for digest in pool.prefixes.by_digest}
    assert reader.index.host == {block_hash(digest) for digest in pool.host.index.by_digest}


# --- engines --------------------------------------------------------------------------------------------------------


async def hear(reader: Reader, num_cleared: int) -> None:
    while reader.index.num_cleared < num_cleared or not reader.index.device:
        await asyncio.to_thread(reader.replay)


def test_an_engine_that_dies_is_cleared_and_the_next_one_goes_on(endpoints: KVEventEndpoints, reader: Reader) -> None:
    async def test(client: EngineClient) -> None:
        await collect(await submit(client, make_request("a", 20)))
        await hear(reader, 1)
        assert [block.token_ids for block in reader.index.device.values()][:2] == [
            [100, 101, 102, 103],
            [104, 105, 106, 107],
        ]
        os.kill(pid_of(client), signal.SIGKILL)
        await until(lambda: client.status().state == "ready" and client.status().restarts == 1)
        await collect(await submit(client, make_request("b", [5] * 8)))
        await hear(reader, 3)  # by the death, and by the new engine
        assert [block.token_ids for block in reader.index.device.values()] == [[5] * 4] * 2
        assert client.stats()["kv_events"]["batches"] == reader.next

    run(test, kv_events=endpoints)


def test_the_live_stream_says_the_same(endpoints: KVEventEndpoints, reader: Reader) -> None:
    async def test(client: EngineClient) -> None:
        for number in count():
            await collect(await submit(client, make_request(str(number), [number] * 8)))
            if await asyncio.to_thread(reader.read) and reader.index.device:
                break
        assert next(iter(reader.index.device.values())).token_ids == [0] * 4  # what came before was asked for

    run(test, kv_events=endpoints)


def test_every_replica_has_its_rank_and_its_endpoint(endpoints: KVEventEndpoints) -> None:
    async def test(replicas: ReplicaSet) -> None:
        for number in range(2):
            await collect(await submit(replicas, make_request(str(number), FakeImage(str(number), 40))))
        heard = []
        for rank in range(2):
            ends = [endpoint_of_rank(str(endpoint), rank) for endpoint in (endpoints.publish, endpoints.replay)]
            reader = Reader(ends[0], ends[1])
            await hear(reader, 1)
            assert reader.index.rank == rank
            heard.append(reader.index.device.keys())
            reader.close()
        assert heard[0] and heard[1] and not heard[0] & heard[1]

    run_replicas(test, kv_events=endpoints)


def test_without_the_flag_a_worker_sends_no_events() -> None:
    async def test(client: EngineClient) -> None:
        await collect(await submit(client, make_request("a", 20)))
        assert "kv_events" not in client.stats()

    run(test)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_events": "5557"}, "kv_events must be an address such as tcp://127.0.0.1:5557"),
        ({"kv_events": "tcp://127.0.0.1"}, "must be an address"),
        ({"kv_events": "tcp://127.0.0.1:0"}, "from 1 to 65535"),
        ({"kv_events": "tcp://127.0.0.1:65533", "replicas": 4}, "from 1 to 65532, since 4 replicas"),
        ({"kv_events": "tcp://127.0.0.1:65533", "max_replicas": 4}, "from 1 to 65532, since 4 replicas"),
        ({"kv_events": "tcp://*:5557", "kv_events_replay": "here"}, "kv_events_replay must be"),
        ({"kv_events_replay": "tcp://*:5557"}, "give --kv-events too"),
        ({"kv_events_topic": "kv@a@b"}, "give --kv-events too"),
    ],
)
def test_wrong_settings_say_what_to_change(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        KVEventEndpoints.of(Options(), ServerOptions(**given))


def test_events_need_the_prefix_cache() -> None:
    server = ServerOptions(kv_events="tcp://127.0.0.1:5557")
    with pytest.raises(ConfigError, match="leave out --no-prefix-caching or --kv-events"):
        KVEventEndpoints.of(Options(enable_prefix_caching=False), server)


def test_they_are_off_unless_asked_for() -> None:
    assert KVEventEndpoints.of(Options(), ServerOptions()) is None


def test_ranks_take_the_next_ports_or_paths() -> None:
    assert endpoint_of_rank("tcp://*:5557", 0) == "tcp://*:5557"
    assert endpoint_of_rank("tcp://[::1]:5557", 3) == "tcp://[::1]:5560"
    assert endpoint_of_rank("ipc:///a/b", 0) == "ipc:///a/b"
    assert endpoint_of_rank("ipc:///a/b", 1) == "ipc:///a/b_dp1"


def test_an_endpoint_in_use_is_named() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use; choose another address"):
            KVEventPublisher(KVEventEndpoints(f"tcp://127.0.0.1:{port}"), 0)


def test_only_endpoints_beyond_this_machine_are_warned_of(
    endpoints: KVEventEndpoints, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    with caplog.at_level(logging.WARNING):
        KVEventPublisher(KVEventEndpoints(f"tcp://127.0.0.1:{port}"), 0).close()
        KVEventPublisher(endpoints, 0).close()
        assert not caplog.records
        KVEventPublisher(KVEventEndpoints(f"tcp://*:{port}"), 0).close()
    assert "let nothing but your router reach tcp://*" in caplog.text


def test_without_zeromq_the_error_says_how_to_install_it(
    endpoints: KVEventEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install 'saccade\[kv-events\]'"):
        KVEventPublisher(endpoints, 0)
