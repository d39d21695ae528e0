"""The main of helper processes: reads requests from stdin, a socket, and answers them within their limits.

`process` is the parent's side. CPU time is limited, not wall time: a busy machine must not make a
request fail.
"""

from __future__ import annotations

import array
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from saccade.helpers.process import REPLY, REQUEST, Outcome, read_exactly

_MAX_FDS = 4
_GRACE_SECONDS = 1  # after which the kernel ends what ignores its signal
_OOM_SCORE = b"1000"  # the kernel ends helpers before the server and its engines, where memory runs out
_REPEAT_SECONDS = 0.05  # of the signal: one that arrives during a finalizer is lost

Answer = Callable[[bytes, Sequence[int]], bytes]
"""The body of a request and the descriptors that came with it -> the body of the reply."""


class AnswerRefused(Exception):
    """The request cannot be done; `body` says why."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.body = body


class _Slow(BaseException):
    """The request took too long. No `except Exception` can swallow it."""


def limit_memory(megabytes: int) -> None:
    """The limit of address space, for the rest of this process."""
    limit_address_space(megabytes << 20, for_good=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_address_space(num_bytes: int, *, for_good: bool = False) -> None:
    """Within the limit that this process was started with, which it may not raise."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = _at_most(num_bytes, hard)
    with suppress(ValueError):  # macOS refuses limits below what is mapped
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit if for_good else hard))


def _at_most(value: int, limit: int) -> int:
    return value if limit == resource.RLIM_INFINITY else min(value, limit)


def serve(answer: Answer, *, is_python: bool = False) -> None:
    """Until the parent is gone. The signal of a request that takes too long ends the process.

    Work in Python is ended alone, by an exception, if `is_python`; one long operation ends the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb", 0) as file:
        file.write(_OOM_SCORE)
    if is_python:
        signal.signal(signal.SIGPROF, _raise_slow)
    with socket.socket(fileno=0) as connection, suppress(ConnectionError):
        while (request := _receive(connection)) is not None:
            seconds, body, fds = request
            outcome, cpu_seconds, reply = _answered(answer, seconds, body, fds)
            del request, body
            for fd in fds:
                os.close(fd)
            connection.sendall(REPLY.pack(outcome, cpu_seconds, len(reply)))
            connection.sendall(reply)


def _answered(
    answer: Answer, seconds: float, body: bytes, fds: Sequence[int]
) -> tuple[Outcome, float, bytes]:
    before = _cpu_time()
    outcome = Outcome.DONE
    reply = b""
    try:
        _limit_cpu(before, seconds)
        try:
            reply = answer(body, fds)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except AnswerRefused as refused:
        outcome = Outcome.FAILED
        reply = refused.body
    except MemoryError:
        outcome = Outcome.MEMORY
    except _Slow:
        signal.setitimer(signal.ITIMER_PROF, 0)  # the signal may have come just before the other call
        outcome = Outcome.SLOW
    return outcome, _cpu_time() - before, reply


def _cpu_time() -> float:
    """Seconds. time.process_time() stands still between the kernel's ticks where this time has a limit."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _raise_slow(*_: object) -> None:
    raise _Slow


def _limit_cpu(now: float, seconds: float) -> None:
    """The timer's signal ends the work; the kernel ends the process where a library has taken the signal."""
    _, maximum = resource.getrlimit(resource.RLIMIT_CPU)
    last = _at_most(math.ceil(now + seconds) + _GRACE_SECONDS, maximum)
    resource.setrlimit(resource.RLIMIT_CPU, (last, maximum))
    signal.setitimer(signal.ITIMER_PROF, seconds, _REPEAT_SECONDS)


def _receive(connection: socket.socket) -> tuple[float, bytes, list[int]] | None:
    """Seconds, body and descriptors of the next request. None when the parent is gone."""
    space = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
    header, ancillary, _, _ = connection.recvmsg(REQUEST.size, space)
    if not header:
        return None
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    header += read_exactly(connection.recv_into, REQUEST.size - len(header))
    seconds, length = REQUEST.unpack(header)
    return seconds, read_exactly(connection.recv_into, length), list(fds)
