"""Answers that must follow a JSON schema: a model with random weights is held to it token by token."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import llguidance
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade import LLM, GuidedDecodingParams, SamplingParams, StructuredOutputsParams, costs
from saccade.errors import RequestError
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from saccade.runner.sampler import Row, sample
from saccade.server.serve import warmup_requests
from saccade.structured.grammar import Grammars
from saccade.structured.schema import MIN_VERSION
from saccade.structured.structured_outputs import structured_from
from saccade.types.prompt import Prompt
from saccade.types.request import Request
from tests.helpers.engine.reference_sampler import reference_sample

PERSON = {
    "$defs": {
        "Colour": {"enum": ["red", "green", "blue", None, 7]},
        "Address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 12},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "height": {"type": "number", "minimum": 0.5, "maximum": 2.5, "multipleOf": 0.01},
        "colours": {"type": "array", "items": {"$ref": "#/$defs/Colour"}, "minItems": 1, "maxItems": 3},
        "address": {"$ref": "#/$defs/Address"},
        "is_member": {"type": "boolean"},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 5}]},
    },
    "required": ["name", "age", "height", "colours", "address", "is_member", "note"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested objects, arrays, numbers, enums and references": PERSON,
    "an enum": {"enum": ["yes", "no", "maybe"]},
    "a constant": {"const": {"a": [1, 2, {"b": None}]}},
    "a small integer": {"type": "integer", "minimum": -20, "maximum": 20},
    "a boolean": {"type": "boolean"},
    "an array of fixed length": {"type": "array", "items": {"type": "boolean"}, "minItems": 4, "maxItems": 4},
    "a date": {"type": "string", "format": "date"},
    "one of two objects": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": k}, k: {"type": "boolean"}}, "required": ["kind", k]}
            | {"additionalProperties": False}
            for k in ("cat", "dog")
        ]
    },
}
PROMPT = "Describe this image in one sentence."
FREE = [
    {"prompt": "The quick brown fox jumps over the lazy dog. " * 2},
    {"prompt": "How many red circles are there?"},
]


def structured(schema: Any, **given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 400, "structured": json.dumps(schema), **given})


def value_of(out: Any) -> Any:
    assert out.error is None
    assert out.outputs[0].finish_reason == "stop", out.outputs[0].text
    return json.loads(out.outputs[0].text)


@pytest.fixture(scope="module")
def llm(qwen2_vl_folder: Path) -> Iterator[LLM]:
    made = LLM(model=str(qwen2_vl_folder), max_model_len=1024, kv_cache_gb=0.05, max_pixels=60_000, use_tqdm=False)
    yield made
    made.engine.core.scheduler.check()
    made.close()


def ask(llm: LLM, params: SamplingParams) -> Any:
    return llm.generate(PROMPT, params, use_tqdm=False)[0]


# --- what comes out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_answer_follows_the_schema(llm: LLM, name: str, temperature: float) -> None:
    params = structured(SCHEMAS[name], temperature=temperature, seed=3, top_p=0.95)
    jsonschema.validate(value_of(ask(llm, params)), SCHEMAS[name])


def test_a_vocabulary_that_spells_rare_characters_in_bytes_follows_the_schema_too(llava_folder: Path) -> None:
    llm = LLM(model=str(llava_folder), max_model_len=1024, kv_cache_gb=0.05, use_tqdm=False)
    for temperature in (0, 1.0):
        jsonschema.validate(value_of(ask(llm, structured(PERSON, temperature=temperature, seed=3))), PERSON)
    llm.close()


def test_many_sampled_answers_all_follow_the_schema(llm: LLM) -> None:
    params = structured(PERSON, n=12, temperature=1.5, seed=1)
    outs = ask(llm, params).outputs
    assert len({out.text for out in outs}) == 12
    schema = json.loads(json.dumps(PERSON), parse_float=Decimal)  # in binary, 0.58 is no multiple of 0.01
    for out in outs:
        assert out.finish_reason == "stop"
        jsonschema.validate(json.loads(out.text, parse_float=Decimal), schema)


def test_any_object_will_do_for_json_object(llm: LLM) -> None:
    outs = [ask(llm, structured({"type": "object"}, temperature=1.0, seed=seed)).outputs[0] for seed in range(6)]
    ended = [out for out in outs if out.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(out.text), dict) for out in ended)
    assert all(out.text.startswith("{") for out in outs)


def test_a_recursive_schema_gives_a_finite_answer(llm: LLM) -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}}
    schema = {"$defs": {"node": {**node, "required": ["next"], "additionalProperties": False}}, "$ref": "#/$defs/node"}
    jsonschema.validate(value_of(ask(llm, structured(schema, temperature=1.0, seed=5))), schema)


def test_requests_beside_a_structured_one_are_not_changed(llm: LLM) -> None:
    plain = SamplingParams(temperature=1.0, seed=9, max_tokens=24, ignore_eos=True)
    alone = [llm.generate(prompt, plain, use_tqdm=False)[0].outputs[0].token_ids for prompt in FREE]
    single = ask(llm, structured(PERSON, temperature=1.0, seed=2)).outputs[0].token_ids
    params = [plain, structured(PERSON, temperature=1.0, seed=2), plain]
    outs = llm.generate([FREE[0], PROMPT, FREE[1]], params, use_tqdm=False)
    assert [outs[0].outputs[0].token_ids, outs[2].outputs[0].token_ids] == alone
    assert outs[1].outputs[0].token_ids == single


def test_a_preempted_request_goes_on_with_its_structure(qwen2_vl_folder: Path) -> None:
    params = structured(PERSON, temperature=1.0, seed=4)
    text = open_checkpoint(str(qwen2_vl_folder)).config.text
    gib = 30.5 * costs.kv_bytes_per_block(text, "float32") / costs.GIB
    roomy = LLM(model=str(qwen2_vl_folder), max_model_len=450, kv_cache_gb=0.05, max_pixels=60_000, use_tqdm=False)
    tight = LLM(model=str(qwen2_vl_folder), max_model_len=450, kv_cache_gb=gib, max_pixels=60_000, use_tqdm=False)
    expected = [out.outputs[0].token_ids for out in roomy.generate([PROMPT] * 6, params, use_tqdm=False)]
    outs = tight.generate([PROMPT] * 6, params, use_tqdm=False)
    assert tight.stats()["preemptions"] > 0
    assert [out.outputs[0].token_ids for out in outs] == expected
    for out in outs:
        jsonschema.validate(value_of(out), PERSON)
    roomy.close()
    tight.close()


# --- other structures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"structured_outputs": StructuredOutputsParams(regex="[a-f]{4}-[0-9]{2}")}, "[a-f]{4}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_decoding": GuidedDecodingParams(grammar='root ::= "a" [bc]{3} "d"')}, "a[bc]{3}d"),
        ({"structured": "start: /[xy]{5}/"}, "[xy]{5}"),
    ],
    ids=["regex", "choice", "grammar", "lark"],
)
def test_every_sampled_answer_follows_the_structure(llm: LLM, given: dict[str, Any], pattern: str) -> None:
    params = SamplingParams(n=6, temperature=1.5, seed=1, max_tokens=60, **given)
    outs = ask(llm, params).outputs
    assert [out.text for out in outs if not re.fullmatch(pattern, out.text)] == []
    assert {out.finish_reason for out in outs} == {"stop"}


def test_a_structure_that_cannot_be_enforced_is_an_error_of_its_request(llm: LLM) -> None:
    with pytest.raises(RequestError, match="look-around"):
        ask(llm, SamplingParams(structured_outputs={"regex": "(?=a)b"}))


# --- where it ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"min_tokens": 200}, {"ignore_eos": True}], ids=str)
def test_the_structure_outranks(llm: LLM, given: dict[str, Any]) -> None:
    out = ask(llm, structured({"const": "yes"}, **given))
    assert value_of(out) == "yes"
    assert len(out.outputs[0].token_ids) < 200


def test_an_answer_that_may_go_on_ends_when_the_model_says_so(llm: LLM) -> None:
    eos = min(llm.engine.processor.eos_token_ids)
    out = ask(llm, structured({"type": "integer"}, logit_bias={eos: 100.0}))
    assert isinstance(value_of(out), int)
    assert out.outputs[0].token_ids[-1] == eos


def test_an_answer_cut_by_max_tokens_says_length(llm: LLM) -> None:
    out = ask(llm, structured(PERSON, max_tokens=5)).outputs[0]
    assert out.finish_reason == "length"
    assert len(out.token_ids) == 5


def test_white_space_cannot_go_on_for_ever(llm: LLM) -> None:
    spaces = {i: 100.0 for t in (" ", "\n") for i in llm.engine.processor.tokenizer.encode(t, False)}
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    assert len(value_of(ask(llm, structured(schema, logit_bias=spaces)))) == 2


# --- one bad grammar hurts one request ----------------------------------------------------------------------------

HEAVY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1200)}}  # too much for one step


def test_a_grammar_that_breaks_ends_its_own_request_only(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = llm.generate(FREE[0], plain, use_tqdm=False)[0].outputs[0].token_ids
    outs = llm.generate([PROMPT, FREE[0]], [structured(HEAVY), plain], use_tqdm=False)
    assert outs[0].error is not None and outs[0].error.code == "invalid_json_schema"
    assert "{" not in outs[0].error.message
    assert outs[1].outputs[0].token_ids == alone
    assert llm.stats()["kv"]["used"] == 0


def request(schema: str) -> Request:
    params = SamplingParams(structured=schema)
    prompt = Prompt([1], (), (), np.zeros((1, 1), np.int32), 1, b"\0" * 40)
    return Request("r", prompt, params, 8, frozenset({3}), 0)


def lowest(bits: npt.NDArray[np.int32] | None) -> int:
    """The first token that may come next."""
    assert bits is not None
    return int(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[0])


@pytest.mark.parametrize("schema", ["no JSON", "5", '{"type": "nothing"}', '{"$ref": "http://a.example/"}', "[" * 9000])
def test_an_unchecked_schema_becomes_an_error_of_its_grammar(qwen2_vl_folder: Path, schema: str) -> None:
    grammar = Grammars(qwen2_vl_folder, 460).of(request(schema))
    assert grammar is not None and grammar.allowed() is None
    code = "invalid_json_schema" if schema.startswith("{") else "invalid_grammar"
    assert grammar.error is not None and grammar.error.code == code


def test_a_tokenizer_that_cannot_be_read_is_an_error_of_the_grammar(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    grammar = Grammars(tmp_path, 460).of(request("{}"))
    assert grammar is not None and grammar.allowed() is None
    assert grammar.error is not None and grammar.error.code == "unsupported" and "tokenizer" in grammar.error.message


def old_library() -> ModuleType:
    """Of a version that has one end token and no list of them."""

    class LLTokenizer:
        def __init__(self, *args: Any, **named: Any) -> None:
            self.inner = llguidance.LLTokenizer(*args, **named)

        vocab_size = property(lambda self: self.inner.vocab_size)

    old = ModuleType("llguidance")
    vars(old).update({**vars(llguidance), "LLTokenizer": LLTokenizer})
    return old


@pytest.mark.parametrize(
    ("library", "reason"), [(None, "not installed"), (old_library(), "install llguidance 1.8 or newer")]
)
def test_without_its_library_everything_but_structure_works_and_says_so(
    qwen2_vl_folder: Path, monkeypatch: pytest.MonkeyPatch, library: ModuleType | None, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", library)  # None: as if it were not installed
    llm = LLM(model=str(qwen2_vl_folder), kv_cache_gb=0.02, use_tqdm=False)
    free = llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0]
    assert free.finish_reason in ("stop", "length")
    with pytest.raises(RequestError, match=reason) as refused:
        llm.generate("a", SamplingParams(structured="{}"), use_tqdm=False)
    assert refused.value.code == "unsupported"
    assert any(reason in told for told in llm.engine.core.reasons)
    assert not any(request.params.structured for request in warmup_requests(llm.engine.processor))
    llm.close()


def test_without_its_library_a_grammar_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammar = Grammars(tmp_path, 460).of(request("{}"))
    assert grammar is not None and grammar.allowed() is None
    assert grammar.error is not None and "llguidance" in grammar.error.message


@pytest.mark.parametrize("given", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}])
def test_without_its_library_a_form_is_refused_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="llguidance"):
        structured_from(given)


def test_a_server_warms_up_its_grammars_too(qwen2_vl_folder: Path) -> None:
    processor = Processor(open_checkpoint(str(qwen2_vl_folder)), MediaPolicy.of(Options()))
    assert [request.params.structured is not None for request in warmup_requests(processor)] == [False, False, True]


def test_the_package_asks_for_a_version_that_works() -> None:
    wanted = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    assert f"llguidance>={MIN_VERSION}" in wanted


def test_a_free_answer_has_no_grammar_and_reads_no_tokenizer(tmp_path: Path) -> None:
    free = Request("r", request("{}").prompt, SamplingParams(), 8, frozenset(), 0)
    assert Grammars(tmp_path, 460).of(free) is None


def test_a_grammar_stays_where_it_is_until_its_request_ends(qwen2_vl_folder: Path) -> None:
    """Also when the request is preempted and comes again."""
    grammars, asked = Grammars(qwen2_vl_folder, 460), request(json.dumps(PERSON))
    first = grammars.of(asked)
    assert first is not None
    begun = first.allowed()
    for _ in range(30):
        first.advance(lowest(first.allowed()))
    assert grammars.of(asked) is first
    grammars.end(asked.request_id)
    again = grammars.of(asked)
    assert again is not None and again is not first
    assert np.array_equal(again.allowed(), begun)


# --- the sampler --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_token_outside_the_mask_is_never_chosen(temperature: float) -> None:
    bits = np.zeros(3, np.int32)
    bits[0], bits[1], bits[2] = 1 << 5, -(1 << 31), 1  # tokens 5, 63 and 64
    empty = np.array([], np.int64)
    rows = [Row(SamplingParams(temperature=temperature), empty, empty, frozenset(), seed, bits) for seed in range(200)]
    values = torch.zeros(200, 70)
    values[:, 6] = 50.0
    chosen = {s.token_id for s in sample(values, rows)}
    assert chosen == ({5} if temperature == 0 else {5, 63, 64})


bits_strategy = st.lists(st.integers(0, 69), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(masks=st.lists(st.none() | bits_strategy, min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_a_batch_with_masks_samples_what_the_reference_samples_row_by_row(
    masks: list[list[int] | None], seed: int
) -> None:
    rows = []
    for i, tokens in enumerate(masks):
        bits = np.packbits(np.isin(np.arange(96), tokens or []), bitorder="little").view(np.int32)
        empty, params = np.array([], np.int64), SamplingParams(temperature=i % 2, top_k=5, min_tokens=1)
        rows.append(Row(params, empty, empty, frozenset(), seed + i, None if tokens is None else bits))
    values = torch.randn(len(rows), 70, generator=torch.Generator().manual_seed(seed)) * 3
    expected = [reference_sample(v.tolist(), r) for v, r in zip(values, rows, strict=True)]
    assert [s.token_id for s in sample(values.clone(), rows)] == expected
