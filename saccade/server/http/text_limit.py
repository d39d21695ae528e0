"""Counts the text of a body while it arrives, without data URLs.

What cannot fit the context is refused before it is parsed, rendered or tokenized. These hold the GIL and
would delay the tokens of all other requests. The counts say, too, how a body must be checked (`body_check`).
"""

from __future__ import annotations

import operator
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

# A data URL, Anthropic's field `data`, or OpenAI's `file_data`, in small letters, and what follows. It begins
# with a word, which is rarer than a quote.
_MEDIA = re.compile(rb'(data(?:(?<="data):|(?:(?<="data)|(?<="file_data))"\s*:\s*"))([^"]*)')
_OVERLAP = 32  # bytes of a chunk in which a match may begin and not end
_NOT_ASCII = re.compile(rb"\\u(?!00[0-7])....", re.DOTALL)  # .NET writes + as \u002B
_ESCAPE = 5  # bytes of it that a chunk may end with
# A try to match costs as much as to count so many bytes. A body with more of the word is text.
_BYTES_PER_TRY = 64
_FREE_TRIES = 4096

# Up to these, decoding and checking take a few milliseconds.
_LIGHT_BYTES = 2 << 20
_LIGHT_VALUES = 20_000  # brackets and pairs of quotes
_LIGHT_NUMBERS = 100_000  # commas
_LARGE_BODY = 8 << 20  # with its media


class TextTally:
    """Counts a body with a few calls for each chunk. Text that looks like a data URL is left to `body_check`.

    A data URL is ASCII. A string that is not is text from its first byte on: it takes longer to decode.
    """

    def __init__(self, max_chars: int, inputs: Sequence[str] | None = None) -> None:
        """`inputs`: fields of the route with token ids or several prompts; None: any field may be one."""
        self.limits = BodyLimits(max_chars, tuple(inputs or ()))
        self._max_bytes = max(_MIN_BYTES, max_chars * _BYTES_PER_CHAR)
        self._max_values = MAX_VALUES
        if inputs is not None and not inputs:
            self._max_values = min(MAX_VALUES, max(_MIN_VALUES, max_chars))
        self._max_containers = max(_MAX_CONTAINERS, max_chars // _CHARS_PER_CONTAINER)
        self._total = 0  # with media
        self._rest = b""  # looked at again with the next chunk
        self._is_media = False  # the chunk ends in a string of media
        self._skipped = 0  # bytes of that string
        self._num_tries = 0
        self._bytes = 0
        self._values = 0
        self._quotes = 0
        self._containers = 0

    def take(self, chunk: bytes) -> None:
        """ApiError if the body is larger than any request of this model needs."""
        self._total += len(chunk)
        data = self._rest + chunk
        self._rest = b""
        if self._is_media:
            data = self._skip_media(data)
        if data:
            self._count(data)
        self._check()

    @property
    def is_checked(self) -> bool:
        """The body is so small that it breaks no limit of `body_check`, whatever it says."""
        return self._total <= self.limits.max_chars and self._containers + len(self._rest) <= MAX_DEPTH

    @property
    def is_heavy(self) -> bool:
        """The body must be checked where it delays no other request."""
        values = self._containers + self._quotes // 2
        return any((self._values > _LIGHT_NUMBERS, values > _LIGHT_VALUES, self._bytes > _LIGHT_BYTES))

    @property
    def is_large(self) -> bool:
        return self.is_heavy or self._total > _LARGE_BODY

    def _skip_media(self, data: bytes) -> bytes:
        """What comes after the media that `data` begins with: all of it, if they turn out to be text."""
        media, quote, _ = data.partition(b'"')
        if _is_text(media):
            self._bytes += self._skipped
            self._is_media = False
            return data
        self._is_media = not quote
        self._rest = media[-_ESCAPE:] if self._is_media else b""
        self._skipped += len(media) - len(self._rest)
        return data[len(media) :]

    def _count(self, data: bytes) -> None:
        """Counts from a place that is not in media."""
        *pieces, tail = self._split(data.lower())
        if pieces and not tail:
            self._skipped = 0
            tail = self._skip_media(pieces.pop())
        else:
            self._rest = tail[-_OVERLAP:]
            self._num_tries -= self._rest.count(b"data")  # they are counted again
            tail = tail[:-_OVERLAP]
        media = b"".join(pieces[2::3])
        if _is_text(media):
            self._bytes += len(media)
        del pieces[2::3]
        text = b"".join((*pieces, tail))
        self._bytes += len(text)
        self._values += text.count(b",")
        self._quotes += text.count(b'"') - text.count(b'\\"')
        self._containers += text.count(b"{") + text.count(b"[")

    def _split(self, data: bytes) -> list[bytes]:
        """Text, the start of media, media, and so on; text at the end."""
        tries = data.count(b"data")
        self._num_tries += tries
        is_text = not tries or self._num_tries > _FREE_TRIES + self._total // _BYTES_PER_TRY
        return [data] if is_text else _MEDIA.split(data)

    def _check(self) -> None:
        if self._bytes > self._max_bytes:
            size = f"the body has more than {self._max_bytes} bytes beside its pictures"
            message = f"{size}, more than the context can hold; send less text or raise --max-model-len"
            raise ApiError(400, message, code="context_length_exceeded")
        if self._max_values < min(self._values, MAX_VALUES):
            message = f"the body has more than {self._max_values} values, more than the context can hold"
            advice = "send less or raise --max-model-len"
            raise ApiError(400, f"{message}; {advice}", code="context_length_exceeded")
        counts = (self._values, self._quotes, self._containers)
        limits = (MAX_VALUES, 2 * _MAX_STRINGS, self._max_containers)
        if any(map(operator.gt, counts, limits)):
            values = f"{MAX_VALUES} values, {_MAX_STRINGS} strings or {self._max_containers} lists"
            message = f"the body holds more than {values} and objects; send a smaller request"
            raise ApiError(400, message, code="request_too_large")


def _is_text(media: bytes) -> bool:
    if not media.isascii():
        return True
    return b"\\" in media and _NOT_ASCII.search(media) is not None
