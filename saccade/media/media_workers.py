"""Processes that parse clients' media, as their callers see them (`media_worker` is what runs there).

A job has limits of CPU time and memory which end it, and another thread can end it, too. What becomes of it
is its reply or a RequestError; the next job finds a process that works.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from saccade.errors import RequestError
from saccade.helpers.process import HelperProcess, Outcome, Reply
from saccade.media.decode import Pixels
from saccade.media.jobs import SEND_AGAIN, Job, Refusal, pack
from saccade.media.shared_pixels import Pin, SharedPixels

_MODULE = "saccade.media.media_worker"
_MAX_KEPT_BYTES = 128 << 20  # of files whose next part may be asked for
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
MAX_PROCESSES = 4  # of a process that only reads headers and documents


class Fault(NamedTuple):
    """What a client is told of bytes that a process failed on."""

    what: str  # begins the sentence
    code: str
    slow: str  # the rest of it, where it took too long
    died: str  # and where it ended its process

    def error(self, outcome: Outcome, reply: bytes) -> RequestError:
        if outcome is Outcome.FAILED:
            refusal = msgspec.msgpack.decode(reply, type=Refusal)
            message = f"{self.what} {refusal.message}" if refusal.is_rest else refusal.message
            return RequestError(message, code=refusal.code, param=refusal.param)
        if outcome is Outcome.CANCELLED:
            return RequestError(f"{self.what} was not decoded: no request waits for it", code="cancelled")
        if outcome is Outcome.UNAVAILABLE:
            message = (
                f"{self.what} cannot be read now: its process could not be started or was killed; try again"
            )
            return RequestError(message, code="overloaded")
        reason = self.slow if outcome is Outcome.SLOW else self.died
        return RequestError(f"{self.what} {reason}", code=self.code)


class Task(NamedTuple):
    """A job with the bytes that it is about, and its limits."""

    job: Job
    data: bytes
    seconds: float  # of CPU time
    memory: int  # bytes, beside what the process has
    fault: Fault
    keep: bool = False  # the next job may be about the same bytes


class Ticket:
    """One task under way, for the thread that may want to end it. One that has not begun then never does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: HelperProcess | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                self._process.cancel()

    def check(self) -> None:
        """RequestError after `cancel`: for work in steps that no process ends."""
        if self.is_cancelled:
            raise RequestError("no request waits for this any more", code="cancelled")

    @contextmanager
    def held_by(self, process: HelperProcess) -> Iterator[None]:
        with self._lock:
            self._process = process
        try:
            yield
        finally:
            with self._lock:
                self._process = None


class _MediaWorker:
    def __init__(self, niceness: int, pin: Pin | None) -> None:
        self.process = HelperProcess(_MODULE, str(niceness), environment=_ENVIRONMENT)
        self.memory = SharedPixels(pin)
        self.data: bytes | None = None  # what it read last, where more of that may come

    def ask(self, task: Task, ticket: Ticket | None) -> bytes:
        """The body of the reply. RequestError where there is none."""
        if ticket is None:
            ticket = Ticket()
        with ticket.held_by(self.process):
            reply = self._send(task, ticket)
        is_alive = reply.outcome in (Outcome.DONE, Outcome.FAILED)
        self.data = task.data if task.keep and is_alive else None
        if reply.outcome is not Outcome.DONE:
            raise task.fault.error(reply.outcome, reply.body)
        return reply.body

    def _send(self, task: Task, ticket: Ticket) -> Reply:
        fds = [self.memory.fd] if self.memory.fd >= 0 else []

        def ask(*parts: bytes) -> Reply:
            return self.process.ask(parts, task.seconds, fds, lambda: ticket.is_cancelled)

        if self.data is task.data:
            head = pack(task.job, task.memory, has_data=True)
            reply = ask(head)
            if (reply.outcome, reply.body) != (Outcome.FAILED, SEND_AGAIN):
                return reply
        return ask(pack(task.job, task.memory, has_data=False), task.data)

    def close(self) -> None:
        self.process.close()
        self.memory.close()
        self.data = None


class MediaWorkers:
    """A few processes, started on demand. The one that has a file gets its next part."""

    def __init__(self, processes: int, niceness: int = 0, pin: Pin | None = None) -> None:
        """`pin`: for memory that pixels come in."""
        self._workers = [_MediaWorker(niceness, pin) for _ in range(processes)]
        self._free = list(reversed(self._workers))  # the last used last, so that few are started
        self._freed = threading.Condition()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that run."""
        return tuple(pid for worker in self._workers if (pid := worker.process.pid) is not None)

    def ask(self, task: Task, ticket: Ticket | None = None) -> bytes:
        """The body of the reply."""
        with self._worker(task.data) as worker:
            return worker.ask(task, ticket)

    @contextmanager
    def pixels(self, task: Task, size: int, ticket: Ticket | None = None) -> Iterator[Pixels]:
        """What is decoded, at most `size` bytes: not copied, and valid inside the block."""
        with self._worker(task.data) as worker:
            worker.memory.reserve(size)
            try:
                body = worker.ask(task, ticket)
                yield worker.memory.pixels(msgspec.msgpack.decode(body, type=tuple[int, ...]))
            finally:
                worker.memory.trim()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    @contextmanager
    def _worker(self, data: bytes) -> Iterator[_MediaWorker]:
        with self._freed:
            self._freed.wait_for(lambda: self._free)
            worker = next((worker for worker in self._free if worker.data is data), self._free[-1])
            self._free.remove(worker)
        try:
            yield worker
        finally:
            with self._freed:
                self._free.append(worker)
                self._forget_files()
                self._freed.notify()

    def _forget_files(self) -> None:
        """The oldest ones beyond a limit: here now, and there with the next job."""
        sizes = [(worker, len(worker.data)) for worker in self._free if worker.data is not None]
        total = sum(size for _, size in sizes)
        for worker, size in sizes[:-1]:
            if total > _MAX_KEPT_BYTES:
                total -= size
                worker.data = None


MEDIA = MediaWorkers(min(MAX_PROCESSES, os.cpu_count() or 1))
"""The workers of this process, for headers and documents."""
