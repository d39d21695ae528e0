"""Streams of a fake engine, and the wire that a response is written to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from saccade.engine.ipc.stream import News, RequestStream
from saccade.errors import RequestError
from saccade.server.generation import BilledPrompt, Generation
from saccade.server.http.request_context import Caller
from saccade.server.http.response import ResponseWriter
from saccade.server.metrics import Metrics
from saccade.server.request_record import RequestRecord
from saccade.types.bill import Bill
from saccade.types.events import TokenEvent


def new_stream() -> RequestStream:
    """Of no engine: a test pushes its events."""
    return RequestStream("r", lambda request_id: None, News())


class FakeEngine:
    def __init__(self, *streams: RequestStream) -> None:
        self.streams = streams

    async def submit(self, requests: Any) -> Any:
        return list(self.streams)


class FakeAnswer:
    """Stands for the text side: every token is its own number."""

    def __init__(self, index: int = 0) -> None:
        self.index, self.token_ids, self.finish_reason, self.stop_reason, self.usage = index, [], None, None, None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, event: TokenEvent) -> str:
        self.finish_reason = event.finish_reason
        self.token_ids.append(event.token_id)
        return str(event.token_id)


def token(number: int, finish: Any = None, error: RequestError | None = None) -> TokenEvent:
    return TokenEvent("r", number, None, finish, error=error)


async def started(*streams: RequestStream) -> Generation:
    prompt: Any = SimpleNamespace(token_ids=[1], where={}, items=())
    billed = BilledPrompt(prompt, Bill(1, 0, 0, 1, ()))
    answers: Any = [FakeAnswer(index) for index in range(len(streams))]
    generation = Generation([billed], answers, RequestRecord(), Metrics("m", dict))
    request: Any = SimpleNamespace(max_tokens=9)
    await generation.submit(FakeEngine(*streams), [request])
    return generation


def running(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(within())


class Wire:
    """Both ends of an ASGI exchange."""

    def __init__(self, path: str = "/v1/chat/completions") -> None:
        self.path = path
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def writer(self) -> ResponseWriter:
        scope = {"type": "http", "path": self.path, "caller": Caller("id-1", "", RequestRecord())}
        return ResponseWriter(scope, self.receive, self.send)

    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)
