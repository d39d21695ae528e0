"""Gemma 4: <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:5}<tool_call|>; FunctionGemma with other tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from saccade.processor.dialects.arguments import no_constant, resolved, types_of
from saccade.processor.dialects.call_grammar import (
    BREAK,
    NOTES,
    Function,
    GrammarWriter,
    Inexpressible,
    Member,
    members_of,
)
from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.hermes import close_call
from saccade.processor.dialects.json_calls import checked_name, read_each
from saccade.processor.dialects.json_text import CLOSES
from saccade.processor.dialects.reader import Reading, TextReader, Unreadable

_MAX_DEPTH = 64
_MAX_SCHEMA_DEPTH = 8  # a schema may refer to itself
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
_LIST = NOTES | {"type", "items"}
_CHOICE = NOTES | {"anyOf"}
_SCALAR = re.compile(r"[^\s,{}\[\]]+")


class Tags(NamedTuple):
    open: str
    close: str
    quote: str  # around a text


GEMMA4 = Tags("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = Tags("<start_function_call>", "<end_function_call>", "<escape>")


def read(tags: Tags, reader: TextReader, sink: EventSink) -> Reading[None]:
    yield from read_each(tags.open, partial(_call, tags), tags.close, reader, sink)


def _call(tags: Tags, reader: TextReader, sink: EventSink) -> Reading[None]:
    yield from reader.skip_space()
    yield from reader.expect("call:")
    name, _ = yield from reader.name_until(("{",))
    sink.start(checked_name(name, sink))
    yield from _Values(reader, sink, tags.quote).copy_members("}", _MAX_DEPTH)
    sink.end()
    yield from close_call(reader, sink, tags.close)


class _Values:
    """Passes values on as JSON."""

    def __init__(self, reader: TextReader, sink: EventSink, quote: str) -> None:
        self._reader = reader
        self._emit = sink.arguments
        self._quote = quote

    def copy_members(self, close: str, depth: int) -> Reading[None]:
        """The members of an object or a list, after its bracket."""
        reader = self._reader
        self._emit("{" if close == "}" else "[")
        yield from reader.skip_space()
        is_first = True
        while not (yield from reader.skips(close)):
            if not is_first:
                yield from reader.expect(",")
                yield from reader.skip_space()
                self._emit(", ")
            is_first = False
            if close == "}":
                yield from self._copy_key()
            yield from self._copy_value(depth)
            yield from reader.skip_space()
        self._emit(close)

    def _copy_key(self) -> Reading[None]:
        if (yield from self._reader.skips(self._quote)):
            yield from self._copy_text()
            yield from self._reader.expect(":")
        else:
            key, _ = yield from self._reader.name_until((":",))
            self._emit(json.dumps(key, ensure_ascii=False))
        self._emit(": ")
        yield from self._reader.skip_space()

    def _copy_value(self, depth: int) -> Reading[None]:
        first = yield from self._reader.peek()
        if not depth:
            raise Unreadable
        if first in CLOSES:
            self._reader.skip(1)
            yield from self.copy_members(CLOSES[first], depth - 1)
        elif (yield from self._reader.skips(self._quote)):
            yield from self._copy_text()
        else:
            yield from self._copy_scalar()

    def _copy_text(self) -> Reading[None]:
        """Copy up to the closing quote, which is the same as the opening one."""
        self._emit('"')
        if not (yield from self._reader.copy_until((self._quote,), self._escape)):
            raise Unreadable("incomplete")
        self._emit('"')

    def _escape(self, text: str) -> None:
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])

    def _copy_scalar(self) -> Reading[None]:
        pieces: list[str] = []
        yield from self._reader.copy_while(_SCALAR, pieces.append)
        scalar = "".join(pieces)
        if not scalar:
            raise Unreadable.before((yield from self._reader.peek()))
        try:
            json.loads(scalar, parse_constant=no_constant)
        except (ValueError, RecursionError):
            scalar = json.dumps(scalar, ensure_ascii=False)  # a word without quotes
        self._emit(scalar)


def write(tags: Tags, writer: GrammarWriter, functions: Sequence[Function], many: bool) -> str:
    calls = []
    for name, parameters in functions:
        values = _ValueGrammar(writer, parameters, tags.quote)
        begin = writer.literal(f"{tags.open}call:{name}")
        calls.append(f"{begin} {values.object(parameters)} {writer.literal(tags.close)}")
    return writer.repeated(writer.any_of(calls), BREAK, many)


class _ValueGrammar:
    """Objects and lists as JSON has them, but with other quotes, and none around keys."""

    def __init__(self, writer: GrammarWriter, root: Mapping[str, Any], quote: str) -> None:
        self._writer = writer
        self._root = root
        self._quote = quote

    def object(self, schema: Mapping[str, Any], depth: int = _MAX_SCHEMA_DEPTH) -> str:
        def member(member: Member) -> str:
            return f"{self._writer.literal(member.key + ':')} {self._value(member.schema, depth - 1)}"

        return f'"{{" {self._writer.listed(members_of(schema), ",", member)} "}}"'

    def _value(self, schema: Any, depth: int) -> str:
        schema = resolved(schema, self._root)
        types = types_of(schema, self._root)
        if not depth or not isinstance(schema, Mapping):
            raise Inexpressible
        if {"anyOf"} <= set(schema) <= _CHOICE:
            return self._writer.any_of([self._value(option, depth - 1) for option in schema["anyOf"]])
        if types and types <= _SCALARS:
            return self._writer.json(schema, self._root)
        if types == {"string"}:
            text = self._writer.string(schema, self._root, self._quote, or_null=False)
            return f"{self._writer.literal(self._quote)} {text}"
        if types == {"object"}:
            return self.object(schema, depth)
        if types == {"array"} and set(schema) <= _LIST:
            item = self._writer.rule(self._value(schema.get("items"), depth - 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        raise Inexpressible
