"""Incremental detokenization with stop strings. Half characters and half stop strings are held back."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.processor.tokenizer import Tokenizer


class Detokenizer:
    """Text of one output. `text` is what may be shown so far; `stopped` is the stop string that ended it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._stream = tokenizer.stream(skip_special_tokens, shown_ids)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self.text = ""
        self._held = ""  # may be the beginning of a stop string
        self.stopped: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Return the new text that is final. `may_stop=False` ignores stop strings (min_tokens)."""
        if self.stopped is not None:
            return ""
        new = self._stream.push(token_id)
        return self._take(new) if may_stop else self._show(new)

    def finish(self) -> str:
        """No token follows: return the text that was held back."""
        if self.stopped is not None:
            return ""
        new = self._take(self._stream.finish())
        tail = self._held
        self._held = ""
        return new + self._show(tail)

    def _take(self, new: str) -> str:
        if not new or not self._stop:
            return self._show(new)
        text = self._held + new
        stop = self._first_stop(text)
        if stop is not None:
            self.stopped = stop
            self._held = ""
            end = text.index(stop) + (len(stop) if self._include_stop else 0)
            return self._show(text[:end])
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return self._show(text[: len(text) - keep])

    def _show(self, text: str) -> str:
        self.text += text
        return text

    def _first_stop(self, text: str) -> str | None:
        """The stop string that ends first, so that the result does not depend on token boundaries."""
        ends = ((text.index(s) + len(s), -len(s), s) for s in self._stop if s in text)
        _, _, stop = min(ends, default=(0, 0, None))
        return stop

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
