"""The HTTP protocol of one connection: Uvicorn's, with limits on headers, deadlines and a graceful close.

    idle ─► headers ─► body, response ─► idle ... ─► closing: the response is flushed, input is discarded
      └ --header-timeout ┘   └ --write-timeout          └ aborted after a few seconds

The minimum rate of a body is enforced in limits.py. Knows no routes but the probes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from ipaddress import IPv4Address
from typing import Any, NamedTuple, TypeGuard

import httptools
import msgspec
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from saccade.options.server import ServerOptions
from saccade.server.errors import ApiError, overloaded
from saccade.server.http.auth import address_of, peer_of
from saccade.server.http.connections import Access, HttpConnection, OpenConnections

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 256
"""With trailers. Each costs far more memory than its bytes."""

PEER = "peer"
"""In a request's `state`: the address of the connection, whatever its headers say."""

_MAX_PIPELINED = 8  # requests after the one that runs
_PROBES = (b"/live", b"/health", b"/ready")
_REQUEST_LINE = len(b"GET  HTTP/1.1\r\n\r\n")
_SMALL_CHUNKS = 16_384  # of a body; each costs as much of the loop as many bytes
_BYTES_PER_CHUNK = 64  # of a body with more
_CHUNK_FRAME = 16  # bytes of a chunk's length and line ends, without extensions
_LINGER_SECONDS = 3.0
_MIN_PROBE_SECONDS = 0.1  # between two checks whether a half-closed client is still there
_MAX_PROBE_SECONDS = 5.0
_UPGRADE = (b"upgrade", b"http2-settings")


class _RequestRefused(Exception):
    """Stops the parser."""


class _ResponseTransport(NamedTuple):
    """The transport that a response gets. Its close is graceful."""

    write: Callable[[bytes], None]
    is_closing: Callable[[], bool]
    close: Callable[[], None]


