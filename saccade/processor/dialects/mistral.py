"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}], and later [TOOL_CALLS]NAME[ARGS]{...}."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from saccade.processor.dialects.call_grammar import COMMA, Function, GrammarWriter
from saccade.processor.dialects.call_schema import call_schema
from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.json_calls import NAME_LETTERS, checked_name, read_json_calls, read_or_refuse
from saccade.processor.dialects.json_text import copy_value
from saccade.processor.dialects.reader import Reading, TextReader

CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
MARKERS = (CALLS, ARGS, _CALL_ID)


def call_id() -> str:
    """The chat templates refuse any other length."""
    return secrets.token_hex(5)[:9]


def read_mistral(reader: TextReader, sink: EventSink) -> Reading[None]:
    marker = yield from reader.copy_until((CALLS,), sink.content)
    while marker:  # a broken call ends where the next one begins
        marker = yield from read_or_refuse(reader, sink, CALLS, _calls(reader, sink), CALLS)
        if not marker:
            marker = yield from reader.copy_until((CALLS,), sink.content)


def _calls(reader: TextReader, sink: EventSink) -> Reading[None]:
    yield from reader.skip_space()
    if (yield from reader.peek()) == "[":
        yield from read_json_calls(reader, sink)
        return
    letters: list[str] = []
    yield from reader.copy_while(NAME_LETTERS, letters.append)
    name = checked_name("".join(letters), sink)
    if (yield from reader.skips(_CALL_ID)):
        yield from reader.name_until((ARGS,))
    else:
        yield from reader.skips(ARGS)
    yield from reader.skip_space()
    sink.start(name)
    yield from copy_value(reader, sink.arguments)
    sink.end()


def write_mistral(writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
    """The newer form where the tokenizer has its markers."""
    if not writer.has_token(ARGS):
        call = writer.rule(writer.json(call_schema(functions)))
        return f'{writer.literal(CALLS)} "[" {writer.repeated(call, COMMA, many)} "]"'
    id_ = f"({writer.literal(_CALL_ID)} /[a-zA-Z0-9]{{9}}/)?" if writer.has_token(_CALL_ID) else ""
    options = [
        f"{writer.literal(CALLS + name)} {id_} {writer.literal(ARGS)} {writer.json(parameters)}"
        for name, parameters in functions
    ]
    return writer.repeated(writer.any_of(options), "", many)
