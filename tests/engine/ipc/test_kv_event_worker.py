"""The sockets of KV events: what readers can make them keep, and what is left of it in the process that publishes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import zmq

from saccade.engine.ipc import kv_event_publisher, kv_event_worker
from saccade.engine.ipc.kv_event_publisher import KEPT, RECORD, REPLY, KVEventEndpoints, KVEventPublisher
from saccade.engine.ipc.kv_event_worker import EventServer
from saccade.engine.ipc.kv_events import CLEARED, encode_batch
from tests.helpers.servers.hostile_reader import HostileReader, endless, frame, topics
from tests.helpers.servers.kv_event_reader import Reader

WAIT = 60.0  # seconds after which a test is given up


@pytest.fixture
def publisher(endpoints: KVEventEndpoints) -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher(endpoints, 0)
    yield publisher
    publisher.check()
    publisher.close()


@pytest.fixture
def server(endpoints: KVEventEndpoints) -> Iterator[EventServer]:
    server = EventServer(endpoints.publish, endpoints.replay or "", b"")
    yield server
    server.close()


@pytest.fixture
def reader(endpoints: KVEventEndpoints) -> Iterator[Reader]:
    reader = Reader(endpoints.publish, endpoints.replay or "")
    yield reader
    reader.close()


def send(server: EventServer, numbers: range, batch: bytes, *, first: int = 0, end: int | None = None) -> list[int]:
    """Batches with these numbers, of all from `first` to `end`; returns what the reply counts."""
    parts = [KEPT.pack(first, numbers.stop if end is None else end)]
    for number in numbers:
        parts += [RECORD.pack(number, True, len(batch)), batch]
    return list(REPLY.unpack(server.answer(b"".join(parts))))


def replayed(reader: Reader, publisher: KVEventPublisher) -> list[int]:
    """The numbers of all batches from the reader's next one on, when the helper process has them all."""
    numbers: list[int] = []
    while reader.next < publisher.num_batches:
        numbers += reader.replay()
    return numbers


def cleared() -> bytes:
    return encode_batch(0.0, CLEARED, 0)


# --- the server of the sockets --------------------------------------------------------------------------------------


def test_a_stalled_reader_misses_batches_which_is_counted_and_others_get_all(
    server: EventServer, endpoints: KVEventEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_worker, "MAX_QUEUED", 20)
    context = zmq.Context()
    stalled, quick = (context.socket(zmq.SUB) for _ in range(2))
    stalled.rcvhwm = 1
    quick.rcvtimeo = 10_000
    number = 0
    for socket in (stalled, quick):
        socket.subscribe(b"")
        socket.connect(endpoints.publish)
        while not socket.poll(10):  # only when a subscription has arrived is there anything to read
            send(server, range(number, number + 1), cleared())
            number += 1
    while quick.poll(100):
        quick.recv_multipart()
    overflows = 0
    first = number
    for number in range(first, first + 60):
        overflows += send(server, range(number, number + 1), bytes(1 << 20))[0]
        assert int.from_bytes(quick.recv_multipart()[1], "big") == number
    assert overflows == 1
    numbers = []
    while not numbers or numbers[-1] < first + 60:  # it reads on, and sees that some are missing
        number += 1
        send(server, range(number, number + 1), cleared())
        while stalled.poll(10):
            numbers.append(int.from_bytes(stalled.recv_multipart()[1], "big"))
    assert 20 <= len([number for number in numbers if number < first + 60]) < 60
    context.destroy(linger=0)


def test_what_is_kept_for_replays_is_bounded(
    server: EventServer, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_worker, "MAX_BATCHES", 5)
    send(server, range(9), cleared(), first=4)
    assert reader.replay() == [4, 5, 6, 7, 8]
    monkeypatch.setattr(kv_event_worker, "MAX_BYTES", 3 * len(cleared()))
    send(server, range(9, 10), cleared(), first=7)
    assert reader.replay() == [7, 8, 9]


def test_no_reader_connects_before_all_is_there_that_it_may_ask_for(server: EventServer, reader: Reader) -> None:
    assert send(server, range(7, 8), cleared()) == [0, 0, True, False]  # this process is new; those before are missing
    assert send(server, range(4), cleared(), end=8) == [0, 0, False, False]
    reader._replay.send_multipart((b"", bytes(8)))
    assert not reader._replay.poll(300)
    assert send(server, range(4, 8), cleared(), end=8) == [0, 0, False, False]
    assert reader._replay.poll(20_000)
    assert [reader._replay.recv_multipart()[1][-1] for _ in range(9)] == [*range(8), 255]


def test_a_reader_that_takes_each_batch_just_in_time_gets_no_replay_for_ever(
    server: EventServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(server, range(1000), cleared())
    sent: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 0.9 * len(sent))
    monkeypatch.setattr(kv_event_worker, "time", clock)
    assert not server._has_replayed(Mock(send_multipart=sent.append), [b"reader", b"", bytes(8)])
    assert len(sent) == 67


# --- what readers send ----------------------------------------------------------------------------------------------


