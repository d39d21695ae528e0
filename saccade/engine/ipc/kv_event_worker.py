"""The main of a process that serves one engine's KV events over ZeroMQ, started by `kv_event_publisher`.

    PUB     topic | sequence number, 8 bytes, big endian | batch        to all readers
    ROUTER  a reader asks with (empty, first number) and gets (empty, number, batch) ... (empty, -1, empty)

libzmq keeps every topic that a reader names and every frame of a message that has no end yet. No option
bounds them, so the memory of this process does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from saccade.engine.ipc.kv_event_publisher import KEPT, MAX_BATCHES, MAX_BYTES, RECORD, REPLY
from saccade.helpers.main import AnswerRefused, limit_memory, serve

MAX_QUEUED = 1000  # batches that wait for one reader; readers that wait for the same batch share its memory
_MEMORY_MB = 640  # of address space, of which 380 MB are for itself and the replays
_REPLAY_SECONDS = 1.0  # that a reader may take before it gets no more of its replay: others wait meanwhile
_MAX_REPLAY_SECONDS = 60.0  # of a whole replay, to a reader that takes each batch just in time
_HANDSHAKE_SECONDS = 5.0
_MAX_FRAME = 512  # bytes of what a reader sends: a topic, a number, or its name in the handshake
_MAX_UNREAD = 100  # messages of a reader
_NUM_FRAMES = 3  # of a request: reader, empty, number
_END = (-1).to_bytes(8, "big", signed=True)


class EventServer:
    """The sockets. `answer` is for one thread; another one of its own answers replays."""

    def __init__(self, publish: str, replay: str, topic: bytes) -> None:
        """Addresses; without the second there are no replays."""
        self.num_overflows = 0  # since they were told of
        self.num_failed = 0  # replays
        self._ends = (publish, replay)
        self._topic = topic
        self._kept: deque[tuple[int, bytes]] = deque()  # by number
        self._kept_bytes = 0
        self._lock = threading.Lock()  # of the two above, and of the counts
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None

    def bind(self) -> zmq.Socket[bytes]:
        """Of which the first is returned. AnswerRefused if an address cannot be had."""
        publish, replay = self._ends
        socket = self._bound(zmq.PUB, publish)
        socket.setsockopt(zmq.XPUB_NODROP, 1)  # the first batch that a reader cannot take is refused
        if replay:
            router = self._bound(zmq.ROUTER, replay)
            threading.Thread(target=self._answer_replays, args=(router,), daemon=True).start()
        return socket

    def _bound(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = MAX_QUEUED
        socket.rcvhwm = _MAX_UNREAD
        socket.maxmsgsize = _MAX_FRAME
        socket.handshake_ivl = int(_HANDSHAKE_SECONDS * 1000)
        socket.ipv6 = "[" in address
        if kind == zmq.ROUTER:
            socket.sndtimeo = int(_REPLAY_SECONDS * 1000)
            socket.router_mandatory = 1  # wait for a reader that is slow instead of skipping batches
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise AnswerRefused(f"{address}: {zmq.strerror(error.errno or 0)}".encode()) from None
        return socket

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._context.term()  # ends the thread, and waits for it

    def answer(self, request: bytes, _: Sequence[int] = ()) -> bytes:
        """Readers can connect from the moment that all batches are here that they may ask for."""
        first, end = KEPT.unpack_from(request)
        is_bound = self._socket is not None
        body = memoryview(request)[KEPT.size :]
        while body:
            number, is_due, length = RECORD.unpack_from(body)
            batch = bytes(body[RECORD.size : RECORD.size + length])
            body = body[RECORD.size + length :]
            if is_due and self._socket is not None:
                self._publish(self._socket, number, batch)
            if self._ends[1]:
                self._keep(number, batch)
        with self._lock:
            oldest, newest = (self._kept[0][0], self._kept[-1][0]) if self._kept else (end, end - 1)
            is_missing = first < min(oldest, end)
            is_whole = first == end or (not is_missing and newest + 1 == end)
            reply = REPLY.pack(self.num_overflows, self.num_failed, is_missing, is_bound)
            self.num_overflows = self.num_failed = 0
        if is_whole and self._socket is None:
            self._socket = self.bind()
        return reply

    def _publish(self, socket: zmq.Socket[bytes], number: int, batch: bytes) -> None:
        message = (self._topic, number.to_bytes(8, "big"), batch)
        try:
            socket.send_multipart(message, zmq.DONTWAIT)
        except zmq.Again:
            self.num_overflows += 1
            socket.setsockopt(zmq.XPUB_NODROP, 0)  # to the others
            socket.send_multipart(message, zmq.DONTWAIT)
            socket.setsockopt(zmq.XPUB_NODROP, 1)

    # --- replay ---------------------------------------------------------------------------------------------

    def _keep(self, number: int, batch: bytes) -> None:
        with self._lock:
            if self._kept and number <= self._kept[-1][0]:  # this process is new and gets all from the first
                self._kept.clear()
                self._kept_bytes = 0
            self._kept.append((number, batch))
            self._kept_bytes += len(batch)
            while len(self._kept) > MAX_BATCHES or self._kept_bytes > MAX_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer_replays(self, socket: zmq.Socket[bytes]) -> None:
        """Runs in its own thread until the context ends."""
        try:
            while True:
                if not self._has_replayed(socket, _request(socket)):
                    with self._lock:
                        self.num_failed += 1
        except zmq.ContextTerminated:
            socket.close()
        except MemoryError:
            os._exit(1)  # the parent starts another one

    def _has_replayed(self, socket: zmq.Socket[bytes], request: list[bytes]) -> bool:
        if [len(frame) for frame in request[1:]] != [0, len(_END)]:
            return False
        reader = request[0]
        first = int.from_bytes(request[2], "big")
        with self._lock:
            batches = [(number, batch) for number, batch in self._kept if number >= first]
        deadline = time.monotonic() + _MAX_REPLAY_SECONDS
        try:
            for number, batch in batches:
                if time.monotonic() > deadline:
                    return False
                socket.send_multipart((reader, b"", number.to_bytes(8, "big"), batch))
            socket.send_multipart((reader, b"", _END, b""))
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError:  # the reader is slow or gone
            return False
        return True


def _request(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Its first frames, one more than there should be."""
    frames = [socket.recv()]
    while socket.rcvmore:
        frame = socket.recv()
        if len(frames) <= _NUM_FRAMES:
            frames.append(frame)
    return frames


def main() -> None:
    limit_memory(_MEMORY_MB)
    publish, replay, topic = sys.argv[1:]
    server = EventServer(publish, replay, topic.encode())
    serve(server.answer)
    server.close()


if __name__ == "__main__":
    main()
