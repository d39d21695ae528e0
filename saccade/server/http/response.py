"""Writes one HTTP response: JSON, server-sent events or an error. Cancels the work when the client leaves."""

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
    (b"x-accel-buffering", b"no"),  # nginx would buffer events otherwise
]

SEND_BODY = "saccade.send_body"
"""In a request's scope: sends what follows the headers, past the layers that only look at those."""


class ResponseWriter:
    """A write waits while the connection's buffer is full, so a slow reader delays only its own response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._send_body = scope.get(SEND_BODY, send)
        self.is_streaming = False
        self._failure_event: Callable[[ApiError], Mapping[str, Any]] = ApiError.body

    async def json(self, content: Any) -> None:
        await json_response(content)(self._scope, self._receive, self._send)

    async def event(self, event: Mapping[str, Any] | bytes) -> None:
        """Data of a server-sent event, or the event as its bytes."""
        await self._write(event if isinstance(event, bytes) else event_bytes(event))

    async def keep_alive(self) -> None:
        await self._write(b": keep-alive\n\n")

    async def close(self, end_marker: bytes = b"") -> None:
        await self._write(end_marker, more=False)

    def fail_with(self, failure_event: Callable[[ApiError], Mapping[str, Any]]) -> None:
        """Sets the last event of a stream that fails."""
        self._failure_event = failure_event

    async def error(self, error: ApiError) -> None:
        """An HTTP error if nothing was sent yet; otherwise the last event of the stream, without [DONE]."""
        if self.is_streaming:
            await self._write(event_bytes(self._failure_event(error)), more=False)
        else:
            scope = self._scope
            await error.response(scope["path"], scope["caller"].request_id)(scope, self._receive, self._send)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        if not self.is_streaming:
            self.is_streaming = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await self._send_body({"type": "http.response.body", "body": body, "more_body": more})


def event_bytes(data: Mapping[str, Any]) -> bytes:
    """A server-sent event, named after the `type` in its data if there is one."""
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancels the body of the context when the client disconnects; ClientGone is raised then."""
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
        if not is_gone or task.uncancel():  # cancelled for another reason too
            raise
        raise ClientGone from None
    finally:
        watcher.cancel()
