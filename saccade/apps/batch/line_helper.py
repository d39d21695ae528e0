"""The helper process that reads batch files: where each line has its body, and what is wrong with it.

    request: PieceStart, descriptor of the file ─► reply: Piece, up to some lines and bytes

A body is never decoded, only looked through. Nothing is kept between requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from saccade.helpers.main import limit_memory, serve

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/bill"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank"),
)
MAX_LINE_BYTES = 256 << 20
_MEMORY_MB = 1024  # a line takes twice its bytes while it is read
_PIECE_LINES = 2000
_PIECE_BYTES = 16 << 20
_MAX_ID_CHARS = 512
_BYTES_PER_CHAR = 12  # two escapes
_MARK = b"\xef\xbb\xbf"  # with which some editors begin a file

Check = Callable[[bytes], str | None]
"""A body -> why no server could answer it."""


class PieceStart(NamedTuple):
    line: int  # from 1
    offset: int


class Place(NamedTuple):
    """Offsets are those in the file."""

    line: int
    url: int = 0  # of URLS
    id_offset: int = 0
    id_length: int = 0  # of the custom_id as JSON; 0: the line has none
    body_offset: int = 0
    body_length: int = 0
    problem: str = ""


class Piece(msgspec.Struct, array_like=True):
    places: list[Place]
    end: PieceStart  # of the next piece
    is_last: bool


class _Line(msgspec.Struct):
    custom_id: msgspec.Raw = msgspec.Raw(b"null")
    method: msgspec.Raw = msgspec.Raw(b"null")
    url: msgspec.Raw = msgspec.Raw(b"null")
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    stream: msgspec.Raw = msgspec.Raw(b"false")


def read_piece(fd: int, start: PieceStart, check: Check) -> Piece:
    places: list[Place] = []
    number, offset = start
    with open(fd, "rb", closefd=False) as stream:
        stream.seek(offset)
        while number - start.line < _PIECE_LINES and offset - start.offset < _PIECE_BYTES:
            line = stream.readline(MAX_LINE_BYTES + 1)
            if not line:
                return Piece(places, PieceStart(number, offset), True)
            if len(line) > MAX_LINE_BYTES:
                places.append(Place(number, problem=f"it has more than {MAX_LINE_BYTES} bytes"))
                while line and not line.endswith(b"\n"):
                    line = stream.readline(_PIECE_BYTES)
            elif line.strip():
                places.append(_placed(line, number, offset, check))
            number += 1
            offset = stream.tell()
    return Piece(places, PieceStart(number, offset), False)


def _placed(line: bytes, number: int, offset: int, check: Check) -> Place:
    text = memoryview(line)[len(_MARK) if number == 1 and line.startswith(_MARK) else 0 :]
    try:
        parts = msgspec.json.decode(text, type=_Line)
    except msgspec.ValidationError:
        return Place(number, problem="it is not an object")
    except (ValueError, RecursionError):
        return Place(number, problem="it is not JSON in UTF-8")
    custom_id = _text(parts.custom_id, _MAX_ID_CHARS)
    if not custom_id:
        return Place(number, problem=f"custom_id must be a string of 1 to {_MAX_ID_CHARS} characters")
    url = _text(parts.url, _MAX_ID_CHARS)
    return Place(
        number,
        URLS.index(url) if url in URLS else 0,
        offset + line.find(parts.custom_id),
        len(memoryview(parts.custom_id)),
        offset + line.find(parts.body),
        len(memoryview(parts.body)),
        _problem(parts, url, check),
    )


def _problem(parts: _Line, url: str | None, check: Check) -> str:
    """Empty: it has none."""
    if _text(parts.method, _MAX_ID_CHARS) != "POST":
        return "method must be POST"
    if url not in URLS:
        return f"url must be one of {', '.join(URLS)}"
    body = bytes(parts.body)
    if not body.startswith(b"{"):
        return "body must be an object"
    if problem := check(body):
        return problem
    try:
        stream = bytes(msgspec.json.decode(body, type=_Body).stream)
    except (ValueError, RecursionError):
        return "it is not JSON in UTF-8"
    if stream not in (b"false", b"null"):
        return "a batch streams nothing; leave stream out of the body"
    return ""


def _text(raw: msgspec.Raw, max_chars: int) -> str | None:
    """None for another value, for a longer string, and for one that UTF-8 does not have."""
    if len(memoryview(raw)) > max_chars * _BYTES_PER_CHAR:
        return None
    try:
        text = msgspec.json.decode(raw, type=str)
    except ValueError:
        return None
    return text if len(text) <= max_chars else None


def serve_lines(check: Check) -> None:
    """The main of the process. Live requests go before it on a busy machine."""
    os.nice(5)
    limit_memory(_MEMORY_MB)

    def answer(request: bytes, fds: Sequence[int]) -> bytes:
        start = msgspec.msgpack.decode(request, type=PieceStart)
        return msgspec.msgpack.encode(read_piece(fds[0], start, check))

    serve(answer)


if __name__ == "__main__":
    serve_lines(lambda body: None)