class BoundedHttp(HttpToolsProtocol):
    """Ignores trailers and upgrades. The wish for a WebSocket is the last request of its connection.

    A client that half-closes its connection still gets its response.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        options: ServerOptions,
        connections: OpenConnections,
        handshake: HttpConnection | None = None,
    ) -> None:
        """`handshake` has counted as a connection until now."""
        super().__init__(config, state, {})
        self._handshake = handshake
        self._options = options
        self._connections = connections
        self._admission = Access.REFUSED
        self._timer: asyncio.TimerHandle | None = None  # the current deadline of the client
        self._write_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # `cycle` is the latest, which may be pipelined
        self._keeps_alive = False  # asked for by the latest request
        self._is_in_headers = False
        self._is_closing = False
        self._is_half_closed = False  # by the client
        self._num_headers = 0  # of the latest request, with its trailers
        self._header_bytes = 0
        self._num_chunks = 0  # of the latest body
        self._body_bytes = 0
        self._unreported = 0  # received but not reported by the parser: an unfinished line, chunk extensions

    # --- the connection -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None and isinstance(address := address_of(self.client[0]), IPv4Address):
            self.client = (str(address), self.client[1])  # not as IPv6: proxies are compared with it
        self._response_transport = _ResponseTransport(transport.write, self._ends, self._close)
        if self._handshake is not None:
            self._connections.remove(self._handshake)
        self._admission = self._connections.admit(self, peer_of(self.client))
        if self._admission is Access.REFUSED:
            self._refuse_connection()
            transport.close()  # without reading: there may be very many of these
        else:
            self._set_timer(self._options.header_timeout, self._on_header_timeout)

    def _ends(self) -> bool:
        """Whether no `100 Continue` may be written any more."""
        return self._is_closing or self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._cancel_timer()
        self._stop_write_timer()
        self._cancel_requests()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the connection open: the request is complete and waits for its response."""
        if self._is_closing or not _is_open(self.cycle) or self.cycle.more_body or self.scheme == "https":
            return False  # TLS cannot be half-closed
        self._is_half_closed = True
        self.cycle.keep_alive = False
        self._probe(_MIN_PROBE_SECONDS)
        return True

    def _probe(self, pause: float) -> None:
        """Writes an interim response, which clients skip: only a write shows that a client has gone."""
        cycle = self._running
        if cycle is None or cycle.response_started:
            return  # the response itself shows it
        if self.scope["http_version"] != "1.1":
            return
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._set_timer(pause, self._probe, min(2 * pause, _MAX_PROBE_SECONDS))

    def _cancel_requests(self) -> None:
        """Cancels the running request and the pipelined ones: their responses cannot be delivered."""
        self.pipeline.clear()
        if _is_open(self._running):
            self._running.disconnected = True
            self._running.message_event.set()

    # --- input ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._unreported += len(data)
        self._feed(data)
        is_in_body = _is_open(self.cycle) and self.cycle.more_body
        if not self._is_in_headers and not is_in_body:
            self._unreported = 0
        self._unreported = max(0, self._unreported)
        if self._header_bytes + self._unreported > MAX_HEADER_BYTES:
            self._refuse_headers(f"longer than {MAX_HEADER_BYTES} bytes")

    def _feed(self, data: bytes) -> None:
        while data and not self._is_closing:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self._refuse(ApiError(400, "this is not an HTTP/1.1 request", code="invalid_http"))
                return

    def _without_upgrade(self) -> bytes:
        """The request head for a new parser: the old one reads no body after an upgrade."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(ApiError(405, "this server is no proxy", code="method_not_allowed"))
            return b""
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        ends = any(name == b"upgrade" and b"websocket" in value.lower() for name, value in self.headers)
        if ends:  # a proxy may take what follows for frames, which could hide requests from it
            lines.append(b"connection: close")
        for name, value in self.headers:
            if name in _UPGRADE:
                continue
            if name == b"connection":
                tokens = [token for token in value.split(b",") if token.strip().lower() not in _UPGRADE]
                value = b",".join(tokens)
                if not value:
                    continue
            lines.append(name + b": " + value)  # the others stay as they came
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._unreported += len(head)
        return head

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            message = f"more than {_MAX_PIPELINED} requests wait on this connection; read their answers first"
            self._refuse(ApiError(400, message, code="invalid_http"))
            raise _RequestRefused
        self._unset_keepalive_if_required()
        self._is_in_headers = True
        self._num_headers = 0
        self._header_bytes = 0
        self._num_chunks = 0
        self._body_bytes = 0
        if not _is_open(self.cycle):
            self._set_timer(self._options.header_timeout, self._on_header_timeout)
        super().on_message_begin()
        self.scope["state"][PEER] = self.client

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value) + 4)
        if self._num_headers > MAX_HEADERS:
            self._refuse_headers(f"more than {MAX_HEADERS}")
            raise _RequestRefused
        if self._is_in_headers:  # trailers are ignored: they arrive after admission
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unreported -= _REQUEST_LINE
        self._is_in_headers = False
        if self.parser.should_upgrade():
            return  # a new parser reads it again
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers(f"longer than {MAX_HEADER_BYTES} bytes")
            raise _RequestRefused
        if self._admission is Access.PROBES_ONLY and not self._is_probe():
            self._refuse_connection()
            raise _RequestRefused
        super().on_headers_complete()
        self._cancel_timer()
        self._connections.mark_busy(self)
        cycle = self.cycle
        cycle.transport = self._response_transport  # type: ignore[assignment]
        cycle.waiting_for_100_continue &= self.scope["http_version"] == "1.1"
        self._keeps_alive = cycle.keep_alive and self._admission is Access.OPEN
        cycle.keep_alive = False  # until the body is complete: an unread body must not go on arriving
        if not self.pipeline:
            self._running = cycle

    def _is_probe(self) -> bool:
        return self.url.partition(b"?")[0].removeprefix(self._options.root_path.encode()) in _PROBES

    def on_body(self, body: bytes) -> None:
        self._unreported -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._unreported -= _CHUNK_FRAME
        self._num_chunks += 1
        if self._num_chunks > _SMALL_CHUNKS + self._body_bytes // _BYTES_PER_CHUNK:
            sizes = f"{self._num_chunks} chunks with {self._body_bytes} bytes"
            message = f"the body came in {sizes}; send chunks of {_BYTES_PER_CHUNK} bytes or more"
            self._refuse(ApiError(400, message, code="invalid_http"))
            raise _RequestRefused

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        self._unreported -= num_bytes

    # --- output ---------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self._is_closing:
            return
        next_cycle = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if next_cycle is not None:
            self._running = next_cycle
            return
        self._connections.mark_idle(self)
        if self._is_in_headers:
            self._set_timer(self._options.header_timeout, self._on_header_timeout)

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

    # --- the end --------------------------------------------------------------------------------------------

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _on_header_timeout(self) -> None:
        seconds = self._options.header_timeout
        if self._is_in_headers:
            message = f"the request's headers did not come within {seconds:g} s (--header-timeout)"
            self._refuse(ApiError(408, message, code="request_timeout", retry_after=1))
        else:
            self._close()  # there is no request to answer

    def _refuse_headers(self, what: str) -> None:
        message = f"the request's headers and trailers are {what}"
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def _refuse_connection(self) -> None:
        self._connections.refused()
        limits = "in all (--max-connections) or from your address (--max-client-share)"
        self._write_error(overloaded(503, f"there are too many connections: {limits}; try again soon"))
        self._close()

    def _refuse(self, error: ApiError) -> None:
        if not self._is_closing:
            self._connections.on_refusal(str(error.code))
            self._write_error(error)
            self._close()

    def _write_error(self, error: ApiError) -> None:
        """Unless a response has started: it is cut off, and the error would be taken for a part of it."""
        cycle = self._running
        is_cut_off = _is_open(cycle) and cycle.response_started
        self._cancel_requests()
        if not is_cut_off and not self.transport.is_closing():
            self.transport.write(_raw(error))

    def _close(self) -> None:
        """Half-closes and lingers: closing with unread input resets the connection and loses the response."""
        if self._ends():
            return
        self._is_closing = True
        self._connections.mark_idle(self)
        self.flow.resume_reading()
        if self._is_half_closed or not self.transport.can_write_eof():  # TLS: both ends say goodbye
            self.transport.close()
        else:
            self.transport.write_eof()
        unsent = self.transport.get_write_buffer_size()
        seconds = self._options.write_timeout if unsent else _LINGER_SECONDS
        self._set_timer(seconds, self._abort_unless_read, unsent)

    def _abort_unless_read(self, before: int) -> None:
        """Aborts, unless the client is still reading."""
        unsent = self.transport.get_write_buffer_size()
        if 0 < unsent < before:
            self._set_timer(self._options.write_timeout, self._abort_unless_read, unsent)
        else:
            self.transport.abort()

    def drop(self) -> None:
        self._is_closing = True
        self.transport.abort()

    def _set_timer(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, action, *args)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _is_open(cycle: RequestResponseCycle | None) -> TypeGuard[RequestResponseCycle]:
    """Whether its response is not complete."""
    return cycle is not None and not cycle.response_complete


def _raw(error: ApiError) -> bytes:
    body = msgspec.json.encode(error.body())
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in {**headers, **error.headers()}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
