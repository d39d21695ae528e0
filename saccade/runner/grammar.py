"""Which tokens may come next in an answer that must follow a JSON schema. One grammar per request; knows no logits.

A schema that cannot be compiled, or becomes too costly on the way, puts its own grammar into an error and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from saccade.schema import UNAVAILABLE, grammar_of, is_available, limits
from saccade.tokenizer_file import read_tokenizer
from saccade.types import Request, RequestError

if is_available():
    from llguidance import LLMatcher, LLTokenizer
    from llguidance.numpy import fill_next_token_bitmask

Bits = npt.NDArray[np.int32]
"""One bit per token of the vocabulary, 32 to a word, lowest first."""


class Grammars:
    """Makes grammars for one tokenizer, which is read when the first one is wanted: that takes a second or three.

    Meanwhile nothing else runs in the process, not even a thread, so a server asks for one before it is ready.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size

    @property
    def problem(self) -> str | None:
        """Why there are none, for the start-up log."""
        return None if is_available() else UNAVAILABLE

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(read_tokenizer(self._folder), n_vocab=self._vocab_size)

    def start(self, request: Request, output: Sequence[int]) -> Grammar | None:
        """The grammar of a request after the tokens it has already; None if its answer is free."""
        schema = request.params.structured
        if schema is None:
            return None
        if not is_available():
            return Grammar(None, 0, (), frozenset())
        try:
            matcher = LLMatcher(self._tokenizer, grammar_of(schema), log_level=0, limits=limits())
        except ValueError:  # no JSON, or a tokenizer the library cannot read
            return Grammar(None, 0, (), frozenset())
        tokenizer = self._tokenizer
        grammar = Grammar(matcher, tokenizer.vocab_size, tokenizer.eos_tokens, request.eos_token_ids)
        for token in output:
            grammar.advance(token)
        return grammar


class Grammar:
    """Follows one answer. `allowed`, then `advance` with the token that was chosen, and so on."""

    def __init__(
        self, matcher: LLMatcher | None, vocab_size: int, library_ends: Sequence[int], end_ids: frozenset[int]
    ) -> None:
        self._matcher = matcher  # None: there is nothing to match with, which is an error like any other
        self._words = -(-vocab_size // 32)
        self._library_ends = np.array(library_ends, np.int64)
        self._end_ids = np.array(sorted(end for end in end_ids if end < vocab_size), np.int64)
        self._has_ended = False

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        return self._has_ended or (self._matcher is not None and self._matcher.is_stopped())

    @property
    def error(self) -> RequestError | None:
        if self._matcher is not None and not self._matcher.is_error():
            return None
        if not is_available():
            return RequestError(UNAVAILABLE, code="unsupported", param="response_format")
        return RequestError(
            "the answer cannot be held to this JSON schema, which is too complex; make it simpler",
            code="invalid_json_schema",
            param="response_format",
        )

    def allowed(self) -> Bits | None:  # [words]
        """The tokens that may come next; end tokens among them where the answer may end. None after an error."""
        if self._matcher is None or self._matcher.is_error():
            return None
        bits = np.zeros(self._words, np.int32)
        fill_next_token_bitmask(self._matcher, bits[None])
        if self._matcher.is_error():
            return None
        # The library knows one end token, the request its own ones, or none.
        _clear(bits, self._library_ends)
        if self._matcher.is_accepting():
            _set(bits, self._end_ids)
        return bits

    def must_end(self, bits: Bits) -> bool:
        """Whether only end tokens are left."""
        rest = bits.copy()
        _clear(rest, self._end_ids)
        return not rest.any()

    def advance(self, token: int) -> None:
        if token in self._end_ids:
            self._has_ended = True
        elif self._matcher is not None:
            self._matcher.consume_token(token)


def _set(bits: Bits, tokens: npt.NDArray[np.int64]) -> None:
    words = bits.view(np.uint32)
    np.bitwise_or.at(words, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))


def _clear(bits: Bits, tokens: npt.NDArray[np.int64]) -> None:
    words = bits.view(np.uint32)
    np.bitwise_and.at(words, tokens // 32, ~(np.uint32(1) << (tokens % 32).astype(np.uint32)))
