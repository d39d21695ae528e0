"""Publishes one engine's KV events, from the API process: steps never wait for a reader.

Readers connect to a helper process, `kv_event_worker`: what libzmq keeps of what they send has no bound but
the memory of its process. Owns the batches until that has them, and those that readers may ask for again.

    request: numbers of the first batch that readers may ask for and of the next batch to come,
             for each batch its number, whether readers get it now, its length, batch
    reply: counts of what went wrong, whether the first batch is missing, whether readers could connect before

Numbers go on when the engine or the helper process is started again. A reader that does not keep up misses
batches, and sees that from their numbers. `kv_events.py` has the form of a batch.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from saccade.engine.ipc.kv_events import CLEARED, encode_batch
from saccade.engine.ipc.supervisor import FIRST_BACKOFF, MAX_BACKOFF
from saccade.errors import ConfigError
from saccade.helpers.process import HelperProcess, Outcome, Reply
from saccade.options.engine import Options
from saccade.options.server import ServerOptions

KEPT = struct.Struct(">QQ")
RECORD = struct.Struct(">Q?I")
REPLY = struct.Struct(">QQ??")  # overflows and failed replays since the last reply, missing, bound
MAX_BATCHES = 10_000  # that wait for the helper process or are kept for replays, and at most so many bytes:
MAX_BYTES = 64 << 20
_WORKER = "saccade.engine.ipc.kv_event_worker"
_MAX_REQUEST = 4 << 20  # bytes, beyond the first batch
_CPU_SECONDS = 10.0  # for a request: hundreds of times what it needs
_BEAT_SECONDS = 1.0  # between requests, with batches or without
_LOG_SECONDS = 10.0
_PORT = re.compile(r"(tcp://[^\s/]+:)(\d{1,5})")
_PATH = re.compile(r"ipc://\S+")
_MAX_PORT = 65535
_LOOPBACK = re.compile(r"ipc://.*|tcp://(127\.[\d.]+|localhost|\[::1\]):\d+")

_ENDINGS = {
    Outcome.SLOW: f"their process took more than {_CPU_SECONDS:g} s of CPU time at once",
    Outcome.MEMORY: "their process had no memory left",
    Outcome.DIED: "their process has ended",
}

logger = logging.getLogger("saccade.engine")


class KVEventEndpoints(NamedTuple):
    """Of the first engine. The next ones take the next ports, as vLLM's data parallel ranks do."""

    publish: str
    replay: str | None = None
    topic: str | None = None

    @classmethod
    def of(cls, options: Options, server: ServerOptions) -> KVEventEndpoints | None:
        """None: no events are wanted."""
        if server.kv_events is None:
            if (server.kv_events_replay, server.kv_events_topic) != (None, None):
                raise ConfigError("kv_events_replay and kv_events_topic need kv_events; give --kv-events too")
            return None
        if not options.enable_prefix_caching:
            problem = f"kv_events={server.kv_events} needs the prefix cache, whose blocks it tells of"
            raise ConfigError(f"{problem}; leave out --no-prefix-caching or --kv-events")
        for name in ("kv_events", "kv_events_replay"):
            endpoint = getattr(server, name)
            if endpoint is not None:
                _check(name, endpoint, server.replica_range[1])
        return cls(server.kv_events, server.kv_events_replay, server.kv_events_topic)


class _Request(NamedTuple):
    parts: list[bytes]
    numbers: range  # of its batches


