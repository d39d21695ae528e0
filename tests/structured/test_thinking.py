"""Structured output after thinking: nothing is held to the structure before the closing marker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade import SamplingParams
from saccade.structured.grammar import Grammar, Grammars
from saccade.structured.thinking import ThinkingBudget, ThinkingGate
from saccade.types.prompt import Prompt
from saccade.types.request import Request, Thinking

SCHEMA = '{"enum": ["ab", "cd"]}'
TEXT = Thinking("<think>", "</think>", is_open=True)
TOKENS = Thinking("<think>", "</think>", is_open=True, open_id=1, close_id=2)
END = 3


class Bytes:
    """A tokenizer in which a token is one to three letters, and single letters are their own ids."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return b"".join(self._pieces[token] for token in tokens)

    def tokenize_bytes(self, text: bytes) -> list[int]:
        return list(text)


@given(data=st.data())
def test_the_marker_is_found_wherever_tokens_begin(data: st.DataObject) -> None:
    before = data.draw(st.text(alphabet="</think> a", max_size=20)).encode()
    after = data.draw(st.sampled_from([b"", b"\n\n", b"{", b"\n[1"]))
    text = before + b"</think>" + after
    cuts = sorted({len(text), *data.draw(st.lists(st.integers(1, len(text)), max_size=12))})
    pieces = [text[a:b] for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]
    gate = ThinkingGate(TEXT, Bytes(*pieces))
    end = text.index(b"</think>") + len(b"</think>")
    read = 0
    for token, piece in enumerate(pieces):
        found = gate.take(token)
        read += len(piece)
        assert gate.is_open == (read < end)
        if not gate.is_open:
            assert bytes(found) == text[end:read].lstrip()
            return


def test_a_marker_that_is_a_token_ends_the_thinking() -> None:
    gate = ThinkingGate(TOKENS, Bytes())
    assert [gate.take(token) for token in (7, 1, 2)] == [[], [], []]
    assert not gate.is_open and gate.take(2) == [2]


def test_a_model_that_begins_to_think_by_itself_may() -> None:
    gate = ThinkingGate(TOKENS._replace(is_open=False), Bytes())
    assert gate.opener == 1 and gate.take(1) == [] and gate.is_open
    assert gate.take(5) == [] and gate.take(2) == [] and gate.opener is None


def test_a_model_that_does_not_think_begins_with_the_structure() -> None:
    gate = ThinkingGate(TOKENS._replace(is_open=False), Bytes())
    assert gate.take(5) == [5] and gate.opener is None
    assert gate.take(1) == [1] and not gate.is_open


# --- a budget of tokens -------------------------------------------------------------------------------------------


def forced(thinking: Thinking, budget: int, tokens: list[int]) -> list[int | None]:
    """Before each token and after the last."""
    counted = ThinkingBudget(thinking, budget)
    found = [counted.forced]
    for token in tokens:
        counted.take(token)
        found.append(counted.forced)
    return found


def test_thinking_is_closed_when_its_budget_is_used_up() -> None:
    assert forced(TOKENS, 2, [7, 8, 2, 9, 9]) == [None, None, 2, None, None, None]
    assert forced(TOKENS, 0, [2, 1]) == [2, None, None]


def test_thinking_that_ends_by_itself_is_left_alone() -> None:
    assert forced(TOKENS, 3, [7, 2, 9, 9, 9]) == [None] * 6


def test_an_output_that_opens_its_thinking_has_the_whole_budget_after_it() -> None:
    may_think = TOKENS._replace(is_open=False)
    assert forced(may_think, 1, [1, 7, 2, 9]) == [None, None, 2, None, None]
    assert forced(may_think, 1, [7, 1, 7, 7]) == [None] * 5  # a marker inside of an answer is none


# --- in the engine ------------------------------------------------------------------------------------------------


@pytest.fixture
def grammars(qwen2_vl_folder: Path) -> Iterator[Grammars]:
    made = Grammars(qwen2_vl_folder, 460)
    yield made
    made.close()


def begun(grammars: Grammars, thinking: Thinking | None) -> Grammar:
    prompt = Prompt([1], (), (), np.zeros((1, 1), np.int32), 1, b"\0" * 40)
    params = SamplingParams(structured=SCHEMA)
    request = Request("r/0", prompt, params, 8, frozenset({END}), 0)
    grammar = grammars.of(replace(request, thinking=thinking))
    assert grammar is not None
    grammar.allowed()  # waits for the first mask
    return grammar


def is_allowed(grammar: Grammar, token: int) -> bool:
    bits = grammar.allowed()
    return bits is None or bool(bits[token // 32] >> (token % 32) & 1)


def test_the_mask_is_off_while_the_output_thinks(grammars: Grammars) -> None:
    grammar = begun(grammars, TEXT)
    tokenize = grammars._tokenizer.tokenize_str
    for token in tokenize("any {words} at all</think"):
        assert grammar.allowed() is None
        grammar.advance(token)
    assert grammar.allowed() is None
    for token in tokenize(">"):
        grammar.advance(token)
    (quote,) = tokenize('"')
    (brace,) = tokenize("{")
    assert is_allowed(grammar, quote) and not is_allowed(grammar, brace)
    for token in tokenize('"ab"'):
        assert is_allowed(grammar, token)
        grammar.advance(token)
    assert grammar.is_complete and grammar.error is None


def test_an_output_may_end_while_it_thinks(grammars: Grammars) -> None:
    grammar = begun(grammars, TEXT)
    grammar.advance(END)
    assert grammar.is_complete


def test_the_opening_marker_is_allowed_once_beside_the_structure(grammars: Grammars) -> None:
    (opener,) = grammars._tokenizer.tokenize_str("{")  # stands for the marker
    (quote,) = grammars._tokenizer.tokenize_str('"')
    thinking = Thinking("{", "}", is_open=False, open_id=opener, close_id=quote + 1)
    grammar = begun(grammars, thinking)
    assert is_allowed(grammar, opener) and is_allowed(grammar, quote)
    grammar.advance(opener)
    assert grammar.allowed() is None
    grammar.advance(quote + 1)
    assert is_allowed(grammar, quote) and not is_allowed(grammar, opener)
