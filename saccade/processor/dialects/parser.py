"""The parser of one output: text in; thinking, text and tool calls out, while it streams.

Streamed and whole answers both pass through here, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from saccade.processor.dialects.call_grammar import GrammarWriter, Inexpressible, functions_of
from saccade.processor.dialects.events import EventSink, OutputEvent, call_id
from saccade.processor.dialects.reader import Reading, TextReader
from saccade.processor.dialects.registry import (
    BARE,
    TOOL_DIALECTS,
    ToolDialect,
    thinking_dialect,
    tool_dialect,
)
from saccade.processor.dialects.thinking import ThinkingDialect
from saccade.types.request import Thinking


class OutputFormat(NamedTuple):
    """How the model writes the outputs of one prompt."""

    calls: ToolDialect | None = TOOL_DIALECTS["hermes"]  # None: calls are text
    markers: ThinkingDialect | None = None  # None: thinking is text
    thinking: Thinking | None = None  # what the outputs of this prompt begin with; None: no thinking

    def shown_markers(self, *, finds_calls: bool) -> tuple[str, ...]:
        """Markers that the parser must see, even if they are control tokens."""
        markers: tuple[str, ...] = ()
        if finds_calls and self.calls is not None:
            markers += self.calls.markers
        if self.thinking is not None:
            markers += (self.thinking.open, self.thinking.close)
        return markers

    def parser(
        self, tools: Sequence[Mapping[str, Any]] | None, *, finds_calls: bool = True, is_bare: bool = False
    ) -> OutputParser:
        """`is_bare` is for outputs that a grammar holds to one call without tags."""
        new_id = self.calls.new_id if self.calls else call_id
        dialect = BARE if is_bare else self.calls
        sink = EventSink(tools or (), new_id)
        return OutputParser(sink, dialect if finds_calls else None, self.markers, self.thinking)


class OutputFormats(NamedTuple):
    """The same for all prompts of a checkpoint."""

    calls: ToolDialect | None
    markers: ThinkingDialect | None
    token_id: Callable[[str], int | None]  # of a marker that is one token

    def after(self, prompt: str) -> OutputFormat:
        """How the model writes what follows a rendered chat."""
        thinking = None
        if self.markers is not None and (thinking := self.markers.after(prompt)) is not None:
            open_id = self.token_id(thinking.open)
            thinking = thinking._replace(open_id=open_id, close_id=self.token_id(thinking.close))
        return OutputFormat(self.calls, self.markers, thinking)

    @property
    def closes_in_pieces(self) -> bool:
        """The marker that ends the thinking is several tokens: no budget can write it."""
        return self.markers is not None and self.token_id(self.markers.close) is None

    def call_grammar(
        self, tools: Sequence[Mapping[str, Any]], *, many: bool = False, by_id: bool = True
    ) -> str | None:
        """A grammar in Lark of calls as the model writes them; None where its dialect has none for these.

        `by_id`: markers are named by their tokens, which only this tokenizer can match.
        """
        if self.calls is None or self.calls.write is None:
            return None
        writer = GrammarWriter(self.calls.markers, self.token_id if by_id else _no_token)
        try:
            return writer.grammar(self.calls.write(writer, functions_of(tools), many))
        except Inexpressible:
            return None


def output_formats(
    template: str | None,
    token_id: Callable[[str], int | None],
    *,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> OutputFormats:
    """The formats of a checkpoint, by its chat template or by names."""
    calls = tool_dialect(tool_call_parser, template)
    return OutputFormats(calls, thinking_dialect(reasoning_parser, template), token_id)


def _no_token(_: str) -> None:
    return None


PLAIN = OutputFormat()
"""The format of outputs without thinking, with calls in the most common dialect."""


class OutputParser:
    """`calls` is None where the output is not searched for calls, `thinking` where it has no thinking."""

    def __init__(
        self,
        sink: EventSink,
        calls: ToolDialect | None = None,
        markers: ThinkingDialect | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        self.is_thinking = False  # what comes is thinking
        self.has_thought = False  # the thinking has begun, and may have ended
        self._is_undecided = thinking is not None  # it may begin
        self._reader = TextReader()
        self._sink = sink
        self._calls = calls
        self._markers = markers
        self._thinking = thinking
        self._parsing = self._parse()

    @property
    def is_passive(self) -> bool:
        """All further text is content, just as it comes."""
        return not self.is_thinking and not self._is_undecided and self._calls is None and self._sink.is_idle

    def push(self, text: str) -> list[OutputEvent]:
        self._reader.feed(text)
        next(self._parsing, None)
        return self._sink.take()

    def finish(self) -> list[OutputEvent]:
        """The output has ended: what was held back is told, and what is incomplete."""
        self._reader.end()
        next(self._parsing, None)
        self._sink.finish()
        return self._sink.take()

    def _parse(self) -> Reading[None]:
        if self._thinking is not None:
            yield from self._parse_thinking(self._thinking)
        if self._calls is not None:
            yield from self._calls.read(self._reader, self._sink)
        yield from self._reader.copy_rest(self._sink.content)

    def _parse_thinking(self, thinking: Thinking) -> Reading[None]:
        """The thinking at the beginning of an output, if there is any."""
        markers = self._markers
        assert markers is not None, "thinking has markers"
        reader = self._reader
        space: list[str] = []
        while (yield from reader.peek()).isspace():
            space.append(reader.skip(1))
        is_written = yield from reader.skips(markers.open)
        self._is_undecided = False
        self.is_thinking = self.has_thought = is_written or thinking.is_open
        if not self.is_thinking:
            self._sink.content("".join(space))
            return
        self._sink.begin_text()
        if is_written and markers.label:
            yield from reader.skips(markers.label)
        yield from reader.copy_until((markers.close,), self._sink.reasoning)
        self._sink.begin_text()
        self.is_thinking = False
