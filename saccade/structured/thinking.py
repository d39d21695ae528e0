"""Thinking before an answer: tells from the tokens where it ends, and ends it when its budget is used up."""

from __future__ import annotations

from typing import Protocol

from saccade.types.request import Thinking


class ReadsTokens(Protocol):
    """The part of llguidance's tokenizer that is needed."""

    def decode_bytes(self, tokens: list[int], /) -> bytes: ...

    def tokenize_bytes(self, utf8bytes: bytes, /) -> list[int]: ...


class ThinkingGate:
    """The state of one output. A marker is one token, or bytes that may begin and end inside of tokens."""

    def __init__(self, thinking: Thinking, tokenizer: ReadsTokens) -> None:
        self.is_open = thinking.is_open  # any token may follow
        self._thinking = thinking
        self._tokenizer = tokenizer
        self._is_first = True
        self._tail = b""  # may hold the beginning of the closing marker

    @property
    def opener(self) -> int | None:
        """A token that may come before the structure: with it the model begins to think."""
        if self.is_open or not self._is_first:
            return None
        return self._thinking.open_id

    def take(self, token: int) -> list[int]:
        """The tokens of the structure in this one: usually all or nothing of it."""
        opener = self.opener
        self._is_first = False
        if self.is_open:
            return self._think(token)
        if token == opener:
            self.is_open = True
            return []
        return [token]

    def _think(self, token: int) -> list[int]:
        if self._thinking.close_id is not None:
            self.is_open = token != self._thinking.close_id
            return []
        close = self._thinking.close.encode()
        text = self._tail + self._tokenizer.decode_bytes([token])
        _, marker, answer = text.partition(close)
        self._tail = text[-len(close) + 1 :]
        self.is_open = not marker
        answer = answer.lstrip()  # such as the brace of a token ">{"
        return self._tokenizer.tokenize_bytes(answer) if answer else []


class ThinkingBudget:
    """Counts the tokens that one output thinks. Its markers must be one token each."""

    def __init__(self, thinking: Thinking, budget: int) -> None:
        self._thinking = thinking
        self._is_open = thinking.is_open
        self._is_first = True
        self._left = budget

    @property
    def forced(self) -> int | None:
        """The next token, where it must be the closing marker."""
        return self._thinking.close_id if self._is_open and self._left <= 0 else None

    def take(self, token: int) -> None:
        if self._is_open:
            self._is_open = token != self._thinking.close_id
            self._left -= 1
        elif self._is_first:
            self._is_open = token == self._thinking.open_id
        self._is_first = False
