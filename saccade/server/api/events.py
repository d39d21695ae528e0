"""From running answers to the client as typed events, or whole: what the Responses and the Messages API share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from saccade.server.errors import ApiError
from saccade.server.generation import Delta, Generation
from saccade.server.http.response import ResponseWriter

Event = Mapping[str, Any]
"""What a stream sends; its `type` is also the name of the event."""


class EventShape(Protocol):
    """How an API tells one answer. Every piece goes through `take`, also when nothing is streamed."""

    def begin(self) -> Iterable[Event]: ...

    def take(self, piece: Delta) -> Iterable[Event]: ...

    def end(self) -> Iterable[Event]: ...

    def ping(self) -> Event | None:
        """Sent while nothing comes; None: a comment line."""

    def failed(self, error: ApiError) -> Event:
        """The last event of a stream that went wrong."""

    def whole(self) -> Mapping[str, Any]:
        """The answer, once every piece has been taken."""


async def send_events(writer: ResponseWriter, generation: Generation, script: EventShape, *, stream: bool) -> None:
    """Run the generation to its end. Errors before the first byte are the caller's to answer with a status."""
    if stream:
        writer.fail_with(script.failed)
        await _stream(writer, generation, script)
        return
    async for piece in generation.pieces():
        if piece is not None:
            list(script.take(piece))
    generation.finish()
    await writer.json(script.whole())


async def _stream(writer: ResponseWriter, generation: Generation, script: EventShape) -> None:
    """As in a chat, the status goes out with the first token, or with the first sign of life."""
    async for piece in generation.pieces():
        if not writer.is_streaming:
            await _send(writer, script.begin())
        if piece is not None:
            await _send(writer, script.take(piece))
        elif (ping := script.ping()) is not None:
            await writer.typed(ping)
        else:
            await writer.keep_alive()
    generation.finish()
    await _send(writer, script.end())
    await writer.close()


async def _send(writer: ResponseWriter, events: Iterable[Event]) -> None:
    for event in events:
        await writer.typed(event)
