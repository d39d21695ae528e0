"""Calls as Python: [NAME(KEY=VALUE, ...), ...], which Llama 3.2 and 4 and some others write."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from saccade.processor.dialects.argument_text import ArgumentWriter
from saccade.processor.dialects.arguments import no_constant, resolved
from saccade.processor.dialects.call_grammar import COMMA, NOTES, Function, GrammarWriter, Member, members_of
from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.json_calls import NAME_LETTERS, checked_name
from saccade.processor.dialects.reader import Reading, TextReader, Unreadable

_ANY = NOTES | {"type"}  # in the schema of a value of a type that is not limited further
_MAX_DEPTH = 64
_PLAIN = re.compile(r"""[^"'\\()\[\]{},]+""")


def read_pythonic(reader: TextReader, sink: EventSink) -> Reading[None]:
    """A list of calls. What does not begin with the name of a tool is no call at all."""
    yield from reader.expect("[")
    while True:
        yield from reader.skip_space()
        yield from _call(reader, sink)
        reader.note("")
        yield from reader.skip_space()
        if not (yield from reader.skips(",")):
            break
    yield from reader.skips("]")


def _call(reader: TextReader, sink: EventSink) -> Reading[None]:
    letters: list[str] = []
    yield from reader.copy_while(NAME_LETTERS, letters.append)
    if not (yield from reader.skips("(")):
        raise Unreadable(None)
    writer = ArgumentWriter(sink, checked_name("".join(letters), sink, known_only=True))
    yield from reader.skip_space()
    while not (yield from reader.skips(")")):
        key, _ = yield from reader.name_until(("=",))
        writer.key(key)
        yield from reader.skip_space()
        literal = yield from _literal(reader)
        value = _as_json(literal)
        if value is None:
            writer.value(literal)
            raise Unreadable
        writer.value(value)
        yield from reader.skips(",")
        yield from reader.skip_space()
    writer.close()


def _literal(reader: TextReader) -> Reading[str]:
    """The text of a value up to the comma or parenthesis after it."""
    pieces: list[str] = []
    depth = 0
    while True:
        yield from reader.copy_while(_PLAIN, pieces.append)
        letter = yield from reader.peek()
        if letter == "" or depth > _MAX_DEPTH:
            raise Unreadable.before(letter)
        if not depth and letter in ",)":
            return "".join(pieces).strip()
        if letter in "\"'":
            yield from _quoted(reader, letter, pieces)
            continue
        depth += (letter in "([{") - (letter in ")]}")
        pieces.append(reader.skip(1))


def _quoted(reader: TextReader, quote: str, pieces: list[str]) -> Reading[None]:
    pieces.append(reader.skip(1))
    plain = re.compile(rf"[^\\{quote}]+")
    while True:
        yield from reader.copy_while(plain, pieces.append)
        letter = yield from reader.peek()
        if letter == "":
            raise Unreadable("incomplete")
        pieces.append(reader.skip(1))
        if letter == quote:
            return
        if (yield from reader.peek()) == "":
            raise Unreadable("incomplete")
        pieces.append(reader.skip(1))


def _as_json(literal: str) -> str | None:
    """None if it is a literal neither of JSON nor of Python."""
    try:
        return json.dumps(json.loads(literal, parse_constant=no_constant), ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    try:
        value: Any = ast.literal_eval(literal)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def written_pythonic(writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
    """Values in JSON, which is nearly Python, but for a boolean."""

    def argument(function: Function, member: Member) -> str:
        schema = resolved(member.schema, function.parameters)
        is_boolean = (
            isinstance(schema, Mapping) and schema.get("type") == "boolean" and not set(schema) - _ANY
        )
        value = '("True" | "False")' if is_boolean else writer.json(member.schema, function.parameters)
        return f"{writer.literal(member.key + '=')} {value}"

    calls = []
    for function in functions:
        members = members_of(function.parameters)
        arguments = writer.listed(members, ", ", partial(argument, function))
        calls.append(f'{writer.literal(f"{function.name}(")} {arguments} ")"')
    return f'"[" {writer.repeated(writer.any_of(calls), COMMA, many)} "]"'
