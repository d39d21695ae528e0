"""One GET over one connection, which nobody shares and which is closed whatever happens. Knows no rules about URLs.

What an origin may send beside a body is bounded: interim answers, headers, chunk sizes and their extensions, trailers.
Deadlines are the caller's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import httptools

from saccade.media.urls import Target

_READ_BYTES = 64 << 10
_MAX_EXTRA_BYTES = 64 << 10  # that are no body; beyond them every byte needs one of a body
_MAX_INTERIM = 16  # answers such as 103 before the real one


class BrokenAnswer(Exception):
    """The connection failed, or what came over it is no answer that may be read on."""


class RequestOutputBuilder:
    """What came so far. The parser calls `on_...` for each piece of it."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0  # 0 until the headers are complete
        self.headers: dict[str, str] = {}  # names in lower case; of a name sent twice the last value
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._is_complete = False
        self._num_interim = 0
        self._num_read = 0
        self._num_body = 0
        self._pieces: list[bytes] = []  # of the body, not taken yet

    async def read_head(self) -> None:
        while not self.status:
            if not await self._read():
                raise BrokenAnswer

    async def body(self) -> AsyncIterator[bytes]:
        """Ends with the length, the last chunk, or the connection where neither was announced."""
        while True:
            pieces, self._pieces = self._pieces, []
            if pieces:
                yield b"".join(pieces)
            if self._is_complete:
                return
            if not await self._read():
                if self.headers.keys() & {"content-length", "transfer-encoding"}:
                    raise BrokenAnswer
                return

    async def _read(self) -> bool:
        """False at the end of the connection."""
        data = await self._reader.read(_READ_BYTES)
        self._num_read += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise BrokenAnswer from None
        if self._num_read - self._num_body > _MAX_EXTRA_BYTES + self._num_body:
            raise BrokenAnswer
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
                raise BrokenAnswer
            return
        self._num_interim += 1
        if self._num_interim > _MAX_INTERIM:
            raise BrokenAnswer

    def on_body(self, body: bytes) -> None:
        if not self._is_complete:
            self._num_body += len(body)
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = bool(self.status)


@asynccontextmanager
async def answer_of(
    target: Target,
    addresses: Sequence[str],
    headers: Iterable[tuple[str, str]],
    context: ssl.SSLContext,
    connect_timeout_s: float,
) -> AsyncIterator[RequestOutputBuilder]:
    """Connects to the first of the addresses that can be reached. TimeoutError where none can in time."""
    async with asyncio.timeout(connect_timeout_s):
        reader, writer = await _connected(target, addresses, context)
    try:
        writer.write(_request(target, headers))
        answer = RequestOutputBuilder(reader)
        await answer.read_head()
        yield answer
    except OSError:
        raise BrokenAnswer from None
    finally:
        writer.transport.abort()  # at once and without waiting: nothing can come between, not even a cancellation


async def _connected(
    target: Target, addresses: Sequence[str], context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """TLS is started with the name, so the certificate is checked against the name and not the address."""
    tls: Mapping[str, ssl.SSLContext | str] = {}
    if target.scheme == "https":
        tls = {"ssl": context, "server_hostname": target.host}
    for address in addresses:
        try:
            return await asyncio.open_connection(address, target.port, limit=_READ_BYTES, **tls)  # type: ignore[arg-type]
        except OSError:
            continue  # the next may be reachable: many hosts have an IPv6 address, and many networks no way to it
    raise BrokenAnswer


def _request(target: Target, headers: Iterable[tuple[str, str]]) -> bytes:
    lines = [f"GET {target.path} HTTP/1.1", f"Host: {target.authority}", "Connection: close"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers), "", ""]).encode("ascii")
