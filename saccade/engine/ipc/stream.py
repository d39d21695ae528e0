"""Streams of requests' events to their readers. Knows neither sockets nor processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from saccade.errors import EngineUnavailable, RequestError
from saccade.types import TokenEvent


class RequestStream:
    """Async iterator over a request's events, in lists of all that are new; ends after the terminal one.

    A slow reader delays no other: its events wait here, at most one per generated token.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.num_tokens = 0  # generated so far, whether they were read or not
        self._abort = abort
        self._news = asyncio.Event()
        self._events: list[TokenEvent] = []
        self._lost: EngineUnavailable | None = None
        self._is_over = False
        self._is_cancelled = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        """A RequestError of a running request is in its terminal event; EngineUnavailable is raised."""
        while not self._events:
            if self._lost is not None:
                raise self._lost
            if self._is_over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        events = self._events
        self._events = []
        return events

    def cancel(self) -> None:
        """Abort the request in the engine. The terminal event, with the usage, still follows."""
        if not self._is_cancelled and not self._is_over:
            self._is_cancelled = True
            self._abort(self.request_id)

    def push(self, event: TokenEvent) -> None:
        self._events.append(event)
        self.num_tokens += event.token_id is not None
        self._is_over = event.finish_reason is not None
        self._news.set()

    def lose(self, error: EngineUnavailable) -> None:
        """The engine is gone, and the request with it."""
        self._is_over = True
        self._lost = error
        self._news.set()


class Submission:
    """Requests sent to the engine in one message: all are admitted or none."""

    def __init__(self, request_ids: Iterable[str], num_bytes: int, abort: Callable[[str], None]) -> None:
        self.streams = {request_id: RequestStream(request_id, abort) for request_id in request_ids}
        self.num_open = len(self.streams)
        self.num_bytes = num_bytes  # on the wire; the shared prompt stays until the last request ends
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def admission(self) -> None:
        """Wait until admitted; RequestError if refused. Cancelling the wait cancels the requests."""
        try:
            await self._admitted
        except asyncio.CancelledError:
            for stream in self.streams.values():
                stream.cancel()
            raise

    def admit(self) -> None:
        if not self._admitted.done():
            self._admitted.set_result(None)

    def refuse(self, error: RequestError | EngineUnavailable) -> None:
        """Fail `admission`, if it still waits."""
        if not self._admitted.done():
            self._admitted.set_exception(error)
