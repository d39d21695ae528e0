"""Llama 3 and 4: {"name": ..., "parameters": {...}} or [NAME(KEY=VALUE)], bare or after a control token."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.processor.dialects.call_grammar import Function, GrammarWriter
from saccade.processor.dialects.call_schema import call_schema
from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.json_calls import read_json_call, read_json_calls, read_or_refuse
from saccade.processor.dialects.pythonic import read_pythonic, written_pythonic
from saccade.processor.dialects.reader import Reading, TextReader

PYTHON_TAG = "<|python_tag|>"
_START = "<|python_start|>"
_END = "<|python_end|>"
MARKERS = (PYTHON_TAG, _START, _END)


def read_llama(reader: TextReader, sink: EventSink) -> Reading[None]:
    """Only the whole output can be a call without a token before it: text may hold JSON."""
    yield from _calls(reader, sink, "")
    while marker := (yield from reader.copy_until(MARKERS, sink.content)):
        if marker != _END:
            yield from _calls(reader, sink, marker)


def _calls(reader: TextReader, sink: EventSink, marker: str) -> Reading[None]:
    space: list[str] = []
    while (yield from reader.peek()).isspace():
        space.append(reader.skip(1))
    first = yield from reader.peek()
    if first in ("{", "["):
        read = _objects(reader, sink) if first == "{" else _listed(reader, sink)
        yield from read_or_refuse(reader, sink, marker + "".join(space), read, _END)
    else:
        sink.content(marker + "".join(space))


def _objects(reader: TextReader, sink: EventSink) -> Reading[None]:
    while True:
        yield from read_json_call(reader, sink, known_only=True)
        reader.note("")
        yield from reader.skip_space()
        if not (yield from reader.skips(";")):
            return
        yield from reader.skip_space()


def _listed(reader: TextReader, sink: EventSink) -> Reading[None]:
    """A list of calls in JSON, which some fine-tuned models write, or in Python."""
    first_two = yield from reader.peek(2)
    if first_two == "[{":
        yield from read_json_calls(reader, sink, known_only=True)
    else:
        yield from read_pythonic(reader, sink)


def write_llama(writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
    call = writer.rule(writer.json(call_schema(functions, "parameters")))
    return writer.repeated(call, '";" " "?', many)


def write_pythonic(writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
    """Llama 4 writes control tokens around it, or none."""
    calls = written_pythonic(writer, functions, many)
    if not all(map(writer.has_token, (_START, _END))):
        return calls
    calls = writer.rule(calls)
    return f"({calls} | {writer.literal(_START)} {calls} {writer.literal(_END)})"
