"""The edge of HTTP: what a connection may send beside bodies, how long it may take, and how it ends.

    waiting ─► headers ─► body, answer ─► waiting ... ─► leaving: the answer goes out, what still comes is thrown away
       └ --header-timeout ┘    └ --write-timeout          └ closed for good after a moment

How fast a body must come is said where bodies are read (limits.py). Knows no routes but those that probes ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import httptools
import msgspec
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from saccade.options import ServerOptions
from saccade.server.errors import ApiError
from saccade.server.http.auth import peer_of
from saccade.server.http.connections import Connections, Place

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 256
"""Each costs far more memory than its bytes. Trailers count with the headers."""

_MAX_PIPELINED = 8  # requests that wait behind the one being answered
_PROBES = (b"/health", b"/ready")
_REQUEST_LINE = len(b"GET  HTTP/1.1\r\n\r\n")
_CHUNK_FRAME = 16  # a chunk's length and line ends; extensions are longer
_LINGER_SECONDS = 3.0
_FIRST_LOOK, _LAST_LOOK = 0.1, 5.0  # seconds between two looks whether a client that stopped sending is still there
_UPGRADE = (b"upgrade", b"http2-settings")


class _Refused(Exception):
    """Ends the parser's work on what came."""


class _Exit(NamedTuple):
    """A connection as an answer sees it: closing it is leaving in order."""

    write: Callable[[bytes], None]
    is_closing: Callable[[], bool]
    close: Callable[[], None]


