"""The same ids as Transformers, and no control token from a client's text."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import checkpoints
from saccade.errors import ConfigError, RequestError
from saccade.processor.tokenizer import Tokenizer
from tests.helpers.media.tokenizers import llama_first

pytestmark = pytest.mark.transformers


def nfkc() -> tokenizers.Tokenizer:
    """Full-width characters become plain ones, and control tokens are looked for afterwards: the worst case."""
    tokenizer = checkpoints.qwen_tokenizer()
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["normalized"] = True
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "qwen": checkpoints.qwen_tokenizer,
    "llama": checkpoints.llama_tokenizer,
    "llama_first": llama_first,
    "nfkc": nfkc,
}
NAMED = {
    "qwen": {"eos_token": "<|im_end|>"},
    "nfkc": {"eos_token": "<|im_end|>"},
    "llama": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
    "llama_first": {"bos_token": "<s>", "eos_token": "</s>"},
}
CONTROL = {"qwen": "<|image_pad|>", "nfkc": "<|image_pad|>", "llama": "<image>", "llama_first": "<image>"}
WORDS = [
    "hello",
    " ",
    "\n",
    "two  spaces",
    "café",
    "你好",
    "🙂",
    "<",
    "<|",
    "|>",
    ">",
    "im_start",
    "image",
    "a",
    "</",
    "12",
]
texts = st.lists(st.sampled_from([*WORDS, "<tool_call>"]), max_size=8).map("".join)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, make in MAKERS.items():
        made[name] = tmp_path_factory.mktemp(name)
        make().save(str(made[name] / "tokenizer.json"))
        (made[name] / "tokenizer_config.json").write_text(json.dumps(NAMED[name]))
    return made


@pytest.fixture(scope="session", params=list(MAKERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def ours(name: str, folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer(folders[name])


@pytest.fixture(scope="session")
def theirs(name: str, folders: dict[str, Path]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(folders[name] / "tokenizer.json"))


# --- trusted text -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(texts, min_size=1, max_size=4), special=st.booleans())
def test_raw_text_has_the_ids_of_transformers(
    name: str, ours: Tokenizer, theirs: PreTrainedTokenizerFast, parts: list[str], special: bool
) -> None:
    text = CONTROL[name].join(parts)
    assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_decoding_equals_transformers(ours: Tokenizer, theirs: PreTrainedTokenizerFast, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(theirs) - 1), max_size=12))
    expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.decode(ids) == expected


def test_named_tokens_come_from_either_form_of_the_config(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["llama"])
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_token_id == tokenizer.token_id("</s>")


@pytest.mark.parametrize(
    ("kind", "asked", "begins"),
    [
        ("LlamaTokenizerFast", True, True),
        ("LlamaTokenizerFast", False, False),
        ("LlamaTokenizer", True, True),
        ("LlamaTokenizerFast", None, None),
        ("PreTrainedTokenizerFast", True, None),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_the_llama_lines_class_decides_itself_whether_a_raw_prompt_begins_with_bos(
    folders: dict[str, Path], tmp_path: Path, name: str, kind: str, asked: bool | None, begins: bool | None
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folders[name] / "tokenizer.json").read_bytes())
    bos = "<s>" if name == "llama" else "<|im_start|>"
    config = {"tokenizer_class": kind, "bos_token": bos, **({} if asked is None else {"add_bos_token": asked})}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, by_file = Tokenizer(tmp_path), name == "llama"  # whose tokenizer.json adds it
    expected = [tokenizer.token_id(bos)] if (by_file if begins is None else begins) else []
    assert tokenizer.encode("hi") == expected + tokenizer.encode("hi", add_special_tokens=False)


# --- text from a client -------------------------------------------------------------------------------------------


def wrapped(name: str, text: str) -> tuple[str, str]:
    """What a template would write around a client's text."""
    if name in ("qwen", "nfkc"):
        return "<|im_start|>user\n<|image_pad|>", "<|im_end|>\n<|im_start|>assistant\n"
    return "USER: <image>\n", " ASSISTANT:"


@settings(max_examples=80, deadline=None)
@given(text=texts)
def test_a_chat_without_control_tokens_in_its_text_has_the_ids_of_transformers(
    name: str, ours: Tokenizer, theirs: PreTrainedTokenizerFast, text: str
) -> None:
    assume(not re.search(r"<[|/]?\w+\|?>", unicodedata.normalize("NFKC", text)))
    before, after = wrapped(name, text)
    assert ours.encode_template(before + ours.shield(text) + after) == theirs.encode(before + text + after)


