"""Publishes one engine's KV events over ZeroMQ, from the API process: steps never wait for a reader.

    PUB     topic | sequence number, 8 bytes, big endian | batch        to all readers
    ROUTER  a reader asks with (empty, first number) and gets (empty, number, batch) ... (empty, -1, empty)

Numbers go on when the engine is started again. A reader that does not keep up misses batches, and sees that
from their numbers. `kv_events.py` has the form of a batch.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from importlib import import_module
from typing import Any, NamedTuple

from saccade.engine.ipc.kv_events import CLEARED, encode_batch
from saccade.errors import ConfigError
from saccade.options import Options
from saccade.server_options import ServerOptions

MAX_QUEUED = 1000  # batches that wait for one reader; readers that wait for the same batch share its memory
REPLAY_BATCHES = 10_000  # kept for readers that ask for them again, and at most so many bytes:
REPLAY_BYTES = 64 << 20
_REPLAY_SECONDS = 1.0  # that a reader may take before it gets no more of its replay: others wait meanwhile
_MAX_INCOMING = 4096  # bytes of what a reader sends: a topic, or a number
_END = (-1).to_bytes(8, "big", signed=True)
_PORT = re.compile(r"(tcp://[^\s/]+:)(\d{1,5})")
_PATH = re.compile(r"ipc://\S+")
_MAX_PORT = 65535
_LOOPBACK = re.compile(r"ipc://.*|tcp://(127\.[\d.]+|localhost|\[::1\]):\d+")

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
            if server.kv_events_replay is not None or server.kv_events_topic is not None:
                raise ConfigError("kv_events_replay and kv_events_topic need kv_events; give --kv-events too")
            return None
        if not options.enable_prefix_caching:
            problem = f"kv_events={server.kv_events} needs the prefix cache, whose blocks it tells of"
            raise ConfigError(f"{problem}; leave out --no-prefix-caching or --kv-events")
        for name in ("kv_events", "kv_events_replay"):
            endpoint = getattr(server, name)
            if endpoint is not None:
                _check(name, endpoint, max(server.replicas, server.max_replicas or 1))
        return cls(server.kv_events, server.kv_events_replay, server.kv_events_topic)


class KVEventPublisher:
    """Its methods are for one thread. Another one of its own answers replays."""

    def __init__(self, endpoints: KVEventEndpoints, rank: int) -> None:
        zmq = self._zmq = _zmq()
        self.num_batches = 0
        self.num_overflows = 0  # times that a reader's queue was full; it misses batches until it reads on
        self._rank = rank
        self._topic = (endpoints.topic or "").encode()
        self._can_replay = endpoints.replay is not None
        self._kept: deque[tuple[int, bytes]] = deque()  # by number
        self._kept_bytes = 0
        self._lock = threading.Lock()  # of the two above
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.sndhwm = MAX_QUEUED
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)  # the first batch that a reader cannot take is refused
        replay = self._context.socket(zmq.ROUTER) if self._can_replay else None
        try:
            self._bind(self._socket, endpoints.publish)
            if replay is not None:
                replay.sndtimeo = int(_REPLAY_SECONDS * 1000)
                replay.router_mandatory = 1  # wait for a reader that is slow instead of skipping batches
                self._bind(replay, endpoints.replay)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        if replay is not None:
            threading.Thread(target=self._answer, args=(replay,), name="kv-event-replay", daemon=True).start()

    def _bind(self, socket: Any, endpoint: str | None) -> None:
        assert endpoint is not None
        at = endpoint_of_rank(endpoint, self._rank)
        socket.linger = 0
        socket.maxmsgsize = _MAX_INCOMING
        socket.ipv6 = "[" in at
        try:
            socket.bind(at)
        except self._zmq.ZMQError as error:
            reason = self._zmq.strerror(error.errno)
            raise ConfigError(f"KV events cannot be had at {at}: {reason}; choose another address") from None
        if not _LOOPBACK.fullmatch(at):
            logger.warning(
                "KV events hold the tokens of all prompts and outputs: let nothing but your router reach %s, "
                "where whatever connects can read them",
                at,
            )

    def publish(self, events: bytes) -> None:
        """Encoded events as one batch. Never waits."""
        batch = encode_batch(time.time(), events, self._rank)
        number = self.num_batches
        self.num_batches += 1
        message = (self._topic, number.to_bytes(8, "big"), batch)
        try:
            self._socket.send_multipart(message, self._zmq.DONTWAIT)
        except self._zmq.Again:
            self.num_overflows += 1
            self._socket.setsockopt(self._zmq.XPUB_NODROP, 0)  # to the others
            self._socket.send_multipart(message, self._zmq.DONTWAIT)
            self._socket.setsockopt(self._zmq.XPUB_NODROP, 1)
        if self._can_replay:
            self._keep(number, batch)

    def clear(self) -> None:
        """The engine is gone, with all blocks."""
        self.publish(CLEARED)

    def close(self) -> None:
        self._socket.close()
        self._context.term()  # ends the thread, and waits for it

    def stats(self) -> dict[str, int]:
        return {"batches": self.num_batches, "overflows": self.num_overflows}

    # --- replay ---------------------------------------------------------------------------------------------

    def _keep(self, number: int, batch: bytes) -> None:
        with self._lock:
            self._kept.append((number, batch))
            self._kept_bytes += len(batch)
            while len(self._kept) > REPLAY_BATCHES or self._kept_bytes > REPLAY_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, socket: Any) -> None:
        """Runs in its own thread until the context ends."""
        while True:
            try:
                self._replay(socket, socket.recv_multipart())
            except self._zmq.ContextTerminated:
                socket.close()
                return
            except self._zmq.ZMQError as error:
                logger.warning("a replay of KV events broke off: %s", error)  # its reader is slow or gone

    def _replay(self, socket: Any, request: list[bytes]) -> None:
        if len(request) != 3 or request[1] or len(request[2]) != 8:
            logger.warning("a replay of KV events was asked for in %d frames, not as in vLLM", len(request))
            return
        reader = request[0]
        first = int.from_bytes(request[2], "big")
        with self._lock:
            wanted = [(number, batch) for number, batch in self._kept if number >= first]
        for number, batch in wanted:
            socket.send_multipart((reader, b"", number.to_bytes(8, "big"), batch))
        socket.send_multipart((reader, b"", _END, b""))


def _check(name: str, endpoint: str, num_ranks: int) -> None:
    found = _PORT.fullmatch(endpoint)
    if not found and not _PATH.fullmatch(endpoint):
        expected = "an address such as tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///run/saccade/events"
        raise ConfigError(f"{name} must be {expected}, not {endpoint}")
    if found and not 1 <= int(found[2]) <= _MAX_PORT + 1 - num_ranks:
        allowed = f"from 1 to {_MAX_PORT + 1 - num_ranks}, since {num_ranks} replicas take a port each"
        raise ConfigError(f"the port in {name}={endpoint} must be {allowed}")


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Port 5557 is that of rank 0, 5558 that of rank 1."""
    found = _PORT.fullmatch(endpoint)
    if found:
        return f"{found[1]}{int(found[2]) + rank}"
    return f"{endpoint}_dp{rank}" if rank else endpoint


def _zmq() -> Any:
    try:
        return import_module("zmq")
    except ModuleNotFoundError:
        message = "kv_events needs ZeroMQ; install it: pip install 'saccade[kv-events]'"
        raise ConfigError(message) from None
