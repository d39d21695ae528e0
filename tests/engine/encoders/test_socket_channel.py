"""Engines and an encoder worker over a real socket and shared memory, in one process with a fake tower."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from saccade.engine.encoders.encoder_core import EncoderJob
from saccade.engine.encoders.messages import Begun, Encoded, Welcome
from saccade.engine.encoders.socket_channel import SocketChannel
from saccade.engine.ipc.messages import frame
from saccade.errors import RequestError
from saccade.runner.encoder.encoder_channel import EncoderLate, EncoderLost
from saccade.types.media import MediaItem
from saccade.types.step import MediaTimes
from tests.helpers.fakes.fake_tower import picture
from tests.helpers.servers.encoder_workers import Puppet, Worker

PATIENT = 20.0  # seconds, only to end a broken test


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path / "encoder")
    yield made
    made.close()


@pytest.fixture
def puppet(tmp_path: Path) -> Iterator[Puppet]:
    made = Puppet(tmp_path / "puppet")
    yield made
    made.close()


def connected(puppet: Puppet, arena_bytes: int = 4096) -> SocketChannel:
    accepting = threading.Thread(target=puppet.accept)
    accepting.start()
    channel = SocketChannel(puppet.listener.getsockname(), arena_bytes)
    accepting.join()
    return channel


def values(channel: SocketChannel, item: MediaItem) -> list[float]:
    with channel.encode(item, item.geometry.slots * 4, PATIENT) as found:
        assert found.shape == (item.geometry.slots, 1) and found.dtype == "float32"
        return list(torch.frombuffer(bytearray(found.data), dtype=torch.float32))


def until(condition: Callable[[], bool]) -> None:
    tick = threading.Event()
    while not condition():
        tick.wait(0.001)


def test_the_embedding_has_the_bits_that_the_tower_made(worker: Worker) -> None:
    channel = SocketChannel(worker.address, 4096)
    assert channel.seconds_per_patch == 0.25
    assert values(channel, picture("a", value=7)) == [7.0] * 4
    channel.check()
    assert channel.space.used == 0
    channel.close()


def test_many_images_at_once_wait_for_space_in_order_and_all_arrive(worker: Worker) -> None:
    channel = SocketChannel(worker.address, 128)  # two embeddings of four floats, since places are aligned
    items = [picture(f"p{n}", value=n) for n in range(12)]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda item: values(channel, item), items))
    assert found == [[float(n)] * 4 for n in range(12)]
    channel.check()
    assert channel.space.used == 0
    channel.close()


def test_two_engines_share_a_worker(worker: Worker) -> None:
    channels = [SocketChannel(worker.address, 4096) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda channel: values(channel, picture("same", value=3)), channels))
    assert found == [[3.0] * 4] * 2
    channels[0].close()
    assert values(channels[1], picture("other", value=5)) == [5.0] * 4  # one that leaves takes nothing along
    channels[1].close()


def test_an_image_that_is_none_raises_its_own_error(worker: Worker) -> None:
    channel = SocketChannel(worker.address, 4096)
    with pytest.raises(RequestError), channel.encode(picture("bad", data=b"no"), 16, PATIENT):
        pass
    assert channel.is_open and values(channel, picture("good", value=1)) == [1.0] * 4
    channel.close()


def test_an_embedding_larger_than_its_place_is_not_written(worker: Worker) -> None:
    channel = SocketChannel(worker.address, 4096)
    with channel.encode(picture("a", value=7), 8, PATIENT) as found:
        assert found.shape == (4, 1) and bytes(found.data) == bytes(8)
    channel.close()


def test_a_place_outside_the_arena_ends_the_connection(worker: Worker) -> None:
    channel = SocketChannel(worker.address, 4096)
    channel.space._free = {1 << 20: 1 << 21}
    with pytest.raises(EncoderLost), channel.encode(picture("a"), 16, PATIENT):
        pass
    assert not channel.is_open


def test_a_worker_that_dies_loses_what_it_has_and_names_what_it_had_begun(puppet: Puppet) -> None:
    channel = connected(puppet)

    def lost(item: MediaItem) -> bool:
        with pytest.raises(EncoderLost) as error, channel.encode(item, 16, PATIENT):
            pass
        return error.value.was_begun

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lost, picture("a"))
        until(lambda: 0 in channel._jobs)
        second = pool.submit(lost, picture("b"))
        until(lambda: 1 in channel._jobs)
        puppet.connection.sendall(frame(Begun(0)))
        until(lambda: channel._jobs[0].was_begun)
        puppet.connection.close()
        assert first.result() and not second.result()
    channel.check()
    assert channel.space.used == 0 and not channel.is_open


def test_a_late_embedding_keeps_its_place_until_the_worker_is_done_with_it(puppet: Puppet) -> None:
    channel = connected(puppet, 128)
    with pytest.raises(EncoderLate, match="no embedding within"), channel.encode(picture("a"), 128, 0.01):
        pass
    assert channel.space.used == 128
    with pytest.raises(EncoderLate, match="stays full"), channel.encode(picture("b"), 128, 0.01):
        pass
    channel.check()
    puppet.connection.sendall(frame(Encoded(0, (4, 1), "float32", 16, MediaTimes(1.0, 1.0))))
    until(lambda: channel.space.used == 0)
    channel.check()
    channel.close()
    puppet.connection.close()


@pytest.mark.parametrize("garbage", [b"\0\0\0\2xx", bytes(frame(Begun(7))), bytes(frame(Welcome(1.0)))])
def test_garbage_from_a_worker_ends_the_channel(puppet: Puppet, garbage: bytes) -> None:
    channel = connected(puppet)
    puppet.connection.sendall(garbage)
    until(lambda: not channel.is_open)
    with pytest.raises(EncoderLost), channel.encode(picture("a"), 16, PATIENT):
        pass
    puppet.connection.close()


def test_an_address_without_a_worker_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        SocketChannel(str(tmp_path / "nobody"), 4096)


def test_a_connection_without_an_arena_is_refused(worker: Worker) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(worker.address)
        stranger.sendall(b"\0")
        assert stranger.recv(1) == b""


def test_no_shared_memory_and_no_descriptor_stays(worker: Worker) -> None:
    def count() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:saccade-embeddings")
        return maps, len(os.listdir("/proc/self/fd"))

    before = count()
    for n in range(3):
        channel = SocketChannel(worker.address, 1 << 20)
        assert values(channel, picture(f"p{n}", value=n)) == [float(n)] * 4
        channel.close()
        del channel
    until(lambda: count() == before)


def test_an_engine_that_leaves_does_not_break_the_worker(worker: Worker) -> None:
    held = threading.Event()
    worker.core.submit(EncoderJob("test", picture("x"), lambda: None, lambda outcome: held.set()))
    channel = SocketChannel(worker.address, 4096)
    with pytest.raises(EncoderLate), channel.encode(picture("a", 32), 4096, 0.0):
        pass
    channel.close()
    assert held.wait(PATIENT)
    again = SocketChannel(worker.address, 4096)
    assert values(again, picture("b", value=2)) == [2.0] * 4
    again.close()
