"""Process pool for chat templates, with a limit on time and memory. The processes are `template_worker`.

A chat first gets `_QUICK_SECONDS`, a hundred times what published templates take. A slower one starts again
in the slow lane, whose few processes have a lower priority, so that it cannot delay other chats.

    render ─► quick: 2 processes ─► done
                    └─ too slow ─► slow: 2 processes, 6 wait, more are refused ─► done, or ended
"""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

from saccade.errors import ConfigError, EngineUnavailable, RequestError
from saccade.helpers.process import HelperPool, HelperProcess, Outcome, Reply
from saccade.processor.template import MAX_REASON, required
from saccade.processor.template_worker import (
    CHAT,
    MEMORY_MB,
    REFUSED,
    TEMPLATE,
    TOO_LONG,
    decoded,
    encoded,
)

MAX_SLOW = 8
THREADS = MAX_SLOW + 4
"""Threads of the caller: slow chats cannot occupy all of them."""

_QUICK_PROCESSES = 2
_SLOW_PROCESSES = 2
_QUICK_SECONDS = 0.05
_SLOW_NICENESS = 5
_COMPILE_SECONDS = 5.0
_RETRY_SECONDS = 1.0  # when a process cannot be started
_SENTENCE_BYTES = 4096  # of our own words around a template's message
_CODES = {REFUSED: None, TOO_LONG: "context_length_exceeded"}

logger = logging.getLogger("saccade.processor")


class TemplateEnded(RequestError):
    """The template process was ended, which says nothing about the messages."""


class TemplatePool:
    """Renders one checkpoint's template. Processes start on demand and end with `close` or this object."""

    def __init__(self, template: str | None, seconds: float, max_chars: int) -> None:
        self._template = template
        self._seconds = seconds
        self._max_bytes = 4 * max_chars  # of the context: a template writes about as much as it reads
        setup = (encoded(template or ""), max_chars)
        self._quick = HelperPool([_RendererProcess(*setup, 0) for _ in range(_QUICK_PROCESSES)])
        self._slow = HelperPool([_RendererProcess(*setup, _SLOW_NICENESS) for _ in range(_SLOW_PROCESSES)])
        self._slow_slots = threading.Semaphore(MAX_SLOW)
        self._broken: ConfigError | None = None

    def render(self, **context: Any) -> str:
        """Any thread may call it. RequestError if the template refuses, is too slow or writes too much."""
        required(self._template)
        if self._broken is not None:
            raise self._broken
        body = self._body(context)
        quick = min(_QUICK_SECONDS, self._seconds)
        reply = self._ask(self._quick, body, quick)
        if reply.outcome is Outcome.SLOW and quick < self._seconds:
            reply = self._ask_slow(body)
        return self._text_in(reply)

    def close(self) -> None:
        """End all processes; callers still waiting get an error. May be called again."""
        self._quick.close()
        self._slow.close()

    def _body(self, context: dict[str, Any]) -> bytes:
        try:
            body = encoded(json.dumps(context, ensure_ascii=False))
        except ValueError:
            message = "a number in the messages or tools has thousands of digits"
            raise RequestError(message, param="messages") from None
        if len(body) > self._max_bytes:
            subject = f"messages, tools and chat_template_kwargs have {len(body)} bytes"
            message = f"{subject}, more than the context can hold ({self._max_bytes} at most); send less"
            raise RequestError(message, code="context_length_exceeded", param="messages")
        return body

    def _ask_slow(self, body: bytes) -> Reply:
        if not self._slow_slots.acquire(blocking=False):
            message = f"{MAX_SLOW} chats that take the template long are open already; send this one later"
            raise RequestError(message, code="overloaded", param="messages")
        try:
            return self._ask(self._slow, body, self._seconds)
        finally:
            self._slow_slots.release()

    def _ask(self, lane: HelperPool[_RendererProcess], body: bytes, seconds: float) -> Reply:
        try:
            return lane.use(lambda renderer: renderer.ask(body, seconds))
        except ConfigError as error:
            logger.warning("chats are refused: %s", error)
            message = "the checkpoint's chat template cannot be compiled; the server's log says why"
            self._broken = ConfigError(message)
            raise self._broken from None

    def _text_in(self, reply: Reply) -> str:
        if reply.outcome is Outcome.DONE:
            return decoded(reply.body)
        if reply.outcome is Outcome.FAILED and reply.body[:1] in _CODES:
            raise RequestError(decoded(reply.body[1:]), code=_CODES[reply.body[:1]], param="messages")
        if reply.outcome is Outcome.UNAVAILABLE:
            message = (
                "the process that renders chats cannot be started, stands still or was killed; try again"
            )
            raise EngineUnavailable(message, _RETRY_SECONDS)
        reasons = {
            Outcome.SLOW: f"took more than {self._seconds:g} s for these messages (--chat-template-timeout)",
            Outcome.MEMORY: f"needed more than {MEMORY_MB} MiB for these messages",
        }
        why = reasons.get(reply.outcome, "took too long or too much memory for these messages")
        message = f"the model's chat template {why}; send less, or use another template"
        raise TemplateEnded(message, param="messages")


class _RendererProcess:
    """A process that has compiled the template. One thread at a time asks it."""

    def __init__(self, template: bytes, max_chars: int, niceness: int) -> None:
        self._template = template
        self._process = HelperProcess(
            "saccade.processor.template_worker",
            str(max_chars),
            str(niceness),
            max_reply=4 * max(max_chars, MAX_REASON) + _SENTENCE_BYTES,
        )
        self._ready: int | None = None  # the process that has compiled it
        self.close = self._process.close

    def ask(self, body: bytes, seconds: float) -> Reply:
        """ConfigError if the template cannot be compiled."""
        if self._ready is None or self._ready != self._process.pid:
            reply = self._process.ask([TEMPLATE, self._template], _COMPILE_SECONDS)
            if reply.outcome is not Outcome.DONE:
                return self._not_compiled(reply)
            self._ready = self._process.pid
        return self._process.ask([CHAT, body], seconds)

    def _not_compiled(self, reply: Reply) -> Reply:
        if reply.outcome not in (Outcome.FAILED, Outcome.SLOW, Outcome.MEMORY):
            return reply
        limits = f"it takes more than {_COMPILE_SECONDS:g} s or {MEMORY_MB} MiB to compile the chat template"
        raise ConfigError(decoded(reply.body) or limits)
