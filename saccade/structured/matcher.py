"""Follows one answer that must follow a JSON schema: which tokens may come next. Knows neither logits nor threads.

Taking a token is quick and done in the step; the mask for the next one may take long and is made by whoever
`hand_over` brings it to. A schema that becomes too costly on the way puts its own grammar into an error, nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from saccade.errors import RequestError
from saccade.structured.schema import is_available
from saccade.structured.time_budget import Budget

if is_available():
    from llguidance import LLMatcher, LLTokenizer
    from llguidance.numpy import fill_next_token_bitmask

Bits = npt.NDArray[np.int32]
"""One bit per token of the vocabulary, 32 to a word, lowest first."""


class Template(NamedTuple):
    """A compiled schema. Answers get copies; it stays as it is."""

    matcher: LLMatcher
    tokenizer: LLTokenizer


class Grammar:
    """`allowed`, then `advance` with the token that was chosen, and so on. `begin` and `make_mask` in other threads."""

    def __init__(self, end_ids: frozenset[int], budget: Budget, hand_over: Callable[[Grammar], None]) -> None:
        self._ends = end_ids
        self._budget = budget
        self._hand_over = hand_over  # sees to it that `make_mask` is called
        self._matcher: LLMatcher | None = None
        self._bits: Bits | None = None
        self._is_made = threading.Event()
        self._has_ended = False
        self.error: RequestError | None = None

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        return self._has_ended

    def allowed(self) -> Bits | None:  # [words]
        """The tokens that may come next; end tokens among them where the answer may end. None after an error."""
        self._is_made.wait()
        return self._bits

    def must_end(self, bits: Bits) -> bool:
        """Whether only end tokens are left."""
        rest = bits.copy()
        _clear(rest, self._end_ids)
        return not rest.any()

    def advance(self, token: int) -> None:
        if token in self._ends:
            self._has_ended = True
            return
        if self._matcher is None or self.error:
            return
        with self._budget.step.spending():
            self._matcher.consume_token(token)
        self._budget.step.earn()
        self._budget.masks.earn()
        if self._matcher.is_error():
            self.fail(too_complex())
        elif self._budget.step.is_spent:
            self.fail(_too_costly())
        elif self._matcher.is_stopped():
            self._has_ended = True
        else:
            self._is_made.clear()
            self._hand_over(self)

    def begin(self, template: Template) -> None:
        vocabulary = template.tokenizer.vocab_size
        self._words = -(-vocabulary // 32)
        self._library_ends = np.array(template.tokenizer.eos_tokens, np.int64)
        self._end_ids = np.array(sorted(end for end in self._ends if end < vocabulary), np.int64)
        with self._budget.masks.spending():
            self._matcher = template.matcher.deep_copy()
        self.make_mask()

    def make_mask(self) -> None:
        matcher = self._matcher
        if matcher is None:  # the request has ended
            return
        if self._budget.masks.is_spent:
            self.fail(_too_costly())
            return
        with self._budget.masks.spending():
            bits = self._mask(matcher)
        if bits is None:
            self.fail(too_complex())
        else:
            self._bits = bits
            self._is_made.set()

    def release(self) -> None:
        """The request has ended: its memory goes with whoever used it last."""
        self._matcher = None

    def fail(self, error: RequestError) -> None:
        self.error = self.error or error
        self._bits = None
        self._is_made.set()

    def _mask(self, matcher: LLMatcher) -> Bits | None:
        bits = np.zeros(self._words, np.int32)
        fill_next_token_bitmask(matcher, bits[None])
        if matcher.is_error():
            return None
        # The library knows one end token, the request its own ones, or none.
        _clear(bits, self._library_ends)
        if matcher.is_accepting():
            _set(bits, self._end_ids)
        return bits


def too_complex() -> RequestError:
    return _refusal("the answer cannot be held to this JSON schema, which is too complex; make it simpler")


def _too_costly() -> RequestError:
    return _refusal("the answers were held to a JSON schema that takes more than its share of time; make it simpler")


def _refusal(message: str) -> RequestError:
    return RequestError(message, code="invalid_json_schema", param="response_format")


def _set(bits: Bits, tokens: npt.NDArray[np.int64]) -> None:
    words = bits.view(np.uint32)
    np.bitwise_or.at(words, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))


def _clear(bits: Bits, tokens: npt.NDArray[np.int64]) -> None:
    words = bits.view(np.uint32)
    np.bitwise_and.at(words, tokens // 32, ~(np.uint32(1) << (tokens % 32).astype(np.uint32)))
