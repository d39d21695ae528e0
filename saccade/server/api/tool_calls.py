"""The tool calls in one answer of a chat, found as its text arrives; no more than the request allows. Knows no JSON."""

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

    def take(self, piece: Delta) -> list[ToolDelta]:
        """The text and the calls that a piece completes."""
        found = [delta for delta in self._parsed(piece) if self._is_wanted(delta)]
        self._has_calls = self._has_calls or any(isinstance(delta, CallStart) for delta in found)
        return found

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._has_calls else reason

    def _parsed(self, piece: Delta) -> list[ToolDelta]:
        if self._parser is None:
            return [Content(piece.text)] if piece.text else []
        deltas = self._parser.push(piece.text)
        return deltas + (self._parser.finish() if piece.finish_reason else [])

    def _is_wanted(self, delta: ToolDelta) -> bool:
        return isinstance(delta, Content) or delta.index < self._max_calls
