"""Finds the tool calls in the text of one output while it streams. Knows no JSON shape of any API."""

from __future__ import annotations

from saccade.processor.tools import MAX_TOOLS, CallStart, Content, ToolDelta, ToolParser
from saccade.server.generation import Delta
from saccade.server.request.chat import ChatRequest


class CallFinder:
    def __init__(self, request: ChatRequest) -> None:
        plan = request.tools
        self._parser = ToolParser(is_bare=plan.structured is not None) if plan.calls else None
        self._max_calls = MAX_TOOLS if request.parallel_tool_calls else 1
        self._has_calls = False

    def take(self, delta: Delta) -> list[ToolDelta]:
        """The text and the tool calls that a delta completes. Calls beyond the allowed number are dropped."""
        parts = self._parsed(delta)
        found = [part for part in parts if isinstance(part, Content) or part.index < self._max_calls]
        self._has_calls = self._has_calls or any(isinstance(part, CallStart) for part in found)
        return found

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._has_calls else reason

    def _parsed(self, delta: Delta) -> list[ToolDelta]:
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        found = self._parser.push(delta.text)
        return found + (self._parser.finish() if delta.finish_reason else [])