def test_a_replay_that_is_asked_for_wrongly_ends_nothing(publisher: KVEventPublisher, reader: Reader) -> None:
    publisher.publish(CLEARED)
    for frames in ((b"",), (b"", b"1234"), (b"x", bytes(8)), (b"", bytes(8), b""), (b"", bytes(1 << 20))):
        reader._replay.send_multipart(frames)  # the last ends its connection; it comes back with another
    assert replayed(reader, publisher) == [0]


def test_requests_that_are_none_fill_no_log(
    publisher: KVEventPublisher, endpoints: KVEventEndpoints, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.publish(CLEARED)
    hostile = HostileReader(endpoints.replay or "", b"DEALER")
    hostile.send(*[frame(b"x")] * 20_000)
    deadline = time.monotonic() + WAIT
    while "replays were not asked for" not in caplog.text and time.monotonic() < deadline:
        assert reader.replay() in ([0], [])
    assert 1 <= len(caplog.records) <= 3
    hostile.close()


def memory() -> int:
    return int(psutil.Process().memory_info().rss)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_another(publisher: KVEventPublisher, pid: int | None) -> None:
    """A request to the one that has ended would be lost."""
    wait_until(lambda: publisher._helper.pid not in (pid, None))


def test_readers_that_fill_the_memory_end_the_helper_process_and_nothing_is_lost(
    publisher: KVEventPublisher, endpoints: KVEventEndpoints, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        publisher.publish(CLEARED)
    assert replayed(reader, publisher) == list(range(10))
    pid = publisher._helper.pid
    before = memory()
    hostile = HostileReader(endpoints.replay or "", b"DEALER")
    deadline = time.monotonic() + WAIT
    while publisher._helper.pid == pid and time.monotonic() < deadline:
        hostile.send(*endless(10_000, 250))
    hostile.close()
    wait_for_another(publisher, pid)
    publisher.publish(CLEARED)
    assert replayed(reader, publisher) == [10]
    assert memory() - before < 32 << 20
    assert len(caplog.records) == 1 and "can be had again" in caplog.text


def test_topics_are_not_kept_by_the_process_that_publishes(
    publisher: KVEventPublisher, endpoints: KVEventEndpoints, reader: Reader
) -> None:
    before = memory()
    hostile = HostileReader(endpoints.publish, b"SUB")
    named = topics(1_500, 500)
    for begin in range(0, len(named), 100):
        hostile.send(*named[begin : begin + 100])
        publisher.publish(CLEARED)
        while not reader.read():  # one that behaves goes on; libzmq takes topics when a batch is sent
            publisher.publish(CLEARED)
    assert memory() - before < 16 << 20
    hostile.close()


# --- the process that publishes -------------------------------------------------------------------------------------


def test_a_helper_process_that_ends_is_started_again_with_all_that_is_kept(
    publisher: KVEventPublisher, reader: Reader
) -> None:
    for _ in range(3):
        publisher.publish(CLEARED)
    assert replayed(reader, publisher) == [0, 1, 2]
    pid = publisher._helper.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    publisher.publish(CLEARED)
    wait_for_another(publisher, pid)
    reader.next = 0
    assert replayed(reader, publisher) == [0, 1, 2, 3]
    while reader.next == 4:  # numbers go on
        publisher.publish(CLEARED)
        reader.read()
    assert publisher.stats()["dropped"] == 0


def test_without_replays_what_no_helper_process_could_publish_is_counted(endpoints: KVEventEndpoints) -> None:
    publisher = KVEventPublisher(KVEventEndpoints(endpoints.publish), 0)
    publisher.publish(CLEARED)
    wait_until(lambda: publisher._num_had == 1)
    pid = publisher._helper.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: publisher._helper.pid != pid)
    for _ in range(5):
        publisher.publish(CLEARED)
    wait_until(lambda: publisher.num_dropped)
    publisher.publish(CLEARED)  # to a process that has its socket
    wait_until(lambda: publisher._num_had == 7)
    assert publisher.num_dropped == 5
    publisher.check()
    publisher.close()


def test_batches_that_nobody_takes_are_dropped_and_counted(
    publisher: KVEventPublisher, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_publisher, "MAX_BATCHES", 5)
    pid = publisher._helper.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for _ in range(50):
        publisher.publish(CLEARED)
    dropped = publisher.stats()["dropped"]
    os.kill(pid, signal.SIGCONT)
    assert 40 <= dropped <= 45  # some were under way
    reader.next = 45
    assert replayed(reader, publisher) == [45, 46, 47, 48, 49]


def test_without_replays_nothing_is_kept(endpoints: KVEventEndpoints) -> None:
    publisher = KVEventPublisher(KVEventEndpoints(endpoints.publish), 0)
    publisher.publish(CLEARED)
    wait_until(lambda: not publisher._batches)
    assert publisher.num_batches == 1 and not publisher._batches
    publisher.check()
    publisher.close()


def test_a_publisher_that_is_closed_leaves_no_sockets_and_no_process(endpoints: KVEventEndpoints) -> None:
    publisher = KVEventPublisher(endpoints, 0)
    child = psutil.Process(publisher._helper.pid)
    assert os.path.exists(endpoints.publish.removeprefix("ipc://"))
    publisher.close()
    child.wait(10)
    assert not os.path.exists(endpoints.publish.removeprefix("ipc://"))
