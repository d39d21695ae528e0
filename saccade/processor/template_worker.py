"""The process that renders chats: `python -m saccade.processor.template_worker`, with a socket as its stdin.

A template may loop forever or fill the memory, so each chat has a limit of CPU seconds and the process one of
memory. The process enforces both on itself, so it outlives no parent. CPU time, because a busy machine must
not make a chat fail.

    request: length, seconds, JSON ─► reply: length, kind, text
    the first request is the template; its reply says whether it can be compiled
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from saccade.errors import ConfigError, RequestError
from saccade.processor.template import compile_template, render

REQUEST = struct.Struct(">Id")
REPLY = struct.Struct(">IB")
MEMORY_MB = 768  # of address space: the interpreter alone takes a few dozen, on some systems 250
_INSIST_SECONDS = 0.05  # the signal repeats, as one that arrives during a finalizer is lost


class Kind(IntEnum):
    TEXT = 0
    REFUSED = 1  # the text is for the client
    TOO_LONG = 2  # so is this: the rendered chat is too long
    BROKEN = 3  # the template cannot be compiled; the text is for the operator
    SLOW = 4
    MEMORY = 5
    DIED = 6  # never sent: the parent's own, for a process that ended


class Reply(NamedTuple):
    kind: Kind
    text: str = ""


class Setup(NamedTuple):
    """The first request."""

    template: str
    max_chars: int  # of a rendered chat
    niceness: int


def packed(value: Any) -> bytes:
    """JSON. Lone surrogates pass; the tokenizer refuses them later with an error of its own."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def unpacked(body: bytes) -> Any:
    return json.loads(body.decode("utf-8", "surrogatepass"))


class _Slow(BaseException):
    """A BaseException, so that no `except Exception` around the template can swallow it."""


def main() -> None:
    signal.signal(signal.SIGPROF, _stop)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB << 20, MEMORY_MB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as connection, suppress(ConnectionError):  # the parent may be gone
        _serve(connection)


def _stop(*_: Any) -> None:
    raise _Slow


def _serve(connection: socket.socket) -> None:
    setup: Setup | None = None
    for seconds, body in _requests(connection):
        if setup is None:
            setup = Setup(*unpacked(body))
            os.nice(setup.niceness)
            _answer(connection, partial(_compiled, setup), seconds)
        else:
            _answer(connection, partial(_rendered, setup, body), seconds)


def _requests(connection: socket.socket) -> Iterator[tuple[float, bytes]]:
    with connection.makefile("rb") as stream:
        while len(header := stream.read(REQUEST.size)) == REQUEST.size:
            length, seconds = REQUEST.unpack(header)
            yield seconds, stream.read(length)


def _compiled(setup: Setup) -> str:
    compile_template(setup.template)
    return ""


def _rendered(setup: Setup, body: bytes) -> str:
    context: dict[str, Any] = unpacked(body)
    return render(setup.template, context.pop("messages"), setup.max_chars, **context)


def _answer(connection: socket.socket, work: Callable[[], str], seconds: float) -> None:
    reply = _outcome(work, seconds)
    body = reply.text.encode("utf-8", "surrogatepass")
    connection.sendall(REPLY.pack(len(body), reply.kind) + body)


def _outcome(work: Callable[[], str], seconds: float) -> Reply:
    try:
        with _limited(seconds):
            return Reply(Kind.TEXT, work())
    except _Slow:
        signal.setitimer(signal.ITIMER_PROF, 0)  # a second signal may have arrived before `_limited` did this
        return Reply(Kind.SLOW)
    except MemoryError:
        return Reply(Kind.MEMORY)
    except RequestError as error:
        return Reply(Kind.TOO_LONG if error.code else Kind.REFUSED, error.message)
    except ConfigError as error:
        return Reply(Kind.BROKEN, str(error))


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """SIGPROF raises `_Slow` in Python code. What cannot be interrupted, such as a huge power, is ended a
    second or two later by the kernel (RLIMIT_CPU), with the process.
    """
    last = math.ceil(time.process_time() + seconds) + 1
    _, maximum = resource.getrlimit(resource.RLIMIT_CPU)
    last = last if maximum == resource.RLIM_INFINITY else min(last, maximum)
    resource.setrlimit(resource.RLIMIT_CPU, (last, maximum))
    signal.setitimer(signal.ITIMER_PROF, seconds, _INSIST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
