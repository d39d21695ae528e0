"""An output as a sequence of blocks with a start and an end: thinking, texts and tool calls.

The Responses and the Messages API stream blocks; chunks of a chat completion have none. Knows no JSON shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from saccade.processor.dialects.events import CallArguments, CallStart, Reasoning
from saccade.server.api.parsed_output import OutputPart, ParsedOutput
from saccade.server.generation import Delta, Generation
from saccade.server.request.chat import ChatRequest


@dataclass(slots=True)
class Block:
    index: int
    call: CallStart | None  # None: a text or thinking
    is_reasoning: bool = False
    text: str = ""  # so far; for a call its arguments as JSON
    is_cut: bool = False  # the output reached its maximum length in this block


class BlockEvent(NamedTuple):
    kind: Literal["open", "add", "close"]
    block: Block
    text: str = ""  # what was added


class BlockOutput:
    """Collects the deltas of one output. A complete output has at least one block: clients read the first."""

    def __init__(self, request: ChatRequest, generation: Generation) -> None:
        self._parsed = ParsedOutput(request, generation)
        self._is_open = False
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def take(self, delta: Delta) -> Iterator[BlockEvent]:
        for part in self._parsed.take(delta):
            yield from self._add(part)
        if delta.finish_reason:
            self.finish_reason = self._parsed.finish_reason(delta.finish_reason)
            self.stop_reason = delta.stop_reason
            if not self.blocks:
                yield self._open(None)
            self.blocks[-1].is_cut = self.finish_reason == "length"
            yield from self._close()

    def _add(self, part: OutputPart) -> Iterator[BlockEvent]:
        if isinstance(part, CallStart):
            yield from self._close()
            yield self._open(part)
            return
        if not isinstance(part, CallArguments):
            yield from self._go_on(is_reasoning=isinstance(part, Reasoning))
        self.blocks[-1].text += part.text
        yield BlockEvent("add", self.blocks[-1], part.text)

    def _go_on(self, *, is_reasoning: bool) -> Iterator[BlockEvent]:
        """A new block, unless the last one is open and of this kind."""
        if self._is_open:
            block = self.blocks[-1]
            if (block.call, block.is_reasoning) == (None, is_reasoning):
                return
        yield from self._close()
        yield self._open(None, is_reasoning=is_reasoning)

    def _open(self, call: CallStart | None, *, is_reasoning: bool = False) -> BlockEvent:
        self.blocks.append(Block(len(self.blocks), call, is_reasoning))
        self._is_open = True
        return BlockEvent("open", self.blocks[-1])

    def _close(self) -> Iterator[BlockEvent]:
        if self._is_open:
            self._is_open = False
            yield BlockEvent("close", self.blocks[-1])
