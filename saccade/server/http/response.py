"""One HTTP exchange: a JSON answer or a stream of events, an error at any moment, the end when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from saccade.server.errors import ApiError, ClientGone, json_response

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of the nginx family would collect events otherwise
]


class ResponseWriter:
    """Writing waits while the client's connection is full: a slow reader slows its own answer and nobody else's."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.is_streaming = False
        self._last_event: Callable[[ApiError], bytes] = lambda error: _data(error.body())

    async def json(self, content: Any) -> None:
        await json_response(content)(self._scope, self._receive, self._send)

    async def event(self, data: Mapping[str, Any]) -> None:
        await self._write(_data(data))

    async def typed(self, data: Mapping[str, Any]) -> None:
        """An event that is named after the `type` in its data."""
        await self._write(_typed(data))

    async def keep_alive(self) -> None:
        await self._write(b": keep-alive\n\n")

    async def done(self) -> None:
        await self._write(b"data: [DONE]\n\n", more=False)

    async def close(self) -> None:
        await self._write(b"", more=False)

    def fail_with(self, last_event: Callable[[ApiError], Mapping[str, Any]]) -> None:
        """How a stream of typed events ends when something goes wrong in it."""
        self._last_event = lambda error: _typed(last_event(error))

    async def error(self, error: ApiError) -> None:
        """With its status while nothing has been sent; as the last event of a stream, without [DONE], afterwards."""
        if self.is_streaming:
            await self._write(self._last_event(error), more=False)
        else:
            scope = self._scope
            await error.response(scope["path"], scope["caller"].request_id)(scope, self._receive, self._send)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        if not self.is_streaming:
            self.is_streaming = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _data(data: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _typed(data: Mapping[str, Any]) -> bytes:
    return b"event: " + str(data["type"]).encode() + b"\n" + _data(data)


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs inside when the client goes away, and raises ClientGone then."""
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone or task.uncancel():  # somebody else wants us to stop
            raise
        raise ClientGone from None
    finally:
        watcher.cancel()
