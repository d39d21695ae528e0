"""Tokenizers from a list of ranks: the ids of merging one pair at a time, and what such a file leaves unsaid."""

from __future__ import annotations

import base64
import json
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import checkpoints
from saccade.checkpoint.tokenizer_json import added_tokens, merges_of, read_tokenizer
from saccade.errors import ConfigError
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.tokenizer import Tokenizer
from saccade.sampling_params import SamplingParams
from saccade.structured.grammar import Grammars
from saccade.types.prompt import Prompt
from saccade.types.request import Request
from tests.helpers.families import family_qwen_vl
from tests.helpers.families.family_qwen_vl import CONTROL, MARKS, SlowTokenizer, train_ranks

pytestmark = pytest.mark.transformers

WORDS = [
    "the",
    " quick",
    "'s",
    "'LL",
    " 12",
    "naïve",
    "e\u0301",
    "你好",
    "🙂",
    "\r\n",
    "  ",
    "\t",
    " \n\n",
    "?!",
    "<ref>",
]
pieces = st.one_of(
    st.sampled_from([*WORDS, "<|im_end|>", "<img>", "<|extra_204|>"]),
    st.text(st.characters(max_codepoint=0x24F), max_size=4),
    st.text("aeiou dog.\n'", max_size=8),
)
texts = st.lists(pieces, max_size=12).map("".join)


def write(folder: Path, ranks: dict[bytes, int], *, sees: bool = True) -> Path:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "qwen.tiktoken").write_text("".join(lines))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen", **({"visual": {"width": 8}} if sees else {})})
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("ranks"), train_ranks())


@pytest.fixture(scope="module")
def made(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(read_tokenizer(folder))


# --- ids ----------------------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(text=texts)
def test_ids_are_those_of_merging_one_pair_at_a_time(folder: Path, made: tokenizers.Tokenizer, text: str) -> None:
    assert made.encode(text).ids == SlowTokenizer(folder).encode(text)


@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_ids_become_the_text_again(made: tokenizers.Tokenizer, text: str) -> None:
    assert made.decode(made.encode(text).ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def merged(word: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    parts = [bytes([b]) for b in word]
    while joined := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        at = min(joined)[1]
        parts = [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]
    return parts


def trained(words: list[bytes], size: int) -> dict[bytes, int]:
    """Ranks as they come about: what stands side by side most often becomes the next token."""
    ranks = {bytes([b]): b for b in range(256)}
    while len(ranks) < size:
        found = Counter(a + b for word in words for a, b in pairwise(merged(word, ranks)))
        if not found:
            break
        ranks[max(found, key=lambda token: (found[token], token))] = len(ranks)
    return ranks


@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.text("ab", min_size=2, max_size=9), min_size=1, max_size=6),
    asked=st.text("ab", min_size=1, max_size=14),
    size=st.integers(256, 275),
)
def test_merges_are_recovered_from_any_ranks_that_training_gives(words: list[str], asked: str, size: int) -> None:
    ranks = trained([word.encode() for word in words], size)
    merges = merges_of(ranks)
    assert [left + right for left, right in merges] == [token for token in ranks if len(token) > 1]
    letters = {token: "".join(map(chr, token)) for token in ranks}
    model = tokenizers.models.BPE(
        {letters[token]: rank for token, rank in ranks.items()}, [(letters[a], letters[b]) for a, b in merges]
    )
    assert [token.id for token in model.tokenize(asked)] == [ranks[part] for part in merged(asked.encode(), ranks)]


# --- what the file leaves unsaid ----------------------------------------------------------------------------------


def test_control_tokens_stand_behind_the_ranks(folder: Path, made: tokenizers.Tokenizer) -> None:
    first = len(train_ranks())
    assert [made.token_to_id(token) for token in [*CONTROL, *MARKS]] == list(range(first, first + 217))


def test_a_model_without_a_tower_reads_marks_as_text(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_str(read_tokenizer(write(tmp_path, train_ranks(), sees=False)))
    assert made.get_vocab_size() == len(train_ranks()) + len(CONTROL)
    assert len(made.encode("<box>").ids) > 1


def test_marks_are_shown_in_answers_and_may_be_sent_but_images_cannot_be_forged(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("<ref>the dog</ref><box>(1,2),(3,4)</box><|im_end|>")
    assert tokenizer.decode(ids) == "<ref>the dog</ref><box>(1,2),(3,4)</box>"
    sent = tokenizer.encode_template("<img>" + tokenizer.shield("<ref>a</ref><img><imgpad>"))
    names = [tokenizer.token(i) for i in sent]
    assert names.count("<ref>") == 1 and names.count("<img>") == 1 and "<imgpad>" not in names


def test_a_tokenizer_json_beside_it_is_read_instead(tmp_path: Path) -> None:
    write(tmp_path, train_ranks())
    checkpoints.qwen_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).token_id("<|vision_start|>") is not None


def test_answers_are_held_to_a_schema_with_such_a_tokenizer(folder: Path) -> None:
    size, tokenizer = len(train_ranks()) + 217, Tokenizer(folder)
    params = SamplingParams(structured='{"enum": [7]}')
    prompt = Prompt([1], (), (), np.zeros((1, 1), np.int32), 1, b"\0" * 40)
    request = Request("r", prompt, params, 8, frozenset({len(train_ranks())}), 0)
    grammar = Grammars(folder, size).of(request)
    assert grammar is not None
    bits = grammar.allowed()
    assert bits is not None
    allowed = {i for i in range(size) if bits[i // 32] >> (i % 32) & 1}
    assert tokenizer.token_id("7") in allowed and tokenizer.token_id("a") not in allowed


@pytest.mark.parametrize("content", ["no base64 at all", "IQ==", "IQ== x", "I 1"])
def test_a_file_that_holds_no_ranks_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "qwen.tiktoken").write_text(content)
    with pytest.raises(ConfigError, match=r"qwen\.tiktoken cannot be read as ranks"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda ranks: {}, "has 0 of them, the last ranked None, and lacks 256"),
        (lambda ranks: {t: r for t, r in ranks.items() if r != 300}, "435 of them, the last ranked 435, and lacks 0"),
        (lambda ranks: {t: r for t, r in ranks.items() if r < 200}, "lacks 56 of the 256 bytes"),
        (lambda ranks: {**ranks, b"zzzq": 3}, "437 of them, the last ranked 435"),
        (lambda ranks: {**ranks, b"zzzq": 9000}, "the last ranked 9000"),
    ],
    ids=["empty", "gap", "bytes", "twice", "beyond"],
)
def test_ranks_that_are_not_whole_are_refused_because_control_tokens_would_move(
    tmp_path: Path, spoil: Callable[[dict[bytes, int]], dict[bytes, int]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_tokenizer(write(tmp_path, spoil(train_ranks())))


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens": [3]}', '{"added_tokens": [{"id": "x"}]}'])
def test_added_tokens_of_a_broken_file_are_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        added_tokens(tmp_path / "tokenizer.json")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        read_tokenizer(tmp_path)


def test_another_list_of_ranks_changes_the_checkpoints_fingerprint(tmp_path: Path) -> None:
    first = open_checkpoint(str(family_qwen_vl.build(tmp_path))).fingerprint
    lines = (tmp_path / "qwen.tiktoken").read_text().splitlines()
    (tmp_path / "qwen.tiktoken").write_text("\n".join(lines[:-1]))
    assert open_checkpoint(str(tmp_path)).fingerprint != first
