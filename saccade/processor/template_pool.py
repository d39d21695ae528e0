"""Process pool for chat templates, with a limit on time and memory. The processes are `template_worker`.

A chat first gets `_QUICK_SECONDS`, a hundred times what published templates take. A slower one starts again
in the slow lane, whose few processes have a lower priority, so that it cannot delay other chats.

    render ─► quick: 2 processes ─► done
                    └─ too slow ─► slow: 2 processes, 6 wait, more are refused ─► done, or ended
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import weakref
from queue import LifoQueue
from typing import Any

from saccade.errors import ConfigError, RequestError
from saccade.processor.template import MAX_REASON, required
from saccade.processor.template_worker import MEMORY_MB, REPLY, REQUEST, Kind, Reply, Setup, packed

MAX_SLOW = 8
THREADS = MAX_SLOW + 4
"""Of the caller: slow chats cannot occupy all of them."""

_QUICK_PROCESSES = 2
_SLOW_PROCESSES = 2
_QUICK_SECONDS = 0.05
_SLOW_NICENESS = 5
_COMPILE_SECONDS = 5.0
_HUNG_SECONDS = 60.0  # of wall time; the worker limits its CPU time, so only a stopped process takes as long
_SENTENCE_BYTES = 4096  # of our own words around a template's message
_COMMAND = (sys.executable, "-m", "saccade.processor.template_worker")

logger = logging.getLogger("saccade.processor")


class TemplateEnded(RequestError):
    """The template process was ended, which says nothing about the messages."""


class TemplatePool:
    """Renders one checkpoint's template. Processes start on demand and end with `close` or this object."""

    def __init__(self, template: str | None, seconds: float, max_chars: int) -> None:
        self._template = template
        self._seconds = seconds
        self._max_bytes = 4 * max_chars  # of the context: a template writes about as much as it reads
        self._quick = _Lane(_QUICK_PROCESSES, Setup(template or "", max_chars, 0))
        self._slow = _Lane(_SLOW_PROCESSES, Setup(template or "", max_chars, _SLOW_NICENESS))
        self._slow_slots = threading.Semaphore(MAX_SLOW)
        self._broken: ConfigError | None = None

    def render(self, **context: Any) -> str:
        """From any thread. RequestError if the template refuses, is too slow or writes too much."""
        required(self._template)
        if self._broken is not None:
            raise self._broken
        body = self._body(context)
        quick = min(_QUICK_SECONDS, self._seconds)
        reply = self._quick.ask(body, quick)
        if reply.kind is Kind.SLOW and quick < self._seconds:
            reply = self._ask_again(body)
        return self._text_in(reply)

    def close(self) -> None:
        """End all processes; callers still waiting get an error. May be called again."""
        for lane in (self._quick, self._slow):
            lane.close()

    def _body(self, context: dict[str, Any]) -> bytes:
        try:
            body = packed(context)
        except ValueError:
            message = "a number in the messages or tools has thousands of digits"
            raise RequestError(message, param="messages") from None
        if len(body) > self._max_bytes:
            given = f"messages, tools and chat_template_kwargs have {len(body)} bytes"
            message = f"{given}, more than the context can hold ({self._max_bytes} at most); send less"
            raise RequestError(message, code="context_length_exceeded", param="messages")
        return body

    def _ask_again(self, body: bytes) -> Reply:
        if not self._slow_slots.acquire(blocking=False):
            message = f"{MAX_SLOW} chats that take the template long are open already; send this one later"
            raise RequestError(message, code="overloaded", param="messages")
        try:
            return self._slow.ask(body, self._seconds)
        finally:
            self._slow_slots.release()

    def _text_in(self, reply: Reply) -> str:
        if reply.kind is Kind.TEXT:
            return reply.text
        if reply.kind is Kind.BROKEN:
            logger.warning("chats are refused: %s", reply.text)
            message = "the checkpoint's chat template cannot be compiled; the server's log says why"
            self._broken = ConfigError(message)
            raise self._broken
        if reply.kind in (Kind.REFUSED, Kind.TOO_LONG):
            code = "context_length_exceeded" if reply.kind is Kind.TOO_LONG else None
            raise RequestError(reply.text, code=code, param="messages")
        reasons = {
            Kind.SLOW: f"took more than {self._seconds:g} s for these messages (--chat-template-timeout)",
            Kind.MEMORY: f"needed more than {MEMORY_MB} MiB for these messages",
        }
        why = reasons.get(reply.kind, "took too long or too much memory for these messages")
        message = f"the model's chat template {why}; send less, or use another template"
        raise TemplateEnded(message, param="messages")


