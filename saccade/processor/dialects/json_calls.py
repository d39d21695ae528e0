"""Calls that are JSON objects with a name and arguments, which several dialects share."""

from __future__ import annotations

import re
from collections.abc import Callable

from saccade.processor.dialects.arguments import object_text
from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.json_text import copy_value, read_string
from saccade.processor.dialects.reader import Reading, TextReader, Unreadable

NAME_LETTERS = re.compile(r"[a-zA-Z0-9_.-]+")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
ReadCall = Callable[[TextReader, EventSink], Reading[None]]


def read_json_call(reader: TextReader, sink: EventSink, *, known_only: bool = False) -> Reading[None]:
    """{"name": ..., "arguments": {...}}, or the same with `parameters`, in any order.

    `known_only` is for dialects in which a call looks like any JSON.
    """
    call = _JsonCall(sink, known_only)
    yield from reader.expect("{")
    yield from reader.skip_space()
    while True:
        key = yield from read_string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        yield from call.read_member(reader, key)
        yield from reader.skip_space()
        if not (yield from reader.skips(",")):
            break
        yield from reader.skip_space()
    if sink.in_call:
        yield from reader.skips("}")  # the arguments are whole, with or without it
    else:
        yield from reader.expect("}")
        call.start()
        sink.arguments(object_text(call.early))
    sink.end()


class _JsonCall:
    def __init__(self, sink: EventSink, known_only: bool) -> None:
        self.early = ""  # arguments that came before the name
        self._sink = sink
        self._known_only = known_only
        self._name: str | None = None

    def start(self) -> None:
        self._sink.start(checked_name(self._name, self._sink, known_only=self._known_only))

    def read_member(self, reader: TextReader, key: str) -> Reading[None]:
        if key == "name" and self._name is None:
            self._name = yield from read_string(reader)
            checked_name(self._name, self._sink, known_only=self._known_only)
        elif key in ("arguments", "parameters") and not self._sink.in_call and not self.early:
            yield from self._read_arguments(reader)
        else:
            yield from copy_value(reader, _drop)

    def _read_arguments(self, reader: TextReader) -> Reading[None]:
        first = yield from reader.peek()
        if first == '"':  # some models write them as text
            self.early = yield from read_string(reader)
        elif first == "n":
            yield from reader.expect("null")
        elif first != "{":
            raise Unreadable
        elif self._name is None:
            pieces: list[str] = []
            yield from copy_value(reader, pieces.append)
            self.early = "".join(pieces)
        else:
            self.start()
            yield from copy_value(reader, self._sink.arguments)


def read_json_calls(reader: TextReader, sink: EventSink, *, known_only: bool = False) -> Reading[None]:
    """A list of such objects."""
    yield from reader.expect("[")
    while True:
        yield from reader.skip_space()
        yield from read_json_call(reader, sink, known_only=known_only)
        reader.note("")
        yield from reader.skip_space()
        if not (yield from reader.skips(",")):
            break
    yield from reader.skips("]")


def read_each(
    opening: str,
    read: ReadCall,
    close: str,
    reader: TextReader,
    sink: EventSink,
    *,
    frame: tuple[str, ...] = (),
) -> Reading[None]:
    """Calls between two marks. Marks of a frame around all of them are dropped."""
    while marker := (yield from reader.copy_until((*frame, opening), sink.content)):
        if marker == opening:
            yield from read_or_refuse(reader, sink, opening, read(reader, sink), close)


def read_or_refuse(
    reader: TextReader, sink: EventSink, marker: str, read: Reading[None], *closes: str
) -> Reading[str]:
    """Read what begins after `marker`. What is no call is told as text.

    Of a call that breaks in its arguments all is told up to one of `closes`, which is returned: clients see
    what the model wrote. What reads several calls notes anew after each, so that none is told twice.
    """
    close = ""
    reader.note(marker)
    try:
        yield from read
    except Unreadable as error:
        if sink.in_call:
            close = yield from reader.copy_until(closes, sink.arguments)
            sink.end(error.reason or "syntax")
        else:
            sink.refuse(reader.noted(), error.reason)
    reader.noted()
    return close


def checked_name(name: str | None, sink: EventSink, *, known_only: bool = False) -> str:
    if name is None:
        if known_only:
            raise Unreadable(None)  # any JSON
        raise Unreadable
    if not _NAME.fullmatch(name):
        raise Unreadable
    if known_only and name not in sink.parameters:
        raise Unreadable("unknown_tool")
    return name


def _drop(_: str) -> None:
    pass
