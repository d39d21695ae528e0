"""Sends a generation to the client as JSON or as server-sent events. Each API has its own `EventShape`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from saccade.server.errors import ApiError
from saccade.server.generation import Delta, Generation
from saccade.server.http.response import ResponseWriter

InThread = Callable[..., Awaitable[Any]]
"""Runs a function with arguments in a thread, when it is the caller's turn."""

Event = Mapping[str, Any] | bytes
"""The data of one server-sent event, named after its `type` if it has one; or the event as its bytes."""


class EventShape(Protocol):
    """How one API writes the outputs of a generation. Every delta goes through `take`, streamed or not."""

    end_marker: bytes = b""  # sent after the last event of a stream
    is_large: bool = False  # what it writes takes so long to make that a thread makes it

    def begin(self) -> Iterable[Event]:
        return ()

    def take(self, delta: Delta) -> Iterable[Event]: ...

    def end(self) -> Iterable[Event]: ...

    def ping(self) -> Event | None:
        """Sent while no token arrives. None sends a comment line instead."""
        return None

    def failed(self, error: ApiError) -> Mapping[str, Any]:
        """The last event of a stream that fails."""
        return error.body()

    def whole(self) -> Mapping[str, Any]:
        """The complete body, after every delta was taken."""


async def send_events(
    writer: ResponseWriter,
    generation: Generation,
    shape: EventShape,
    in_thread: InThread,
    *,
    stream: bool,
) -> None:
    """Run the generation to its end. An error before the first byte still gets its HTTP status."""
    if stream:
        await _stream(writer, generation, shape, in_thread)
        return
    async for delta in generation.deltas():
        if delta is not None:
            list(shape.take(delta))
    generation.finish()
    await writer.json(await in_thread(_encoded, shape) if shape.is_large else shape.whole())


def _encoded(shape: EventShape) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(shape.whole()))


async def _stream(
    writer: ResponseWriter, generation: Generation, shape: EventShape, in_thread: InThread
) -> None:
    """The status 200 goes out with the first token. An image that fails to decode before that is a 400."""
    writer.fail_with(shape.failed)
    async for delta in generation.deltas():
        if not writer.is_streaming:
            await _send(writer, shape.begin())
        if delta is not None:
            if shape.is_large:
                await _send(writer, await in_thread(list, shape.take(delta)))
            else:
                await _send(writer, shape.take(delta))
        elif (ping := shape.ping()) is not None:
            await writer.event(ping)
        else:
            await writer.keep_alive()
    generation.finish()
    await _send(writer, shape.end())
    await writer.close(shape.end_marker)


async def _send(writer: ResponseWriter, events: Iterable[Event]) -> None:
    for event in events:
        await writer.event(event)