class _Lane:
    """A few processes; the most recently used one goes first, so that others start only when needed."""

    def __init__(self, count: int, setup: Setup) -> None:
        self._children = [_Child(setup) for _ in range(count)]
        self._free: LifoQueue[_Child] = LifoQueue()
        for child in self._children:
            self._free.put(child)

    def ask(self, body: bytes, seconds: float) -> Reply:
        child = self._free.get()
        try:
            return child.ask(body, seconds)
        finally:
            self._free.put(child)

    def close(self) -> None:
        for child in self._children:
            child.close()


class _Child:
    """A process that is started on demand and restarted after it has ended."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._lock = threading.Lock()  # between a start and `close`
        self._is_closed = False
        self._process: _Process | None = None

    def ask(self, body: bytes, seconds: float) -> Reply:
        """Called by one thread at a time."""
        try:
            reply = self._started().ask(body, seconds)
        except OSError:  # it is gone, says nothing, or cannot be started
            reply = Reply(Kind.DIED)
        except BaseException:  # the caller gave up (Ctrl-C): the next one must not read its reply
            self._forget()
            raise
        if reply.kind in (Kind.BROKEN, Kind.MEMORY, Kind.DIED):
            self._forget()
        return reply

    def close(self) -> None:
        """A waiting caller sees the end of the stream."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _started(self) -> _Process:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("chats cannot be rendered any more: the processor was closed")
            if self._process is None or self._process.has_ended:
                self._process = _Process(self._setup)
            return self._process

    def _forget(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.end()
            self._process = None


class _Process:
    """A running template_worker and the socket to it. It ends when its socket closes or at its own limits.

    PR_SET_PDEATHSIG, as used for the engine, would bind it to the thread that started it.
    """

    def __init__(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                _COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        self._connection = ours
        self.end = weakref.finalize(self, _end, self._child, ours)  # at the latest with this object
        self._max_bytes = 4 * max(setup.max_chars, MAX_REASON) + _SENTENCE_BYTES
        self._is_ready = False
        self._send(packed(setup), _COMPILE_SECONDS)

    @property
    def has_ended(self) -> bool:
        return self._child.poll() is not None

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def ask(self, body: bytes, seconds: float) -> Reply:
        """Raises OSError if the process has ended."""
        if not self._is_ready:
            first = self._receive()
            if first.kind is not Kind.TEXT:
                limits = f"{_COMPILE_SECONDS:g} s or {MEMORY_MB} MiB"
                reason = f"it takes more than {limits} to compile the chat template"
                return Reply(Kind.BROKEN, first.text or reason)
            self._is_ready = True
        self._send(body, seconds)
        return self._receive()

    def _send(self, body: bytes, seconds: float) -> None:
        self._connection.settimeout(seconds + _HUNG_SECONDS)
        self._connection.sendall(REQUEST.pack(len(body), seconds) + body)

    def _receive(self) -> Reply:
        length, kind = REPLY.unpack(self._read(REPLY.size))
        if length > self._max_bytes:
            raise ConnectionError(f"the process that renders chats sends {length} bytes")
        return Reply(Kind(kind), self._read(length).decode("utf-8", "surrogatepass"))

    def _read(self, length: int) -> bytes:
        parts: list[bytes] = []
        while length:
            part = self._connection.recv(min(length, 1 << 20))
            if not part:
                raise ConnectionError("the process that renders chats has ended")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


def _end(child: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    child.kill()
    child.wait()
