"""Text that arrives in pieces, read as if all of it were there.

A parser is a generator: `yield from reader.peek()` waits until there is more text. So what is read does not
depend on where the text was cut. Nothing is looked at twice, and only what is undecided stays in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from typing import Literal, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A parser, which yields when it needs more text, and what it returns."""
Emit = Callable[[str], None]

_SPACE = re.compile(r"\s+")
_MAX_NAME = 256


Problem = Literal["syntax", "incomplete", "unknown_tool", "schema"]
"""What is wrong with a call: it does not follow its dialect, the output ended inside of it, nobody offered
such a tool, or its arguments do not follow the tool's schema."""


def any_of(tokens: Iterable[str]) -> str:
    """A pattern of these tokens, longest first as the tokenizer matches; for none, of nothing."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"


class Unreadable(Exception):
    """The text is no call. The reason is None if it does not even look like one."""

    def __init__(self, reason: Problem | None = "syntax") -> None:
        self.reason: Problem | None = reason

    @staticmethod
    def before(letter: str) -> Unreadable:
        """By the next letter of the text: none comes where it has ended."""
        return Unreadable("syntax" if letter else "incomplete")


class TextReader:
    def __init__(self) -> None:
        self.is_ended = False
        self._text = ""
        self._at = 0  # what is before this has been read
        self._noted: list[str] = []  # what was read since `note`
        self._notes = False

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self.is_ended = True

    def note(self, before: str) -> None:
        """Keep what is read from here on, in case that it is no call after all."""
        self._noted = [before]
        self._notes = True

    def noted(self) -> str:
        """What was read since `note`, which ends here."""
        read = "".join(self._noted)
        self._noted = []
        self._notes = False
        return read

    def peek(self, count: int = 1) -> Reading[str]:
        """The next letters without reading them: fewer at the end of the text."""
        while len(self._text) - self._at < count and not self.is_ended:
            yield
        return self._text[self._at : self._at + count]

    def skip(self, count: int) -> str:
        """Read letters that are known to be there."""
        read = self._text[self._at : self._at + count]
        self._at += count
        if self._notes:
            self._noted.append(read)
        return read

    def skips(self, marker: str) -> Reading[bool]:
        """Read `marker` if it comes next."""
        for count in range(1, len(marker) + 1):  # not at once: text that is something else must not wait
            if (yield from self.peek(count)) != marker[:count]:
                return False
        self.skip(len(marker))
        return True

    def expect(self, marker: str) -> Reading[None]:
        if not (yield from self.skips(marker)):
            raise Unreadable("incomplete" if self._is_at_end() else "syntax")

    def _is_at_end(self) -> bool:
        return self.is_ended and self._at == len(self._text)

    def copy_while(self, letters: re.Pattern[str], emit: Emit) -> Reading[None]:
        """Pass on what matches. `letters` is a run of single letters, such as `[a-z]+`."""
        while True:
            match = letters.match(self._text, self._at)
            if match:
                emit(self.skip(match.end() - self._at))
            if self._at < len(self._text) or self.is_ended:
                return
            yield

    def skip_space(self) -> Reading[None]:
        yield from self.copy_while(_SPACE, _drop)

    def copy_until(self, markers: Sequence[str], emit: Emit) -> Reading[str]:
        """Pass on the text before the first marker, read that and return it; "" where the text ends first."""
        pattern, heads = _search(tuple(markers))
        while True:
            match = pattern.search(self._text, self._at)
            if match:
                self._pass(match.start(), emit)
                return self.skip(len(match[0]))
            if self.is_ended:
                self._pass(len(self._text), emit)
                return ""
            self._pass(len(self._text) - self._undecided(heads), emit)
            yield

    def copy_rest(self, emit: Emit) -> Reading[None]:
        while True:
            self._pass(len(self._text), emit)
            if self.is_ended:
                return
            yield

    def _pass(self, end: int, emit: Emit) -> None:
        if end > self._at:
            emit(self.skip(end - self._at))

    def _undecided(self, heads: frozenset[str]) -> int:
        """Letters at the end that may be the beginning of a marker."""
        longest = max(map(len, heads), default=0)
        for count in range(min(longest, len(self._text) - self._at), 0, -1):
            if self._text[len(self._text) - count :] in heads:
                return count
        return 0

    def name_until(self, markers: Sequence[str]) -> Reading[tuple[str, str]]:
        """A short name and the marker that ends it. A longer one is not read."""
        pattern, _ = _search(tuple(markers))
        window = _MAX_NAME + max(map(len, markers))
        while True:
            match = pattern.search(self._text, self._at, self._at + window)
            if match:
                return self.skip(match.start() - self._at).strip(), self.skip(len(match[0]))
            if len(self._text) - self._at >= window:
                raise Unreadable
            if self.is_ended:
                self._pass(len(self._text), _drop)
                raise Unreadable("incomplete")
            yield


def _drop(_: str) -> None:
    pass


@lru_cache(maxsize=64)
def _search(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str]]:
    """A pattern of the markers, and their beginnings. No marker may begin another one."""
    heads = frozenset(marker[:count] for marker in markers for count in range(1, len(marker)))
    return re.compile("|".join(map(re.escape, markers))), heads
