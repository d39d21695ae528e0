"""A channel to an encoder worker on this machine: a Unix socket for messages, shared memory for embeddings.

Owns the arena. A place in it is reserved before an image is sent, and free again when the embedding has been
read. After a lost result nothing is reused: the next connection has its own arena.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from threading import Condition, Lock, Thread
from time import monotonic
from typing import BinaryIO

from saccade.engine.encoders.arena import Space, mapped, new_arena
from saccade.engine.encoders.messages import Begun, Encode, Encoded, Failed, Welcome, reply_in
from saccade.engine.ipc.messages import WireError, frame, read_body
from saccade.runner.encoder.encoder_channel import EncoderLate, EncoderLost, RemoteEmbedding
from saccade.types.media import MediaItem

_HANDSHAKE_SECONDS = 5.0
_SEND_TIMEOUT = struct.pack("ll", 5, 0)  # seconds, microseconds
_GONE = "its connection closed"


@dataclass(eq=False)
class _EncodeJob:
    start: int
    reply: Future[Encoded] = field(default_factory=Future)
    was_begun: bool = False
    is_abandoned: bool = False  # no thread waits for it; its place is still the worker's


class SocketChannel:
    def __init__(self, address: str, arena_bytes: int) -> None:
        """OSError: no worker serves this address now."""
        self.is_open = True
        self.space = Space(arena_bytes)
        self._changed = Condition()  # guards the space, the waiting calls and the jobs
        self._sending = Lock()
        self._waiting: deque[object] = deque()  # calls without a place, in order
        self._jobs: dict[int, _EncodeJob] = {}
        self._numbers = count()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(_HANDSHAKE_SECONDS)
            self._socket.connect(address)
            fd = new_arena(arena_bytes)
            with suppress(OSError):  # then reading fails, too
                socket.send_fds(self._socket, [b"\0"], [fd])
            self._memory = mapped(fd)
            self._stream: BinaryIO = self._socket.makefile("rb")
            self.seconds_per_patch = self._welcomed()
            self._socket.settimeout(None)
            # A worker that does not read must not hold up the others' images.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        except BaseException:
            self._socket.close()
            raise
        Thread(target=self._read, name="saccade-encoder-reader", daemon=True).start()

    def _welcomed(self) -> float:
        try:
            body = read_body(self._stream)
            welcome = reply_in(body) if body is not None else None
        except WireError as error:
            raise ConnectionError(str(error)) from None
        if not isinstance(welcome, Welcome):
            raise ConnectionError("the encoder worker did not begin with Welcome")
        return welcome.seconds_per_patch

    @contextmanager
    def encode(self, item: MediaItem, num_bytes: int, seconds: float) -> Iterator[RemoteEmbedding]:
        deadline = monotonic() + seconds
        number = next(self._numbers)
        job = self._reserve(number, num_bytes, deadline)
        try:
            self._send(number, Encode(number, item, job.start, num_bytes))
            try:
                reply = job.reply.result(max(deadline - monotonic(), 0.0))
            except TimeoutError:
                raise EncoderLate(f"no embedding within {seconds:.1f} s") from None
            view = self._memory[job.start : job.start + min(reply.num_bytes, num_bytes)]
            yield RemoteEmbedding(view, reply.shape, reply.dtype, reply.times)
        finally:
            self._leave(number, job)

    def _reserve(self, number: int, num_bytes: int, deadline: float) -> _EncodeJob:
        """Waits for the calls before it, then for space."""
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                while True:
                    if not self.is_open:
                        raise EncoderLost(_GONE, was_begun=False)
                    start = self.space.reserve(num_bytes) if self._waiting[0] is me else None
                    if start is not None:
                        job = self._jobs[number] = _EncodeJob(start)
                        return job
                    if not self._changed.wait(deadline - monotonic()):
                        raise EncoderLate("its shared memory stays full")
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()

    def _send(self, number: int, message: Encode) -> None:
        try:
            data = frame(message)
        except BaseException:  # the worker will not hear of it
            with self._changed:
                self._free(number)
            raise
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError:
            self._fail()

    def _leave(self, number: int, job: _EncodeJob) -> None:
        with self._changed:
            if job.reply.done() or number not in self._jobs:
                self._free(number)
            else:
                job.is_abandoned = True

    def _free(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is not None:
            self.space.free(job.start)
            self._changed.notify_all()

    # --- replies --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        with self._stream, suppress(OSError, WireError):
            while (body := read_body(self._stream)) is not None:
                self._take(body)
        self._fail()

    def _take(self, body: bytes) -> None:
        reply = reply_in(body)
        if isinstance(reply, Welcome):
            raise WireError("a second Welcome")
        with self._changed:
            job = self._jobs.get(reply.job)
            if job is None or job.reply.done():
                raise WireError(f"a reply to the job {reply.job}, which is not open")
            if isinstance(reply, Begun):
                job.was_begun = True
                return
            if isinstance(reply, Failed):
                job.reply.set_exception(reply.error)
            else:
                job.reply.set_result(reply)
            if job.is_abandoned:
                self._free(reply.job)

    def _fail(self) -> None:
        """The worker is gone: all that wait hear of it, and no place is in use any more."""
        with self._changed:
            if not self.is_open:
                return
            self.is_open = False
            for number, job in list(self._jobs.items()):
                if not job.reply.done():
                    job.reply.set_exception(EncoderLost(_GONE, was_begun=job.was_begun))
                if job.is_abandoned:
                    self._free(number)
            self._changed.notify_all()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the reader
        self._socket.close()

    def close(self) -> None:
        self._fail()

    def check(self) -> None:
        """The conservation law: every place that is reserved belongs to an open job."""
        with self._changed:
            self.space.check()
            assert bool(self.space.used) == bool(self._jobs), "a place without a job"