class KVEventPublisher:
    """Its methods are for one thread. Another one hands batches over and starts the helper process again."""

    def __init__(self, endpoints: KVEventEndpoints, rank: int) -> None:
        if find_spec("zmq") is None:
            problem = "kv_events needs ZeroMQ; install it: pip install 'saccade[kv-events]'"
            raise ConfigError(problem)
        ends = [endpoint_of_rank(end, rank) if end else "" for end in endpoints[:2]]
        self.num_batches = 0
        self.num_dropped = 0  # that no reader could have
        self._rank = rank
        self._ends = ends
        self._keeps_batches = bool(endpoints.replay)
        self._changed = threading.Condition()  # guards the four below
        self._batches: deque[bytes] = deque()  # those up to `num_batches`
        self._num_bytes = 0
        self._next = 0  # number of the batch to hand over next
        self._is_closed = False
        self._num_had = 0  # batches that a helper process published, or keeps for replays
        self._num_overflows = 0  # times that a reader's queue was full; it misses batches until it reads on
        self._num_failed = 0  # replays that were not logged yet
        self._next_log = 0.0
        self._helper = HelperProcess(_WORKER, *ends, endpoints.topic or "")
        self._bind()
        self._thread = threading.Thread(target=self._hand_over, name="kv-events", daemon=True)
        self._thread.start()

    def _bind(self) -> None:
        problem = _problem(self._ask(self._take()))
        if problem:
            self._helper.close()
            raise ConfigError(f"KV events cannot be had: {problem}; choose another address")
        for end in self._ends:
            if end and not _LOOPBACK.fullmatch(end):
                logger.warning(
                    "KV events hold the tokens of all prompts and outputs: let nothing but your router "
                    "reach %s, where whatever connects can read them",
                    end,
                )

    def publish(self, events: bytes) -> None:
        """Encoded events as one batch. Never waits."""
        batch = encode_batch(time.time(), events, self._rank)
        with self._changed:
            self._batches.append(batch)
            self._num_bytes += len(batch)
            self.num_batches += 1
            while len(self._batches) > MAX_BATCHES or self._num_bytes > MAX_BYTES:
                self._forget_first()
            self._changed.notify()

    def clear(self) -> None:
        """The engine is gone, with all blocks."""
        self.publish(CLEARED)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._helper.close()
        self._thread.join()
        for end in self._ends:
            if end.startswith("ipc://"):
                Path(end.removeprefix("ipc://")).unlink(missing_ok=True)

    def stats(self) -> dict[str, int]:
        return {
            "batches": self.num_batches,
            "overflows": self._num_overflows,
            "dropped": self.num_dropped,
        }

    def check(self) -> None:
        """The conservation law: the bytes are those of the batches, and none is before the first."""
        with self._changed:
            assert self._num_bytes == sum(map(len, self._batches)) <= MAX_BYTES
            assert self.num_batches - len(self._batches) <= self._next <= self.num_batches

    def _forget_first(self) -> None:
        first = self.num_batches - len(self._batches)
        self._num_bytes -= len(self._batches.popleft())
        if first >= self._next:
            self._next = first + 1
            self.num_dropped += first >= self._num_had

    # --- the thread -----------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Until `close`. A helper process that lived longer than the longest back-off is started at once."""
        backoff = FIRST_BACKOFF
        began = time.monotonic()
        while not self._is_closed:
            problem = _problem(self._ask(self._take()))
            if not problem:
                self._wait(self._has_batches, _BEAT_SECONDS)
                problem = "" if self._helper.pid else _ENDINGS[Outcome.DIED]
            if problem and not self._is_closed:
                if time.monotonic() - began > MAX_BACKOFF:
                    backoff = FIRST_BACKOFF
                logger.warning("KV events: %s; they can be had again in about %.1f s", problem, backoff)
                self._wait(lambda: False, backoff)
                backoff = min(2 * backoff, MAX_BACKOFF)
                began = time.monotonic()

    def _wait(self, is_due: Callable[[], bool], seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or is_due(), seconds)

    def _has_batches(self) -> bool:
        return self._next < self.num_batches

    def _take(self) -> _Request:
        """The next batches, if there are any."""
        with self._changed:
            begin = self._next
            first = self.num_batches - len(self._batches)
            parts = [KEPT.pack(first if self._keeps_batches else self.num_batches, self.num_batches)]
            num_bytes = 0
            while self._has_batches() and num_bytes <= _MAX_REQUEST:
                batch = self._batches[self._next - first]
                parts += (RECORD.pack(self._next, self._next >= self._num_had, len(batch)), batch)
                num_bytes += len(batch)
                self._next += 1
            if not self._keeps_batches:
                for _ in range(first, self._next):
                    self._forget_first()
            return _Request(parts, range(begin, self._next))

    def _ask(self, request: _Request) -> Reply:
        """A helper process that is new says that it has not all that is kept, and gets that."""
        try:
            reply = self._helper.ask(request.parts, _CPU_SECONDS)
        except RuntimeError:  # closed
            return Reply(Outcome.CANCELLED, 0.0)
        is_missing, has_batches = True, False
        if reply.outcome is Outcome.DONE:
            overflows, failed, is_missing, is_bound = REPLY.unpack(reply.body)
            has_batches = is_bound or (self._keeps_batches and not is_missing)
            self._tell(overflows, failed)
        else:
            self._helper.cancel()  # where it has not ended
        self._count(request.numbers, has_batches=has_batches)
        if is_missing:
            with self._changed:
                self._next = self.num_batches - len(self._batches)
        return reply

    def _count(self, numbers: range, *, has_batches: bool) -> None:
        """What became of a request's batches. Those that are kept here are sent again."""
        with self._changed:
            if has_batches:
                self._num_had = max(self._num_had, numbers.stop)
            else:
                first_here = min(numbers.stop, self.num_batches - len(self._batches))
                self.num_dropped += max(0, first_here - max(numbers.start, self._num_had))

    def _tell(self, overflows: int, failed: int) -> None:
        """Readers cannot fill the log."""
        self._num_overflows += overflows
        self._num_failed += failed
        if self._num_failed and time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_SECONDS
            problem = "not asked for as in vLLM, or not taken within a second"
            logger.warning("KV events: %d replays were %s", self._num_failed, problem)
            self._num_failed = 0


def _problem(reply: Reply) -> str:
    return reply.body.decode() if reply.outcome is Outcome.FAILED else _ENDINGS.get(reply.outcome, "")


def _check(name: str, endpoint: str, num_ranks: int) -> None:
    address = _PORT.fullmatch(endpoint)
    if address:
        if not 1 <= int(address[2]) <= _MAX_PORT + 1 - num_ranks:
            ports = f"from 1 to {_MAX_PORT + 1 - num_ranks}, since {num_ranks} replicas take a port each"
            raise ConfigError(f"the port in {name}={endpoint} must be {ports}")
    elif not _PATH.fullmatch(endpoint):
        expected = "an address such as tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///run/saccade/events"
        raise ConfigError(f"{name} must be {expected}, not {endpoint}")


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Port 5557 is that of rank 0, 5558 that of rank 1."""
    address = _PORT.fullmatch(endpoint)
    if address:
        return f"{address[1]}{int(address[2]) + rank}"
    return f"{endpoint}_dp{rank}" if rank else endpoint