class BoundedHttp(HttpToolsProtocol):
    """Uvicorn's protocol with limits and deadlines. Trailers and upgrades are ignored, half-closed clients answered."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        options: ServerOptions,
        connections: Connections,
        on_refusal: Callable[[str], None],
    ) -> None:
        super().__init__(config, state, {})
        self._options = options
        self._connections = connections
        self._on_refusal = on_refusal
        self._place = Place.NONE
        self._timer: asyncio.TimerHandle | None = None  # what happens unless the client does something before
        self._write_timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None  # `cycle` is the latest request, which may still wait
        self._keeps_alive = False  # what the latest request asked for
        self._is_in_headers = False
        self._is_leaving = False
        self._has_ended = False  # the client sends no more
        self._num_headers = 0  # of the latest request, with trailers
        self._header_bytes = 0
        self._unreported = 0  # bytes that came and the parser has not named yet: a line without an end, extensions

    # --- the connection -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._exit = _Exit(transport.write, transport.is_closing, self._leave)
        self._place = self._connections.enter(self, peer_of(self.client))
        if self._place is Place.NONE:
            self._refuse_place()
            transport.close()  # nothing is read: there may be very many of these
        else:
            self._arm(self._options.header_timeout, self._on_silence)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        self._disarm()
        self._stop_write_timer()
        self._abandon()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the connection: the client has said all it had to say and waits for the answer."""
        if self._is_leaving or not self._is_busy or self.cycle.more_body:
            return False
        self._has_ended = True
        self.cycle.keep_alive = False
        self._look(_FIRST_LOOK)
        return True

    def _look(self, pause: float) -> None:
        """Whether the client is still there shows only when something is written: an interim answer, which it skips."""
        cycle = self._answering
        if cycle is None or cycle.response_started or self.scope["http_version"] != "1.1":
            return  # what is written of the answer shows it
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._arm(pause, self._look, min(2 * pause, _LAST_LOOK))

    @property
    def _is_busy(self) -> bool:
        """Whether a request waits for its answer or for the rest of it."""
        return self.cycle is not None and not self.cycle.response_complete

    def _abandon(self) -> None:
        """Nobody reads the answers to what was asked; those that wait their turn are never begun."""
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    # --- what comes -----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_leaving:
            return
        self._unreported += len(data)
        self._feed(data)
        is_between = not self._is_in_headers and not (self._is_busy and self.cycle.more_body)
        self._unreported = 0 if is_between else max(0, self._unreported)
        if self._header_bytes + self._unreported > MAX_HEADER_BYTES:
            self._refuse_headers(f"longer than {MAX_HEADER_BYTES} bytes")

    def _feed(self, data: bytes) -> None:
        while data and not self._is_leaving:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self._refuse(ApiError(400, "this is not an HTTP/1.1 request", code="invalid_http"))
                return

    def _without_upgrade(self) -> bytes:
        """The request's head without its wish for another protocol, for a new parser: the old one reads no body."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(ApiError(405, "this server is no proxy", code="method_not_allowed"))
            return b""
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(token for token in value.split(b",") if token.strip().lower() not in _UPGRADE)
            if name not in _UPGRADE and value:
                lines.append(name + b": " + value)
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._unreported += len(head)
        return head

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            message = f"more than {_MAX_PIPELINED} requests wait on this connection; read their answers first"
            self._refuse(ApiError(400, message, code="invalid_http"))
            raise _Refused
        self._unset_keepalive_if_required()
        self._is_in_headers = True
        self._num_headers = 0
        self._header_bytes = 0
        if not self._is_busy:
            self._arm(self._options.header_timeout, self._on_silence)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value) + 4)
        if self._num_headers > MAX_HEADERS:
            self._refuse_headers(f"more than {MAX_HEADERS}")
            raise _Refused
        if self._is_in_headers:  # what comes after the body is none: it was not there when the request was let in
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unreported -= _REQUEST_LINE
        self._is_in_headers = False
        if self.parser.should_upgrade():
            return  # it begins again
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers(f"longer than {MAX_HEADER_BYTES} bytes")
            raise _Refused
        if self._place is Place.PROBES and self.url.partition(b"?")[0] not in _PROBES:
            self._refuse_place()
            raise _Refused
        super().on_headers_complete()
        self._disarm()
        self._connections.busy(self)
        cycle = self.cycle
        cycle.transport = self._exit  # type: ignore[assignment]
        self._keeps_alive = cycle.keep_alive and self._place is Place.OPEN
        cycle.keep_alive = False  # until all of the request is here: what nobody reads must not go on coming
        if not self.pipeline:
            self._answering = cycle

    def on_body(self, body: bytes) -> None:
        self._unreported -= len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._unreported -= _CHUNK_FRAME

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        self._unreported -= num_bytes

    # --- what is answered -----------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self._is_leaving:
            return
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if following is not None:
            self._answering = following
            return
        self._connections.idle(self)
        if self._is_in_headers:
            self._arm(self._options.header_timeout, self._on_silence)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._options.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # --- the end --------------------------------------------------------------------------------------------------

    def timeout_keep_alive_handler(self) -> None:
        self._leave()

    def _on_silence(self) -> None:
        seconds = self._options.header_timeout
        if self._is_in_headers:
            message = f"the request's headers did not come within {seconds:g} s (--header-timeout)"
            self._refuse(ApiError(408, message, code="request_timeout", retry_after=1))
        else:
            self._leave()  # nothing was asked, so there is nothing to answer

    def _refuse_headers(self, what: str) -> None:
        message = f"the request's headers and trailers are {what}"
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def _refuse_place(self) -> None:
        self._connections.refused()
        message = (
            "there are too many connections: in all (--max-connections) or from your address (--max-client-share); "
            "try again soon"
        )
        self._write_error(ApiError(503, message, code="overloaded", retry_after=1))
        self._leave()

    def _refuse(self, error: ApiError) -> None:
        if not self._is_leaving:
            self._on_refusal(error.code or "")
            self._write_error(error)
            self._leave()

    def _write_error(self, error: ApiError) -> None:
        """Unless an answer is under way: it is cut off, and these words would be taken for a part of it."""
        answer = self._answering
        is_cut_off = answer is not None and answer.response_started and not answer.response_complete
        self._abandon()
        if not is_cut_off and not self.transport.is_closing():
            self.transport.write(_raw(error))

    def _leave(self) -> None:
        """Close, but only after a moment of listening: a reset would take the answer out of the client's hands."""
        if self._is_leaving or self.transport.is_closing():
            return
        self._is_leaving = True
        self._connections.idle(self)
        self.flow.resume_reading()
        if self._has_ended:
            self.transport.close()
        else:
            self.transport.write_eof()
        unsent = self.transport.get_write_buffer_size()
        self._arm(self._options.write_timeout if unsent else _LINGER_SECONDS, self._end, unsent)

    def _end(self, unsent: int) -> None:
        """For good, unless the client is reading on."""
        left = self.transport.get_write_buffer_size()
        if 0 < left < unsent:
            self._arm(self._options.write_timeout, self._end, left)
        else:
            self.transport.abort()

    def drop(self) -> None:
        self._is_leaving = True
        self.transport.abort()

    def _arm(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, action, *args)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _raw(error: ApiError) -> bytes:
    body = msgspec.json.encode(error.body())
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in {**headers, **error.headers()}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
