"""A minimal HTTP/1.1 client: one GET over one connection, which is always closed. Deadlines are the caller's.

What an origin may send beside a body is bounded: interim responses, headers, chunk extensions, trailers.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httptools

from saccade.media.urls import Target

_READ_BYTES = 64 << 10
_MAX_EXTRA_BYTES = 64 << 10  # of overhead; beyond, at most one byte per byte of body
_MAX_INTERIM = 16  # responses such as 103 before the final one


class BrokenResponse(Exception):
    """The connection failed, or the response is invalid."""


class HttpResponse:
    """A response while it is received. The parser calls the `on_...` methods."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0  # 0 until the headers are complete
        self.headers: dict[str, str] = {}  # names in lower case; of a name sent twice the last value
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._is_complete = False
        self._num_interim = 0
        self._num_read = 0
        self._num_body = 0
        self._pieces: list[bytes] = []  # of the body, not yet yielded

    async def read_head(self) -> None:
        while not self.status:
            if not await self._read():
                raise BrokenResponse

    async def body(self) -> AsyncIterator[bytes]:
        """Ends with content-length, the last chunk, or the connection if there is neither."""
        while True:
            if self._pieces:
                piece = b"".join(self._pieces)
                self._pieces.clear()
                yield piece
            if self._is_complete:
                return
            if not await self._read():
                if self.headers.keys() & {"content-length", "transfer-encoding"}:
                    raise BrokenResponse
                return

    async def _read(self) -> bool:
        """False at the end of the connection."""
        data = await self._reader.read(_READ_BYTES)
        self._num_read += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise BrokenResponse from None
        if self._num_read - self._num_body > _MAX_EXTRA_BYTES + self._num_body:
            raise BrokenResponse
        return bool(data)

    def on_message_begin(self) -> None:
        if not self.status:
            self.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # later ones are trailers
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.status:
            return
        if status >= 200:
            self.status = status
            if self.headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
                raise BrokenResponse
            return
        self._num_interim += 1
        if self._num_interim > _MAX_INTERIM:
            raise BrokenResponse

    def on_body(self, body: bytes) -> None:
        if not self._is_complete:
            self._num_body += len(body)
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = bool(self.status)


@asynccontextmanager
async def open_response(
    target: Target,
    addresses: Sequence[str],
    headers: Iterable[tuple[str, str]],
    context: ssl.SSLContext,
    connect_timeout_s: float,
) -> AsyncIterator[HttpResponse]:
    """Connect to the first reachable address and send the request. TimeoutError if none connects in time."""
    async with asyncio.timeout(connect_timeout_s):
        reader, writer = await _connected(target, addresses, context)
    try:
        writer.write(_request(target, headers))
        response = HttpResponse(reader)
        await response.read_head()
        yield response
    except OSError:
        raise BrokenResponse from None
    finally:
        writer.transport.abort()  # without await, so that no cancellation can come between


async def _connected(
    target: Target, addresses: Sequence[str], context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """TLS checks the certificate against the host name, not the address."""
    tls: dict[str, Any] = {}
    if target.scheme == "https":
        tls = {"ssl": context, "server_hostname": target.host}
    for address in addresses:
        try:
            return await asyncio.open_connection(address, target.port, limit=_READ_BYTES, **tls)
        except OSError:
            continue  # for example no IPv6 route
    raise BrokenResponse


def _request(target: Target, headers: Iterable[tuple[str, str]]) -> bytes:
    lines = [f"GET {target.path} HTTP/1.1", f"Host: {target.authority}", "Connection: close"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers), "", ""]).encode("ascii")
