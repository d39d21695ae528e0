"""A client for streamed chat completions that costs little: HTTP/1.1 over asyncio, parsed in C."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import msgspec

from saccade.errors import ConfigError

CONNECT_SECONDS = 10.0
_PORTS = {"http": 80, "https": 443}
_ERROR_BYTES = 4096  # of an answer that is not a stream
_ERROR_CHARACTERS = 300  # of it that are shown


class RequestSample(NamedTuple):
    """What became of one request. Times are `time.perf_counter()`."""

    start: float
    token_times: list[float]  # when text came
    end: float
    prompt_tokens: int
    output_tokens: int
    error: str | None
    status: int = 0  # of the answer; 0 where none came


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _StreamChoice(msgspec.Struct):
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: _Usage | None = None
    error: Any = None


class _Message(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Message


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class ServerAddress:
    """Where requests go."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        try:
            url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
            port = url.port
        except ValueError as error:
            raise ConfigError(f"the address of the server is {base_url!r}: {error}") from None
        if url.scheme not in _PORTS or not url.hostname:
            raise ConfigError(
                f"the address of the server is {base_url!r}; give one such as http://localhost:8000"
            )
        self.host = url.hostname
        self.port = port or _PORTS[url.scheme]
        self.tls = ssl.create_default_context() if url.scheme == "https" else None
        self.path = url.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {url.netloc}\r\nContent-Type: application/json\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

        self._origin = f"{url.scheme}://{url.netloc}"

    def url(self, path: str) -> str:
        return f"{self._origin}{self.path}{path}"

    def post(self, path: str, body: bytes) -> bytes:
        head = f"POST {self.path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body


class StreamConnection(asyncio.Protocol):
    """One request at a time, kept open between them."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._error: str | None = None
        self._token_times: list[float] = []
        self._reset()

    async def request(self, data: bytes, timeout: float) -> RequestSample:
        assert self._transport is not None
        assert self._done is None
        self._reset()
        self._done = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        self._transport.write(data)
        try:
            await asyncio.wait_for(self._done, timeout)
        except (TimeoutError, OSError, httptools.HttpParserError) as error:
            self._error = self._error or str(error) or f"no answer within {timeout:g} s"
            self.close()
        self._done = None
        if self._error is None and not self._token_times:
            self._error = "the stream had no text"
        usage = self._usage
        counted = usage.completion_tokens or len(self._token_times)
        end = time.perf_counter()
        tokens = (usage.prompt_tokens, counted)
        return RequestSample(start, self._token_times, end, *tokens, self._error, self._status)

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._token_times = []
        self._usage = _Usage()
        self._error = None
        self._status = 0

    # --- asyncio --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end(exc or ConnectionError("the server closed the connection"))

    # --- httptools ------------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._rest = (self._rest + body)[:_ERROR_BYTES]
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        now = time.perf_counter()
        for line in lines:
            if line.startswith(b"data: {"):
                self._read_chunk(line[6:], now)

    def on_message_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status != 200:
            self._error = f"{self._status}: {_reason(self._rest)}"
        self.is_open = self._parser.should_keep_alive()
        self._end(None)

    def _read_chunk(self, line: bytes, now: float) -> None:
        try:
            chunk = _decode_chunk(line)
        except msgspec.DecodeError as error:
            self._error = f"a chunk could not be read: {error}"
            return
        if chunk.error is not None:
            self._error = str(chunk.error)[:_ERROR_CHARACTERS]
        self._usage = chunk.usage or self._usage
        deltas = [choice.delta for choice in chunk.choices if choice.delta is not None]
        if any(delta.content or delta.reasoning_content for delta in deltas):
            self._token_times.append(now)

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


def _reason(body: bytes) -> str:
    """The message of an error as OpenAI's API has it, else the body itself."""
    try:
        text = msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.DecodeError:
        text = body.decode(errors="replace")
    return text[:_ERROR_CHARACTERS]


class StreamConnections:
    """Idle ones are used again, as clients do."""

    def __init__(self, target: ServerAddress, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._idle: list[StreamConnection] = []

    async def send(self, path: str, body: bytes) -> RequestSample:
        start = time.perf_counter()
        try:
            connection = await self._connection()
        except (OSError, TimeoutError) as error:
            address = f"{self._target.host}:{self._target.port}"
            return RequestSample(start, [], time.perf_counter(), 0, 0, f"no connection to {address}: {error}")
        sample = await connection.request(self._target.post(path, body), self._timeout)
        if connection.is_open:
            self._idle.append(connection)
        return sample._replace(start=start)

    async def _connection(self) -> StreamConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        target = self._target
        opening = loop.create_connection(StreamConnection, target.host, target.port, ssl=target.tls)
        _, connection = await asyncio.wait_for(opening, CONNECT_SECONDS)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
