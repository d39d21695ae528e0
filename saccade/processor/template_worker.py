"""The process that renders chats: `python -m saccade.processor.template_worker`, with a socket as its standard input.

One checkpoint's template, many chats. A template may loop for ever or fill the memory, so each chat has its CPU
seconds and the process its memory; both limits end it from inside, so that it outlives no parent. CPU seconds and not
time: a template never waits, and on a busy machine nobody is ended for being interrupted.

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
MEMORY_MB = 768  # addresses, not pages: the interpreter itself takes a few dozen, on some systems 250
_INSIST_SECONDS = 0.05  # a signal that comes while an object is taken down is lost


class Kind(IntEnum):
    TEXT = 0
    REFUSED = 1  # the text is what the client is told
    TOO_LONG = 2  # the same, of what was written
    BROKEN = 3  # the template cannot be compiled; the text is for the operator
    SLOW = 4
    MEMORY = 5
    DIED = 6  # said by nobody: the parent's word for silence


class Reply(NamedTuple):
    kind: Kind
    text: str = ""


class Setup(NamedTuple):
    """The first request."""

    template: str
    most_chars: int  # that a chat may become
    niceness: int


def packed(value: Any) -> bytes:
    """JSON, with halves of surrogate pairs as they are: who reads the text later says what is wrong with them."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def unpacked(body: bytes) -> Any:
    return json.loads(body.decode("utf-8", "surrogatepass"))


class _Slow(BaseException):
    """No Exception: nothing between here and the template's loop may take it for its own."""


def main() -> None:
    signal.signal(signal.SIGPROF, _stop)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB << 20, MEMORY_MB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as connection, suppress(ConnectionError):  # the parent may be gone at any time
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
    return render(setup.template, context.pop("messages"), setup.most_chars, **context)


def _answer(connection: socket.socket, work: Callable[[], str], seconds: float) -> None:
    kind, text = _outcome(work, seconds)
    body = text.encode("utf-8", "surrogatepass")
    connection.sendall(REPLY.pack(len(body), kind) + body)


def _outcome(work: Callable[[], str], seconds: float) -> Reply:
    try:
        with _limited(seconds):
            return Reply(Kind.TEXT, work())
    except _Slow:
        signal.setitimer(signal.ITIMER_PROF, 0)  # a second signal may have come before this was done below
        return Reply(Kind.SLOW)
    except MemoryError:
        return Reply(Kind.MEMORY)
    except RequestError as error:
        return Reply(Kind.TOO_LONG if error.code else Kind.REFUSED, error.message)
    except ConfigError as error:
        return Reply(Kind.BROKEN, str(error))


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """An exception ends what Python runs; what it cannot interrupt, such as a power of two large numbers, the kernel
    ends a second or two later with the process."""
    last = math.ceil(time.process_time() + seconds) + 1
    _, maximum = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (last if maximum == resource.RLIM_INFINITY else min(last, maximum), maximum)
    )
    signal.setitimer(signal.ITIMER_PROF, seconds, _INSIST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
