"""Hermes, also Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import re

from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.json_calls import read_json_call, read_or_refuse
from saccade.processor.dialects.reader import Reading, TextReader

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_BRACES = re.compile(r"[\s}]+")


def read_hermes(reader: TextReader, sink: EventSink) -> Reading[None]:
    while (yield from reader.copy_until((OPEN,), sink.content)):
        yield from read_or_refuse(reader, sink, OPEN, read_tagged_json(reader, sink), CLOSE)


def read_tagged_json(reader: TextReader, sink: EventSink) -> Reading[None]:
    """One call after its opening tag, with the closing one. A brace too many is forgiven."""
    yield from reader.skip_space()
    yield from read_json_call(reader, sink)
    yield from close_call(reader, sink, CLOSE)


def close_call(reader: TextReader, sink: EventSink, close: str) -> Reading[None]:
    """Read the closing tag, if it is there: the call itself is complete. Other text goes on as content."""
    space: list[str] = []
    yield from reader.copy_while(_BRACES, space.append)
    if not (yield from reader.skips(close)):
        sink.content("".join(space))


def read_bare(reader: TextReader, sink: EventSink) -> Reading[None]:
    """An output that a grammar held to one call without tags."""
    yield from reader.skip_space()
    yield from read_or_refuse(reader, sink, "", read_json_call(reader, sink), CLOSE)
    yield from reader.copy_rest(sink.content)
