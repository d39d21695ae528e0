"""Text as tokens arrive equals the text of all tokens at once, and stop strings never show."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import checkpoints
from saccade.processor.detokenize import Detokenizer
from saccade.processor.tokenizer import Tokenizer
from tests.helpers.media.tokenizers import llama_first

pytestmark = pytest.mark.transformers

MAKERS = {"qwen": checkpoints.qwen_tokenizer, "llama": checkpoints.llama_tokenizer, "llama_first": llama_first}


@pytest.fixture(scope="session", params=list(MAKERS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    MAKERS[request.param]().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("qwen")
    checkpoints.qwen_tokenizer().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def pushed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 470), max_size=40))
def test_any_ids_give_the_text_of_one_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer, ())
    assert "".join(pushed(detokenizer, ids)) == detokenizer.text == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="aé你🙂 \n ▁", max_size=20))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, ())
    assert "".join(pushed(detokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 490), max_size=20), skips=st.booleans())
def test_remembered_pieces_are_what_decoding_beside_the_token_before_gives(
    tokenizer: Tokenizer, ids: list[int], skips: bool
) -> None:
    forgetful = copy(tokenizer)
    forgetful.piece, forgetful.is_bytewise = lambda token_id: None, False
    quick, slow = tokenizer.stream(skips), forgetful.stream(skips)
    assert [quick.push(i) for i in ids] == [slow.push(i) for i in ids]
    assert quick.finish() == slow.finish()


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.sampled_from([*range(94, 260), 172, 94, 94, 94, 600]), max_size=60), ends=st.booleans())
def test_many_broken_characters_in_a_row_give_the_text_of_one_decode(
    qwen: Tokenizer, ids: list[int], ends: bool
) -> None:
    ids = ids + qwen.encode("🙈a" if ends else "🙈", add_special_tokens=False)
    assert "".join(pushed(Detokenizer(qwen, ()), ids)) == qwen.decode(ids)


def test_no_more_tokens_are_decoded_again_than_one_character_may_have(qwen: Tokenizer) -> None:
    broken, sizes = qwen.encode("🙈", add_special_tokens=False)[1], []
    counting = copy(qwen)
    counting.decode = lambda ids, skips=True: sizes.append(len(ids)) or qwen.decode(ids, skips)  # type: ignore[method-assign]
    stream = counting.stream()
    text = "".join([stream.push(broken) for _ in range(100)])
    assert text == "\ufffd" * 99 and max(sizes) <= 6


def test_half_a_character_is_held_back(qwen: Tokenizer) -> None:
    ids = qwen.encode("🙈", add_special_tokens=False)
    assert len(ids) > 1
    detokenizer = Detokenizer(qwen, ())
    assert [detokenizer.push(i) for i in ids] == [""] * (len(ids) - 1) + ["🙈"]


def test_words_come_out_at_once(qwen: Tokenizer) -> None:
    ids = qwen.encode("What is in", add_special_tokens=False)
    detokenizer = Detokenizer(qwen, ())
    assert all(detokenizer.push(i) == qwen.decode([i]) for i in ids)


def test_special_tokens_are_not_shown(qwen: Tokenizer) -> None:
    ids = qwen.encode("a<|im_end|>b")
    assert "".join(pushed(Detokenizer(qwen, ()), ids)) == "ab"


def test_an_unfinished_character_shows_as_a_replacement_at_the_end(qwen: Tokenizer) -> None:
    ids = qwen.encode("a🙈", add_special_tokens=False)[:-1]
    assert "".join(pushed(Detokenizer(qwen, ()), ids)) == "a�"


# --- stop strings -------------------------------------------------------------------------------------------------


def run(tokenizer: Tokenizer, text: str, *stop: str) -> Detokenizer:
    detokenizer = Detokenizer(tokenizer, stop)
    pushed(detokenizer, tokenizer.encode(text, add_special_tokens=False))
    return detokenizer


def test_a_stop_string_ends_the_text_before_it(qwen: Tokenizer) -> None:
    detokenizer = run(qwen, "one END two", "END")
    assert (detokenizer.text, detokenizer.stopped) == ("one ", "END")


def test_a_stop_string_is_found_across_tokens(qwen: Tokenizer) -> None:
    detokenizer = run(qwen, "The quick brown fox", "uick brow")
    assert (detokenizer.text, detokenizer.stopped) == ("The q", "uick brow")


def test_the_beginning_of_a_stop_string_never_shows_too_early(qwen: Tokenizer) -> None:
    detokenizer = Detokenizer(qwen, ["###END"])
    for token_id in qwen.encode("a ##", add_special_tokens=False):
        detokenizer.push(token_id)
    assert detokenizer.text == "a "
    assert detokenizer.finish() == "##"
    assert detokenizer.text == "a ##"


def test_what_only_looked_like_a_stop_string_comes_out(qwen: Tokenizer) -> None:
    detokenizer = run(qwen, "a ##b", "###")
    assert (detokenizer.text, detokenizer.stopped) == ("a ##b", None)


def test_the_stop_string_that_is_complete_first_wins(qwen: Tokenizer) -> None:
    assert run(qwen, "xabcd", "abcd", "bc").stopped == "bc"
    assert run(qwen, "xabcd", "c", "abc").stopped == "abc"


def test_nothing_comes_after_a_stop_string(qwen: Tokenizer) -> None:
    detokenizer = run(qwen, "a STOP", "STOP")
    assert detokenizer.push(qwen.encode("b")[0]) == "" and detokenizer.finish() == ""
    assert detokenizer.text == "a "


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=30), stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)
)
def test_how_tokens_cut_the_text_does_not_matter(qwen: Tokenizer, text: str, stop: list[str]) -> None:
    by_token = Detokenizer(qwen, stop)
    pushed(by_token, qwen.encode(text, add_special_tokens=False))
    by_letter = Detokenizer(qwen, stop)
    pushed(by_letter, [i for letter in text for i in qwen.encode(letter, add_special_tokens=False)])
    assert (by_token.text, by_token.stopped) == (by_letter.text, by_letter.stopped)
    assert not any(s in by_token.text for s in stop)


def test_a_stop_string_can_be_kept_in_the_text(qwen: Tokenizer) -> None:
    detokenizer = Detokenizer(qwen, [" brown"], include_stop=True)
    shown = "".join(detokenizer.push(i) for i in qwen.encode("The quick brown fox"))
    assert shown == "The quick brown" and detokenizer.stopped == " brown"


def test_control_tokens_can_be_shown(qwen: Tokenizer) -> None:
    detokenizer = Detokenizer(qwen, skip_special_tokens=False)
    text = "The quick<|im_end|> fox"
    shown = "".join(detokenizer.push(i) for i in qwen.encode(text)) + detokenizer.finish()
    assert shown == text
