"""An output as a sequence of blocks, each a text or a tool call with a start and an end. Knows no JSON shape.

The Responses and the Messages API stream blocks; the chunks of a chat completion have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from saccade.processor.tools import CallStart, Content, ToolDelta
from saccade.server.api.tool_calls import CallFinder
from saccade.server.generation import Delta
from saccade.server.request.chat import ChatRequest


@dataclass(slots=True)
class Block:
    index: int
    call: CallStart | None  # None: a text
    text: str = ""  # so far; for a call its arguments as JSON
    has_filters: bool = False  # the output reached its maximum length in this block


class BlockEvent(NamedTuple):
    kind: Literal["open", "add", "close"]
    block: Block
    text: str = ""  # what was added


class BlockOutput:
    """Collects the deltas of one output. A complete output has at least one block: clients read the first."""

    def __init__(self, request: ChatRequest) -> None:
        self._calls = CallFinder(request)
        self._is_open = False
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def take(self, delta: Delta) -> Iterator[BlockEvent]:
        for part in self._calls.take(delta):
            yield from self._add(part)
        if delta.finish_reason:
            self.finish_reason = self._calls.finish_reason(delta.finish_reason)
            self.stop_reason = delta.stop_reason
            if not self.blocks:
                yield self._open(None)
            self.blocks[-1].has_filters = self.finish_reason == "length"
            yield from self._close()

    def _add(self, part: ToolDelta) -> Iterator[BlockEvent]:
        if isinstance(part, CallStart):
            yield from self._close()
            yield self._open(part)
            return
        if isinstance(part, Content) and not (self._is_open and self.blocks[-1].call is None):
            yield from self._close()
            yield self._open(None)
        text = part.text if isinstance(part, Content) else part.arguments
        self.blocks[-1].text += text
        yield BlockEvent("add", self.blocks[-1], text)

    def _open(self, call: CallStart | None) -> BlockEvent:
        self.blocks.append(Block(len(self.blocks), call))
        self._is_open = True
        return BlockEvent("open", self.blocks[-1])

    def _close(self) -> Iterator[BlockEvent]:
        if self._is_open:
            self._is_open = False
            yield BlockEvent("close", self.blocks[-1])
