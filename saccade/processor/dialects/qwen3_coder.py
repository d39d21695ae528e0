"""Qwen3-Coder and Qwen3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>.

Values are plain text, each between line breaks. The outer tag may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from saccade.processor.dialects.argument_text import ArgumentWriter
from saccade.processor.dialects.call_grammar import BREAK, Function, GrammarWriter, Member, members_of
from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.hermes import CLOSE, OPEN, close_call, read_tagged_json
from saccade.processor.dialects.json_calls import checked_name, read_or_refuse
from saccade.processor.dialects.reader import Reading, TextReader

FUNCTION = "<function="
_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"


def read_qwen3_coder(reader: TextReader, sink: EventSink) -> Reading[None]:
    while marker := (yield from reader.copy_until((OPEN, FUNCTION), sink.content)):
        read = _after_tag(reader, sink) if marker == OPEN else _function(reader, sink)
        if (yield from read_or_refuse(reader, sink, marker, read, _END, CLOSE)) == _END:
            yield from close_call(reader, sink, CLOSE)


def _after_tag(reader: TextReader, sink: EventSink) -> Reading[None]:
    yield from reader.skip_space()
    if (yield from reader.peek()) == "{":  # Hermes, which these models know too
        yield from read_tagged_json(reader, sink)
        return
    yield from reader.expect(FUNCTION)
    yield from _function(reader, sink)


def _function(reader: TextReader, sink: EventSink) -> Reading[None]:
    name, _ = yield from reader.name_until((">",))
    writer = ArgumentWriter(sink, checked_name(name, sink))
    yield from reader.skip_space()
    while (yield from reader.skips(_PARAMETER)):
        key, _ = yield from reader.name_until((">",))
        writer.key(key)
        yield from writer.copy_text(reader, (_PARAMETER_END,), lines=True)
        yield from reader.skip_space()
    yield from reader.expect(_END)
    writer.close()
    yield from close_call(reader, sink, CLOSE)


def write_qwen3_coder(writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
    call = writer.any_of([_written(writer, function) for function in functions])
    return writer.repeated(call, BREAK, many)


def _written(writer: GrammarWriter, function: Function) -> str:
    next_line = writer.literal("\n")

    def parameter(member: Member) -> str:
        value = writer.value(member.schema, function.parameters, _PARAMETER_END, lines=True)
        begin = writer.literal(f"{_PARAMETER}{member.key}>\n")
        return f"{begin} {value} {next_line}"

    begin = writer.literal(f"{OPEN}\n{FUNCTION}{function.name}>\n")
    parameters = writer.in_turn(members_of(function.parameters), parameter)
    end = writer.literal(f"{_END}\n{CLOSE}")
    return f"{begin} {parameters} {end}"
