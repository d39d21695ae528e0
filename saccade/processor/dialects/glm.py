"""GLM-4.5 and later: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from saccade.processor.dialects.argument_text import ArgumentWriter
from saccade.processor.dialects.call_grammar import BREAK, Function, GrammarWriter, Member, members_of
from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.hermes import CLOSE, OPEN
from saccade.processor.dialects.json_calls import checked_name, read_each
from saccade.processor.dialects.reader import Reading, TextReader

KEY = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE = "<arg_value>"
_VALUE_END = "</arg_value>"
MARKERS = (OPEN, CLOSE, KEY, _KEY_END, _VALUE, _VALUE_END)


def _call(reader: TextReader, sink: EventSink) -> Reading[None]:
    yield from reader.skip_space()
    name, marker = yield from reader.name_until(("\n", KEY, CLOSE))
    writer = ArgumentWriter(sink, checked_name(name, sink))
    if marker == "\n":
        marker = yield from _next(reader)
    while marker == KEY:
        key, _ = yield from reader.name_until((_KEY_END,))
        writer.key(key)
        yield from reader.skip_space()
        yield from reader.expect(_VALUE)
        yield from writer.copy_text(reader, (_VALUE_END,))
        marker = yield from _next(reader)
    writer.close()


read_glm = partial(read_each, OPEN, _call, CLOSE)


def _next(reader: TextReader) -> Reading[str]:
    """The tag of the next argument, or the end of the call."""
    yield from reader.skip_space()
    if (yield from reader.skips(KEY)):
        return KEY
    yield from reader.expect(CLOSE)
    return CLOSE


def write_glm(writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
    """Calls with line breaks as GLM-4.5, or without as GLM-4.7."""
    call = writer.any_of([_written(writer, function) for function in functions])
    return writer.repeated(call, BREAK, many)


def _written(writer: GrammarWriter, function: Function) -> str:
    def argument(member: Member) -> str:
        key = writer.literal(f"{KEY}{member.key}{_KEY_END}")
        value = writer.value(member.schema, function.parameters, _VALUE_END)
        return f"{key} {BREAK} {writer.literal(_VALUE)} {value} {BREAK}"

    arguments = writer.in_turn(members_of(function.parameters), argument)
    return f"{writer.literal(OPEN + function.name)} {BREAK} {arguments} {writer.literal(CLOSE)}"
