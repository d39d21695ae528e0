"""How much text a body brings: roughly while it arrives, exactly once it is read. Pictures are counted elsewhere.

All a request says must fit the model's context. What cannot is refused before a parser, a template or a tokenizer works
on it: those keep the interpreter to themselves, and everybody's tokens wait meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from saccade.errors import RequestError
from saccade.server.errors import ApiError

MAX_VALUES = 2_000_000
"""Commas in a body outside of data URLs: room for every id of every prompt of a large batch."""
_MAX_STRINGS = 250_000  # and names: each costs several times what a number does
_MAX_CONTAINERS = 100_000  # and lists and objects as much again
_CHARS_PER_CONTAINER = 16  # a long context may hold more brackets than that: in texts nobody can tell them apart
_MIN_BYTES = 16 << 20  # parsed in the time of a step, whatever they are
_BYTES_PER_CHAR = 6  # \u00e9

_MEDIA_START = re.compile(rb'"data(?::|"\s*:\s*")', re.IGNORECASE)  # a data URL, or Anthropic's field of that name
_OVERLAP = 32  # bytes in which that begins, when the rest of it has not arrived

_MEDIA_LISTS = ("messages", "input", "system")
_MEDIA_FIELDS = ("image_url", "video_url", "image", "video", "source")
_ID_FIELDS = ("prompt", "tokens")  # as lists they are ids or prompts, which have limits of their own


class TextTally:
    """Counts a body chunk by chunk. What it takes for a data URL may be a text; `check_text` sees that later."""

    def __init__(self, max_chars: int) -> None:
        self._max_bytes = max(_MIN_BYTES, max_chars * _BYTES_PER_CHAR)
        self._max_containers = max(_MAX_CONTAINERS, max_chars // _CHARS_PER_CONTAINER)
        self._rest = b""
        self._is_media = False
        self._bytes = 0
        self._values = 0
        self._quotes = 0
        self._containers = 0

    def take(self, chunk: bytes) -> None:
        """ApiError when more has come than any request of this model needs."""
        data, at = self._rest + chunk, 0
        self._rest = b""
        while at < len(data):
            at = self._after_media(data, at) if self._is_media else self._after_text(data, at)
        self._check()

    def _after_media(self, data: bytes, start: int) -> int:
        end = data.find(b'"', start)
        self._is_media = end < 0
        return len(data) if end < 0 else end

    def _after_text(self, data: bytes, start: int) -> int:
        found = _MEDIA_START.search(data, start)
        self._is_media = found is not None
        end = found.end() if found else max(start, len(data) - _OVERLAP)
        self._bytes += end - start
        self._values += data.count(b",", start, end)
        self._quotes += data.count(b'"', start, end) - data.count(b'\\"', start, end)
        self._containers += data.count(b"{", start, end) + data.count(b"[", start, end)
        if not found:
            self._rest = data[end:]
            return len(data)
        return end

    def _check(self) -> None:
        if self._bytes > self._max_bytes:
            raise ApiError(
                400,
                f"the body has more than {self._max_bytes} bytes beside its pictures, more than the context can hold; "
                "send less text or raise --max-model-len",
                code="context_length_exceeded",
            )
        is_large = self._values > MAX_VALUES or self._quotes > 2 * _MAX_STRINGS
        if is_large or self._containers > self._max_containers:
            raise ApiError(
                400,
                f"the body holds more than {MAX_VALUES} values, {_MAX_STRINGS} strings or {self._max_containers} lists "
                "and objects; send a smaller request",
                code="request_too_large",
            )


def check_text(body: Mapping[str, Any], limit: int) -> None:
    """RequestError when all that a body says, names included, has more than `limit` characters.

    Whatever is no string counts as one. Data URLs count only where no picture can be.
    """
    media = {id(text) for text in _media(body)}
    room = limit
    for name, value in body.items():
        if name in _ID_FIELDS and isinstance(value, list):
            continue
        room -= len(name) + _num_chars(value, media, room)
        check_chars(limit - room, limit, name[:64])


def check_chars(count: int, limit: int, param: str) -> None:
    """Long before a text is tokenized it can be too long for any context."""
    if count > limit:
        raise RequestError(
            f"the request has more than {limit} characters of text, more than the context can hold; send less or raise "
            "--max-model-len",
            code="context_length_exceeded",
            param=param,
        )


def _num_chars(value: Any, media: set[int], enough: int) -> int:
    """Stops when there are more than enough, so that counting a list takes no longer than its limit."""
    count, waiting = 0, [value]
    while waiting and count <= enough:
        value = waiting.pop()
        if isinstance(value, str):
            count += 0 if id(value) in media else len(value)
        elif isinstance(value, (dict, list)):
            count += len(value)
            if count <= enough:
                waiting += value.values() if isinstance(value, dict) else value
            if isinstance(value, dict):
                count += sum(map(len, value))
    return count


def _media(body: Mapping[str, Any]) -> Iterator[str]:
    """Strings that are read as pictures or videos: those of content parts, and nothing that a template could print."""
    for name in _MEDIA_LISTS:
        entries = body.get(name)
        for entry in entries if isinstance(entries, list) else ():
            if name == "system":
                yield from _media_of_part(entry)
            elif isinstance(entry, dict):
                yield from _media_of_parts(entry.get("content"))
                yield from _media_of_parts(entry.get("output"))


def _media_of_parts(parts: Any) -> Iterator[str]:
    for part in parts if isinstance(parts, list) else ():
        yield from _media_of_part(part)
        if isinstance(part, dict):
            yield from _media_of_parts(part.get("content"))  # a tool's result


def _media_of_part(part: Any) -> Iterator[str]:
    for name in _MEDIA_FIELDS if isinstance(part, dict) else ():
        given = part.get(name)
        url = given.get("url") if isinstance(given, dict) else given
        if isinstance(url, str) and url[:5].lower() == "data:":
            yield url
        if name == "source" and isinstance(given, dict) and isinstance(given.get("data"), str):
            yield given["data"]