@settings(max_examples=80, deadline=None)
@given(parts=st.lists(st.lists(st.sampled_from([*WORDS, "CONTROL", "<s>", "<|im_start|>"]), max_size=4), max_size=4))
def test_text_from_a_client_never_becomes_a_control_token(name: str, ours: Tokenizer, parts: list[list[str]]) -> None:
    shielded = ["".join(part).replace("CONTROL", CONTROL[name]) for part in parts]
    rendered = "".join(ours.shield(part) for part in shielded)
    before, after = wrapped(name, "")
    ids = ours.encode_template(before + rendered + after)
    special = [ours.token(i) for i in ids if ours.is_special(i) and ours.token(i) != "<unk>"]
    empty = [ours.token(i) for i in ours.encode_template(before + after) if ours.is_special(i)]
    assert special == empty


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_control_token_cut_into_parts_cannot_join_again(name: str, ours: Tokenizer, data: st.DataObject) -> None:
    token = CONTROL[name]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(token) - 1), min_size=1, max_size=3)))
    parts = [token[a:b] for a, b in zip([0, *cuts], [*cuts, len(token)], strict=True)]
    ids = ours.encode_template("x" + "".join(map(ours.shield, parts)))
    assert ours.token_id(token) not in ids


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_template_cannot_complete_a_control_token_for_a_client(
    name: str, ours: Tokenizer, data: st.DataObject
) -> None:
    token = CONTROL[name]
    cut = data.draw(st.integers(1, len(token) - 1))
    left_by_client = "x" + ours.shield("y" + token[:cut]) + token[cut:]
    right_by_client = "x" + token[:cut] + ours.shield(token[cut:] + "y")
    for rendered in (left_by_client, right_by_client):
        assert ours.token_id(token) not in ours.encode_template(rendered)


def test_shielded_text_reads_as_before(name: str, ours: Tokenizer) -> None:
    for text in ("plain", CONTROL[name], f"a{CONTROL[name]}b<", "", "  spaces "):
        assert ours.unshield(ours.shield(text)) == text


def test_plain_text_is_not_changed_by_the_shield(ours: Tokenizer) -> None:
    assert ours.shield("What is in the picture?") == "What is in the picture?"


def test_full_width_look_alikes_stay_text_under_a_compatibility_normalizer(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["nfkc"])
    look_alike = "＜|image_pad|＞"
    assert tokenizer.token_id("<|image_pad|>") in tokenizer.encode(look_alike)  # what a plain encode would do
    assert tokenizer.token_id("<|image_pad|>") not in tokenizer.encode_template(tokenizer.shield(look_alike))


def test_overlapping_control_tokens_are_all_broken(tmp_path: Path) -> None:
    inner = checkpoints.qwen_tokenizer()
    inner.add_special_tokens(["<<x>>", "x>>y", ">>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode_template(tokenizer.shield("<<x>>y>>"))
    assert not any(tokenizer.is_special(i) for i in ids)


def test_placeholders_that_are_not_marked_special_can_be_protected(tmp_path: Path) -> None:
    inner = checkpoints.qwen_tokenizer()
    inner.add_tokens([AddedToken("<pic>", special=False)])
    inner.save(str(tmp_path / "tokenizer.json"))
    pic = inner.token_to_id("<pic>")
    assert pic is not None
    for tokenizer, forged in ((Tokenizer(tmp_path), True), (Tokenizer(tmp_path, protect=[pic]), False)):
        assert (pic in tokenizer.encode_template(tokenizer.shield("a <pic>"))) == forged


def test_a_template_may_write_plain_added_tokens_and_clients_too(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["qwen"])
    ids = tokenizer.encode_template("<tool_call>" + tokenizer.shield("<tool_call>x"))
    assert [tokenizer.token(i) for i in ids[:2]] == ["<tool_call>"] * 2


def test_bos_is_added_once_whether_or_not_the_template_writes_it(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["llama"])
    bos = tokenizer.token_id("<s>")
    for rendered in ("USER: hi", "<s>USER: hi"):
        ids = tokenizer.encode_template(rendered)
        assert ids[0] == bos and bos not in ids[1:]


def test_a_client_cannot_write_bos_in_the_templates_place(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["llama"])
    ids = tokenizer.encode_template(tokenizer.shield("<s>hi"))
    assert ids[0] == tokenizer.token_id("<s>") and len(ids) > len(tokenizer.encode_template("<s>hi"))


def test_a_vocabulary_that_swallows_a_control_token_whole_is_caught(tmp_path: Path) -> None:
    vocab = {"[UNK]": 0, "hi": 1, "[IMG]": 2}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["[UNK]", "[IMG]"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode_template("[IMG] hi " + tokenizer.shield("what")) == [2, 1, 0]
    with pytest.raises(RequestError, match=r"\[IMG\]"):
        tokenizer.encode_template(tokenizer.shield("hi [IMG] hi"))


# --- files --------------------------------------------------------------------------------------------------------


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)


def test_truncation_and_padding_in_the_file_are_not_applied(tmp_path: Path) -> None:
    inner = checkpoints.qwen_tokenizer()
    inner.enable_truncation(3)
    inner.enable_padding(length=50)
    inner.save(str(tmp_path / "tokenizer.json"))
    expected: Any = checkpoints.qwen_tokenizer().encode("What is in the picture?").ids
    tokenizer = Tokenizer(tmp_path)
    assert (
        tokenizer.encode("What is in the picture?") == tokenizer.encode_template("What is in the picture?") == expected
    )
