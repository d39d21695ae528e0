"""Streams of requests' events to their readers. Knows neither sockets nor processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from saccade.errors import EngineUnavailable, RequestError
from saccade.types.events import TokenEvent
from saccade.types.request import Request


class News:
    """Wakes the task that reads the streams of a submission.

    A wait with a timeout needs no task, and the timer of one wait serves the next: both would be made for
    each token.
    """

    def __init__(self) -> None:
        self._is_there = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None  # of the latest wait; the timer may ring before it

    def tell(self) -> None:
        self._is_there = True
        self._wake()

    async def wait(self, seconds: float | None = None) -> bool:
        """Until `tell` was called since the last wait, or so long. Returns whether it was."""
        if not self._is_there:
            assert self._waiter is None, "the streams of a submission have one reader"
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            self._deadline = None if seconds is None else loop.time() + seconds
            self._set_timer()
            try:
                await self._waiter
            finally:
                self._waiter = None
        was_there = self._is_there
        self._is_there = False
        return was_there

    def _set_timer(self) -> None:
        if self._deadline is None:
            return
        if self._timer is not None and self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._waiter is None or self._deadline is None:
            return
        if asyncio.get_running_loop().time() < self._deadline:
            self._set_timer()
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestStream:
    """A request's events, in lists of all that are new; ends after the terminal one.

    A slow reader delays no other: its events wait here, at most one per generated token.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None], news: News) -> None:
        self.request_id = request_id
        self.num_tokens = 0  # generated so far, whether they were read or not
        self.news = news  # of all streams of the submission
        self._abort = abort
        self._events: list[TokenEvent] = []
        self._lost: EngineUnavailable | None = None
        self._is_over = False
        self.is_cancelled = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        while not (events := self.take()):
            if self.is_read:
                raise StopAsyncIteration
            await self.news.wait()
        return events

    def take(self) -> list[TokenEvent]:
        """All events since the last call. EngineUnavailable after those that came before the engine was lost.

        A RequestError of a running request is in its terminal event.
        """
        if self._lost is not None and not self._events:
            raise self._lost
        events = self._events
        self._events = []
        return events

    @property
    def is_read(self) -> bool:
        """Nothing follows what was taken."""
        return self._is_over and not self._events and self._lost is None

    def cancel(self) -> None:
        """Abort the request in the engine. The terminal event, with the usage, still follows."""
        if not self.is_cancelled and not self._is_over:
            self.is_cancelled = True
            self._abort(self.request_id)

    def push(self, event: TokenEvent) -> None:
        self._events.append(event)
        self.num_tokens += event.token_id is not None
        self._is_over = event.finish_reason is not None
        self.news.tell()

    def lose(self, error: EngineUnavailable) -> None:
        """The engine is gone, and the request with it."""
        self._is_over = True
        self._lost = error
        self.news.tell()


class Submission:
    """Requests sent to the engine in one message: all are admitted or none.

    Until its first event it can be sent again, to another engine: its readers do not notice.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        names = [request.request_id for request in requests]
        self.requests = tuple(requests)  # empty once they will not be sent again
        news = News()
        self.streams = {name: RequestStream(name, self._abort_stream, news) for name in names}
        self.num_open = 0
        self.num_deaths = 0  # of engines that had it before its first event
        self._num_bytes = 0
        self._abort: Callable[[str], None] | None = None
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def sent(self, num_bytes: int, abort: Callable[[str], None]) -> None:
        """`num_bytes` on the wire: the engine keeps the shared prompt until the last request ends."""
        self._num_bytes = num_bytes
        self._abort = abort
        self.num_open = len(self.streams)

    @property
    def num_bytes(self) -> int:
        """In the engine, and here as long as it may be sent again."""
        return self._num_bytes * (2 if self.requests else 1)

    @property
    def can_move(self) -> bool:
        return bool(self.requests) and not any(stream.is_cancelled for stream in self.streams.values())

    @property
    def is_admitted(self) -> bool:
        return self._admitted.done() and self._admitted.exception() is None

    def _abort_stream(self, request_id: str) -> None:
        if self._abort is not None:
            self._abort(request_id)

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
