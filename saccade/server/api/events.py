"""From running answers to the client as typed events, or whole: what the Responses and the Messages API share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from saccade.server.errors import ApiError
from saccade.server.generation import Generation, Piece
from saccade.server.http.response import Exchange

Event = Mapping[str, Any]
"""What a stream sends; its `type` is also the name of the event."""


class Script(Protocol):
    """How an API tells one answer. Every piece goes through `take`, also when nothing is streamed."""

    def begin(self) -> Iterable[Event]: ...

    def take(self, piece: Piece) -> Iterable[Event]: ...

    def end(self) -> Iterable[Event]: ...

    def ping(self) -> Event | None:
        """Sent while nothing comes; None: a comment line."""

    def failed(self, error: ApiError) -> Event:
        """The last event of a stream that went wrong."""

    def whole(self) -> Mapping[str, Any]:
        """The answer, once every piece has been taken."""


async def tell(exchange: Exchange, generation: Generation, script: Script, *, stream: bool) -> None:
    """Run the generation to its end. Errors before the first byte are the caller's to answer with a status."""
    if stream:
        exchange.fail_with(script.failed)
        await _stream(exchange, generation, script)
        return
    async for piece in generation.pieces():
        if piece is not None:
            list(script.take(piece))
    generation.finish()
    await exchange.json(script.whole())


async def _stream(exchange: Exchange, generation: Generation, script: Script) -> None:
    """As in a chat, the status goes out with the first token, or with the first sign of life."""
    async for piece in generation.pieces():
        if not exchange.is_streaming:
            await _send(exchange, script.begin())
        if piece is not None:
            await _send(exchange, script.take(piece))
        elif (ping := script.ping()) is not None:
            await exchange.typed(ping)
        else:
            await exchange.keep_alive()
    generation.finish()
    await _send(exchange, script.end())
    await exchange.close()


async def _send(exchange: Exchange, events: Iterable[Event]) -> None:
    for event in events:
        await exchange.typed(event)
