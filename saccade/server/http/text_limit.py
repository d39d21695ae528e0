"""Limits the text of a body: an estimate while it arrives, an exact count once parsed. Skips data URLs.

Text that cannot fit the context is refused before it is parsed, rendered or tokenized. These hold the GIL and
would delay the tokens of all other requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from saccade.errors import RequestError
from saccade.server.errors import ApiError

MAX_VALUES = 2_000_000
"""Commas outside of data URLs: enough for every token id of a large batch of prompts."""
_MAX_STRINGS = 250_000  # with keys: each costs several times the memory of a number
_MAX_CONTAINERS = 100_000  # lists and objects: more again
_CHARS_PER_CONTAINER = 16  # for long contexts: brackets inside of strings are counted too
_MIN_BYTES = 16 << 20  # are parsed in about the time of a step
_BYTES_PER_CHAR = 6  # \u00e9

# A data URL, Anthropic's field `data`, or OpenAI's `file_data`.
_MEDIA_START = re.compile(rb'"(?:data:|(?:file_)?data"\s*:\s*")', re.IGNORECASE)
_OVERLAP = 32  # bytes of a chunk in which a match may begin and not end

_MEDIA_LISTS = ("messages", "input", "system")
_MEDIA_FIELDS = ("image_url", "video_url", "image", "video", "source")
_ID_FIELDS = ("prompt", "tokens")  # lists of ids or prompts have their own limits


class TextTally:
    """Counts a body chunk by chunk. Text that looks like a data URL is left to `check_text`."""

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
        """ApiError if the body is larger than any request of this model needs."""
        data = self._rest + chunk
        self._rest = b""
        start = 0
        while start < len(data):
            start = self._skip_media(data, start) if self._is_media else self._count_text(data, start)
        self._check()

    def _skip_media(self, data: bytes, start: int) -> int:
        end = data.find(b'"', start)
        self._is_media = end < 0
        return len(data) if end < 0 else end

    def _count_text(self, data: bytes, start: int) -> int:
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
            size = f"the body has more than {self._max_bytes} bytes beside its pictures"
            message = f"{size}, more than the context can hold; send less text or raise --max-model-len"
            raise ApiError(400, message, code="context_length_exceeded")
        is_large = self._values > MAX_VALUES or self._quotes > 2 * _MAX_STRINGS
        if is_large or self._containers > self._max_containers:
            values = f"{MAX_VALUES} values, {_MAX_STRINGS} strings or {self._max_containers} lists"
            message = f"the body holds more than {values} and objects; send a smaller request"
            raise ApiError(400, message, code="request_too_large")


def check_text(body: Mapping[str, Any], limit: int) -> None:
    """RequestError if the strings and keys of a body have more than `limit` characters.

    Other values count as one character. Data URLs count only where no image can be.
    """
    media = {id(text) for text in _media(body)}
    count = 0
    for name, value in body.items():
        if name in _ID_FIELDS and isinstance(value, list):
            continue
        count += len(name) + _num_chars(value, media, limit - count)
        check_chars(count, limit, name[:64])


def check_chars(count: int, limit: int, param: str) -> None:
    """Refuses text that cannot fit the context, before it is tokenized."""
    if count > limit:
        size = f"the request has more than {limit} characters of text"
        message = f"{size}, more than the context can hold; send less or raise --max-model-len"
        raise RequestError(message, code="context_length_exceeded", param=param)


def _num_chars(value: Any, media: set[int], enough: int) -> int:
    """Stops above `enough`, so that counting takes no longer than the limit allows."""
    count = 0
    waiting = [value]
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
    """Strings of content parts that are read as images, videos or PDFs. A template never prints these."""
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
            yield from _media_of_parts(part.get("content"))  # of a tool result


def _media_of_part(part: Any) -> Iterator[str]:
    yield from _file_data(part)
    for name in _MEDIA_FIELDS if isinstance(part, dict) else ():
        given = part.get(name)
        url = given.get("url") if isinstance(given, dict) else given
        if isinstance(url, str) and url[:5].lower() == "data:":
            yield url
        if name == "source" and isinstance(given, dict) and isinstance(given.get("data"), str):
            yield from [given["data"]] if given.get("type") != "text" else []


def _file_data(part: Any) -> Iterator[str]:
    """Of a chat's file part, or of the Responses API's input_file."""
    file = part.get("file", part) if isinstance(part, dict) else None
    data = file.get("file_data") if isinstance(file, dict) else None
    if isinstance(data, str) and part.get("type") in ("file", "input_file"):
        yield data
