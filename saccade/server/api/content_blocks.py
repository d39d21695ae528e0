"""An answer as a row of blocks, each a text or a call with a beginning and an end. Knows no JSON shape.

This is how the Responses and the Messages API tell an answer; a chat's chunks have no such order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from saccade.processor.tools import CallStart, Content, ToolDelta
from saccade.server.api.tool_calls import CallFinder
from saccade.server.generation import Delta
from saccade.server.request.chat import ChatRequest


@dataclass(slots=True)
class Block:
    index: int
    call: CallStart | None  # None: a text
    text: str = ""  # so far; of a call its arguments, which are JSON
    is_cut: bool = False  # the answer ended in it because it had its length


class Opened(NamedTuple):
    block: Block


class Added(NamedTuple):
    block: Block
    text: str


class Closed(NamedTuple):
    block: Block


BlockEvent = Opened | Added | Closed


class BlockAnswer:
    """Takes the pieces of one answer. When it is complete it has at least one block: clients look for the first."""

    def __init__(self, request: ChatRequest) -> None:
        self._calls = CallFinder(request)
        self._is_open = False
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def take(self, piece: Delta) -> Iterator[BlockEvent]:
        for delta in self._calls.take(piece):
            yield from self._add(delta)
        if piece.finish_reason:
            self.finish_reason = self._calls.finish_reason(piece.finish_reason)
            self.stop_reason = piece.stop_reason
            if not self.blocks:
                yield self._open(None)
            self.blocks[-1].is_cut = self.finish_reason == "length"
            yield from self._close()

    def _add(self, delta: ToolDelta) -> Iterator[BlockEvent]:
        if isinstance(delta, CallStart):
            yield from self._close()
            yield self._open(delta)
            return
        if isinstance(delta, Content) and not (self._is_open and self.blocks[-1].call is None):
            yield from self._close()
            yield self._open(None)
        text = delta.text if isinstance(delta, Content) else delta.arguments
        self.blocks[-1].text += text
        yield Added(self.blocks[-1], text)

    def _open(self, call: CallStart | None) -> Opened:
        self.blocks.append(Block(len(self.blocks), call))
        self._is_open = True
        return Opened(self.blocks[-1])

    def _close(self) -> Iterator[Closed]:
        if self._is_open:
            self._is_open = False
            yield Closed(self.blocks[-1])
