"""One output while it streams: its thinking, text and tool calls. Knows no JSON shape of any API."""

from __future__ import annotations

from saccade.processor.dialects.events import (
    CallArguments,
    CallProblem,
    CallStart,
    Content,
    OutputEvent,
    Reasoning,
)
from saccade.processor.tools import MAX_TOOLS
from saccade.server.generation import Delta, Generation
from saccade.server.request.chat import ChatRequest

OutputPart = Reasoning | Content | CallStart | CallArguments


class ParsedOutput:
    def __init__(self, request: ChatRequest, generation: Generation, index: int = 0) -> None:
        tools = request.tools
        self._parser = generation.output_format.parser(
            tools.for_template, finds_calls=tools.calls, is_bare=tools.is_bare
        )
        self._generation = generation
        self._index = index
        self._max_calls = MAX_TOOLS if request.parallel_tool_calls else 1
        self._has_calls = False

    @property
    def is_passive(self) -> bool:
        """All further text is content, just as it comes."""
        return self._parser.is_passive

    def take(self, delta: Delta) -> list[OutputPart]:
        """What a delta completes. Calls beyond the allowed number are dropped."""
        was_thinking = self._parser.is_thinking or not self._parser.has_thought
        events = self._parser.push(delta.text)
        if self._parser.has_thought and was_thinking:
            self._generation.count_reasoning(self._index, len(delta.token_ids), self._parser.is_thinking)
        if delta.finish_reason:
            events += self._parser.finish()
        return [part for event in events if (part := self._kept(event)) is not None]

    def _kept(self, event: OutputEvent) -> OutputPart | None:
        if isinstance(event, CallProblem):
            self._generation.report_call(event.reason)
            return None
        if isinstance(event, (CallStart, CallArguments)) and event.index >= self._max_calls:
            return None
        self._has_calls |= isinstance(event, CallStart)
        return event

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._has_calls else reason
