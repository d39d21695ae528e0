"""Hermes, also Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from saccade.processor.dialects.call_grammar import BREAK, Function, GrammarWriter
from saccade.processor.dialects.call_schema import call_schema
from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.json_calls import read_each, read_json_call, read_or_refuse
from saccade.processor.dialects.reader import Reading, TextReader

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_BRACES = re.compile(r"[\s}]+")


def read_tagged_json(reader: TextReader, sink: EventSink) -> Reading[None]:
    """Calls after their opening tag, usually one, with the closing tag. A brace too many is forgiven."""
    while True:
        yield from reader.skip_space()
        yield from read_json_call(reader, sink)
        space: list[str] = []
        yield from reader.copy_while(_BRACES, space.append)
        if (yield from reader.peek()) not in ("{", ","):
            break
        reader.note("".join(space))
        yield from reader.skips(",")
    if not (yield from reader.skips(CLOSE)):
        sink.content("".join(space))


read_hermes = partial(read_each, OPEN, read_tagged_json, CLOSE)


def close_call(reader: TextReader, sink: EventSink, close: str) -> Reading[None]:
    """Read the closing tag, if it is there: the call itself is complete. Other text goes on as content."""
    space: list[str] = []
    yield from reader.copy_while(_BRACES, space.append)
    if not (yield from reader.skips(close)):
        sink.content("".join(space))


def write_hermes(writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
    call = f"{BREAK} {writer.json(call_schema(functions))} {BREAK}"
    call = writer.rule(f"{writer.literal(OPEN)} {call} {writer.literal(CLOSE)}")
    return writer.repeated(call, BREAK, many)


def read_bare(reader: TextReader, sink: EventSink) -> Reading[None]:
    """An output that a grammar held to one call without tags."""
    yield from reader.skip_space()
    yield from read_or_refuse(reader, sink, "", read_json_call(reader, sink), CLOSE)
    yield from reader.copy_rest(sink.content)
