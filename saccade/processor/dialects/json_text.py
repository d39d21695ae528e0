"""JSON that arrives in pieces: passed on as it comes, and checked on the way."""

from __future__ import annotations

import json
import re

from saccade.processor.dialects.reader import Emit, Reading, TextReader, Unreadable

_MAX_DEPTH = 64
_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_VALID_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null")
_HEX = re.compile(r"[0-9a-fA-F]{4}")
CLOSES = {"{": "}", "[": "]"}


def copy_value(reader: TextReader, emit: Emit, depth: int = _MAX_DEPTH) -> Reading[None]:
    """Pass one JSON value on. `Unreadable` at the first letter that cannot belong to one."""
    first = yield from reader.peek()
    if depth and first in CLOSES:
        yield from _copy_members(reader, emit, CLOSES[first], depth - 1)
    elif first == '"':
        yield from copy_string(reader, emit)
    else:
        yield from _copy_scalar(reader, emit)


def _copy_members(reader: TextReader, emit: Emit, close: str, depth: int) -> Reading[None]:
    emit(reader.skip(1))
    yield from reader.copy_while(_SPACE, emit)
    if (yield from reader.peek()) == close:
        emit(reader.skip(1))
        return
    while True:
        if close == "}":
            yield from _copy_key(reader, emit)
        yield from copy_value(reader, emit, depth)
        yield from reader.copy_while(_SPACE, emit)
        after = yield from reader.peek()
        if after not in (",", close):
            raise Unreadable.before(after)
        emit(reader.skip(1))
        if after == close:
            return
        yield from reader.copy_while(_SPACE, emit)


def _copy_key(reader: TextReader, emit: Emit) -> Reading[None]:
    yield from copy_string(reader, emit)
    yield from reader.copy_while(_SPACE, emit)
    yield from reader.expect(":")
    emit(":")
    yield from reader.copy_while(_SPACE, emit)


def copy_string(reader: TextReader, emit: Emit) -> Reading[None]:
    """A string with its quotes. A line break inside of it is escaped, which models forget."""
    yield from reader.expect('"')
    emit('"')
    while True:
        yield from reader.copy_while(_PLAIN, emit)
        letter = yield from reader.peek()
        if letter == "":
            raise Unreadable("incomplete")
        if letter == "\\":
            yield from _copy_escape(reader, emit)
        elif letter == '"':
            emit(reader.skip(1))
            return
        else:
            emit(json.dumps(reader.skip(1))[1:-1])


def _copy_escape(reader: TextReader, emit: Emit) -> Reading[None]:
    escape = yield from reader.peek(2)
    if escape == "\\u":
        escape = yield from reader.peek(6)
        is_valid = _HEX.fullmatch(escape[2:]) is not None
    else:
        is_valid = escape[1:] in tuple('"\\/bfnrt')
    if not is_valid:
        raise Unreadable("incomplete" if len(escape) < 2 else "syntax")
    emit(reader.skip(len(escape)))


def _copy_scalar(reader: TextReader, emit: Emit) -> Reading[None]:
    pieces: list[str] = []
    yield from reader.copy_while(_SCALAR, pieces.append)
    scalar = "".join(pieces)
    emit(scalar)  # whatever it is: a call that breaks is shown as it was written
    if not _VALID_SCALAR.fullmatch(scalar):
        raise Unreadable("incomplete" if not scalar and (yield from reader.peek()) == "" else "syntax")


def read_string(reader: TextReader) -> Reading[str]:
    pieces: list[str] = []
    yield from copy_string(reader, pieces.append)
    return str(json.loads("".join(pieces)))
