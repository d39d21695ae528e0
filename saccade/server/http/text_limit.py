"""Counts the text of a body while it arrives, without data URLs.

What cannot fit the context is refused before it is parsed, rendered or tokenized. These hold the GIL and
would delay the tokens of all other requests. The counts say, too, how a body must be checked (`body_check`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from saccade.server.errors import ApiError
from saccade.server.http.body_check import MAX_DEPTH, BodyLimits

MAX_VALUES = 2_000_000
"""Commas outside of data URLs: enough for every token id of a large batch of prompts."""
_MIN_VALUES = 100_000  # for routes without token ids, where a context of few tokens is served
_MAX_STRINGS = 250_000  # with keys: each costs several times the memory of a number
_MAX_CONTAINERS = 100_000  # lists and objects: more again
_CHARS_PER_CONTAINER = 16  # for long contexts: brackets inside of strings are counted too
_MIN_BYTES = 16 << 20  # are parsed in about the time of a step
_BYTES_PER_CHAR = 6  # \u00e9

# A data URL, Anthropic's field `data`, or OpenAI's `file_data`.
_MEDIA_START = re.compile(rb'"(?:data:|(?:file_)?data"\s*:\s*")', re.IGNORECASE)
_OVERLAP = 32  # bytes of a chunk in which a match may begin and not end

# Up to these, decoding and checking take a few milliseconds.
_LIGHT_BYTES = 2 << 20
_LIGHT_VALUES = 20_000  # commas, brackets and pairs of quotes
_LARGE_BODY = 8 << 20  # with its media


class TextTally:
    """Counts a body chunk by chunk. Text that looks like a data URL is left to `body_check`."""

    def __init__(self, max_chars: int, inputs: Sequence[str] | None = None) -> None:
        """`inputs`: fields of the route with token ids or several prompts; None: any field may be one."""
        self.limits = BodyLimits(max_chars, tuple(inputs or ()))
        self._max_bytes = max(_MIN_BYTES, max_chars * _BYTES_PER_CHAR)
        has_inputs = inputs is None or bool(inputs)
        self._max_values = MAX_VALUES if has_inputs else min(MAX_VALUES, max(_MIN_VALUES, max_chars))
        self._max_containers = max(_MAX_CONTAINERS, max_chars // _CHARS_PER_CONTAINER)
        self._total = 0  # with media
        self._rest = b""
        self._is_media = False
        self._bytes = 0
        self._values = 0
        self._quotes = 0
        self._containers = 0

    def take(self, chunk: bytes) -> None:
        """ApiError if the body is larger than any request of this model needs."""
        self._total += len(chunk)
        data = self._rest + chunk
        self._rest = b""
        start = 0
        while start < len(data):
            start = self._skip_media(data, start) if self._is_media else self._count_text(data, start)
        self._check()

    @property
    def is_checked(self) -> bool:
        """The body is so small that it breaks no limit of `body_check`, whatever it says."""
        return self._total <= self.limits.max_chars and self._containers + len(self._rest) <= MAX_DEPTH

    @property
    def is_heavy(self) -> bool:
        """To be checked where it delays no other request."""
        values = self._values + self._containers + self._quotes // 2
        return self._bytes > _LIGHT_BYTES or values > _LIGHT_VALUES

    @property
    def is_large(self) -> bool:
        return self.is_heavy or self._total > _LARGE_BODY

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
        if self._values > self._max_values and self._max_values < MAX_VALUES:
            message = f"the body has more than {self._max_values} values, more than the context can hold"
            advice = "send less or raise --max-model-len"
            raise ApiError(400, f"{message}; {advice}", code="context_length_exceeded")
        has_many = self._values > MAX_VALUES or self._quotes > 2 * _MAX_STRINGS
        if has_many or self._containers > self._max_containers:
            values = f"{MAX_VALUES} values, {_MAX_STRINGS} strings or {self._max_containers} lists"
            message = f"the body holds more than {values} and objects; send a smaller request"
            raise ApiError(400, message, code="request_too_large")
