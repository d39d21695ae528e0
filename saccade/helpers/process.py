"""A helper process: work on a client's bytes that may never end, fill the memory or crash its parser.

It limits its own CPU time and memory, and ends with its socket, so it outlives no parent. What ends it costs
its own request; the next one starts another. `main` is the other side.

    request: CPU seconds, length, body ─► reply: outcome, CPU seconds taken, length, body
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from queue import LifoQueue
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

REQUEST = struct.Struct(">dQ")
REPLY = struct.Struct(">BdQ")
MAX_BODY = 1 << 31
_HUNG_SECONDS = 60.0  # of wall time beyond the CPU time: longer only while it gets a little of a processor
_CPU_CLOCK = 2  # Linux, as clock_getcpuclockid(3) makes the clock of a process
_MIN_SHARE = 0.01  # of a processor; with less it counts as stopped

_END_SECONDS = 1.0  # for one that has closed its socket, or is told to end by that
_REAP_SECONDS = 0.001  # between looks if it has ended

Buffer = bytes | bytearray | memoryview


def read_exactly(receive_into: Callable[[memoryview], int], length: int) -> bytes:
    """ConnectionError where the other side ends before."""
    body = bytearray(length)
    view = memoryview(body)
    while view:
        count = receive_into(view)
        if not count:
            raise ConnectionError("the other process has ended")
        view = view[count:]
    return bytes(body)


_helped = threading.local()  # what other processes took for each thread


def thread_seconds() -> float:
    """CPU seconds of this thread, as `time.thread_time`, and of the helper processes that it asked."""
    return time.thread_time() + getattr(_helped, "seconds", 0.0)


def count_seconds(seconds: float) -> None:
    """CPU time that was taken elsewhere for this thread."""
    _helped.seconds = getattr(_helped, "seconds", 0.0) + seconds


class Outcome(IntEnum):
    DONE = 0
    FAILED = 1  # the body says why
    SLOW = 2  # it took more CPU time than it may
    MEMORY = 3  # it needed more memory than it may
    DIED = 4  # never sent: the parent's own
    CANCELLED = 5  # so is this
    UNAVAILABLE = 6  # and this: not started, still or killed (no memory left); the request may be all right


class Reply(NamedTuple):
    outcome: Outcome
    seconds: float  # of CPU time
    body: bytes = b""


_ENDED_BY: Mapping[int | None, Outcome] = {
    -signal.SIGPROF: Outcome.SLOW,
    -signal.SIGXCPU: Outcome.SLOW,
    -signal.SIGKILL: Outcome.UNAVAILABLE,
}


class HelperProcess:
    """A process that is started on demand, and again after it has ended. One thread at a time asks it."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] = MappingProxyType({}),
        max_reply: int = MAX_BODY,
    ) -> None:
        """`module` is run with a socket as its stdin, these arguments, and these variables beside ours.

        `max_reply`: bytes of a reply.
        """
        self._command = (sys.executable, "-m", module, *arguments)
        self._environment = environment
        self._max_reply = max_reply
        self._lock = threading.Lock()  # between a start, `cancel` and `close`
        self._running: _Child | None = None
        self._is_cancelled = False
        self._is_closed = False

    def ask(
        self,
        parts: Sequence[Buffer],
        seconds: float,
        fds: Sequence[int] = (),
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Reply:
        """Sends the parts as one body; `fds` go with it. RuntimeError after `close`.

        `is_cancelled`: true before `cancel` is called, which may be before the process is known.
        """
        try:
            running = self._started(is_cancelled)
        except OSError:
            return Reply(Outcome.UNAVAILABLE, 0.0)
        if running is None:
            return Reply(Outcome.CANCELLED, 0.0)
        reply = self._reply(running, parts, seconds, fds)
        count_seconds(reply.seconds)
        return reply

    def _reply(self, running: _Child, parts: Sequence[Buffer], seconds: float, fds: Sequence[int]) -> Reply:
        start = time.monotonic()
        try:
            reply = running.ask(parts, seconds, fds, self._max_reply)
        except OSError as error:  # it stands still, or has ended
            why = Outcome.UNAVAILABLE if isinstance(error, TimeoutError) else Outcome.DIED
            outcome = self._end(running, why)
            return Reply(outcome, min(seconds, time.monotonic() - start, running.seconds))
        except BaseException:  # the caller gave up: the next one must not read its reply
            self._end(running, Outcome.DIED)
            raise
        if reply.outcome is Outcome.MEMORY:  # which it might keep
            self._end(running, Outcome.MEMORY)
        return reply

    def cancel(self) -> None:
        """Ends, from another thread, what it works on. Its `ask` returns CANCELLED."""
        with self._lock:
            if self._running is not None:
                self._is_cancelled = True
                self._running.kill()

    def close(self) -> None:
        """A caller that waits sees that the process has died. Returns when it has."""
        with self._lock:
            self._is_closed = True
            if self._running is not None:
                self._running.kill()
                self._running.wait()

    @property
    def pid(self) -> int | None:
        running = self._running
        if running is None or running.has_ended:
            return None
        return running.pid

    def _started(self, is_cancelled: Callable[[], bool]) -> _Child | None:
        """The process; None where the caller wants no answer any more."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the helper process was closed")
            self._is_cancelled = False
            if is_cancelled():  # asked under the lock: a `cancel` after this finds the process
                return None
            if self._running is None or self._running.has_ended:
                self._running = _Child(self._command, self._environment)
            return self._running

    def _end(self, running: _Child, otherwise: Outcome) -> Outcome:
        """Why it ended."""
        status = running.end()
        with self._lock:  # not held while it ends: `cancel` never waits for that
            self._running = None
            if self._is_cancelled:
                return Outcome.CANCELLED
            return _ENDED_BY.get(status, otherwise)


class _Child:
    """The process and the socket to it.

    PR_SET_PDEATHSIG, as used for the engine, would bind it to the thread that started it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C is for the parent
            )
        self.pid = self._child.pid
        self.seconds = 0.0  # of CPU time that no reply has told of; known when it has ended
        self._told = 0.0
        self._is_killed = False
        self._patience = _HUNG_SECONDS
        self._reaping = threading.Lock()
        self._socket = ours
        self._finish = weakref.finalize(self, _finish, self._child, ours)  # at the latest with this object

    @property
    def has_ended(self) -> bool:
        """Such as by the kernel, for want of memory, while it waited for work."""
        return self._is_killed or self._reap()

    def ask(self, parts: Sequence[Buffer], seconds: float, fds: Sequence[int], max_reply: int) -> Reply:
        """Raises OSError if the process has ended, TimeoutError if it stands still."""
        self._patience = seconds + _HUNG_SECONDS
        self._socket.settimeout(self._patience)
        header = REQUEST.pack(seconds, sum(map(len, parts)))
        if fds:
            socket.send_fds(self._socket, [header], fds)
        else:
            self._socket.sendall(header)
        for part in parts:
            self._socket.sendall(part)
        outcome, cpu_seconds, length = REPLY.unpack(read_exactly(self._receive_into, REPLY.size))
        if length > max_reply:
            raise ConnectionError(f"a helper process sends {length} bytes")
        reply = Reply(Outcome(outcome), cpu_seconds, read_exactly(self._receive_into, length))
        self._told += cpu_seconds
        return reply

    def kill(self) -> None:
        with self._reaping:
            self._is_killed = True
            if self._child.returncode is None:  # Popen's own `kill` would reap it
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        while not self._reap():
            time.sleep(_REAP_SECONDS)

    def end(self) -> int | None:
        """The exit status: what ended it. None if this process ended it."""
        self._socket.close()
        deadline = time.monotonic() + _END_SECONDS
        while not self._reap() and time.monotonic() < deadline:
            time.sleep(_REAP_SECONDS)
        if self._child.returncode is None:
            self.kill()
            self.wait()
        return None if self._is_killed else self._child.returncode

    def _reap(self) -> bool:
        """Whether it has ended. Unlike Popen's `poll` this learns what it took."""
        with self._reaping:
            if self._child.returncode is None:
                try:
                    pid, status, usage = os.wait4(self.pid, os.WNOHANG)
                except ChildProcessError:  # where SIGCHLD is ignored: its times are lost
                    self._child.returncode = 0
                    return True
                if pid:
                    self._child.returncode = os.waitstatus_to_exitcode(status)
                    self.seconds = max(0.0, usage.ru_utime + usage.ru_stime - self._told)
            return self._child.returncode is not None

    def _receive_into(self, view: memoryview) -> int:
        """Waits on while the process works: beside busy threads a nice one gets little of a processor."""
        while True:
            before = self._cpu_seconds()
            try:
                return self._socket.recv_into(view)
            except TimeoutError:
                if self._cpu_seconds() - before < _MIN_SHARE * self._patience:
                    raise

    def _cpu_seconds(self) -> float:
        """Those of the process until now; 0 where the system has no such clock."""
        with suppress(OSError):
            return time.clock_gettime(~self.pid << 3 | _CPU_CLOCK)
        return 0.0


def _finish(child: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    child.kill()
    child.wait()


class Closable(Protocol):
    def close(self) -> None: ...


Helper = TypeVar("Helper", bound=Closable)
Result = TypeVar("Result")


class HelperPool(Generic[Helper]):
    """A few helpers; the one used last goes first, so that others start only when needed."""

    def __init__(self, helpers: Sequence[Helper]) -> None:
        self.helpers = tuple(helpers)
        self._free: LifoQueue[Helper] = LifoQueue()
        for helper in reversed(self.helpers):
            self._free.put(helper)

    def use(self, work: Callable[[Helper], Result]) -> Result:
        """Waits for a free one."""
        helper = self._free.get()
        try:
            return work(helper)
        finally:
            self._free.put(helper)

    def close(self) -> None:
        """Ends all processes. May be called again."""
        for helper in self.helpers:
            helper.close()
