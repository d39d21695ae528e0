"""vLLM's sampling parameters in Python: limits of tokens, prompts that are cut, log probabilities in its shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from saccade import LLM, BeamSearchParams, Logprob, SamplingParams
from saccade.errors import RequestError
from saccade.outputs import TokenLogprobs
from saccade.processor.beam_search import search
from saccade.processor.messages import cut_at_mark, mark_end
from saccade.processor.request_builder import RequestBuilder
from saccade.runner.batch import RequestState
from saccade.runner.sampler import Row, sample
from saccade.sampling_params import INERT, REFUSED
from saccade.types.step import Admission, Logprobs
from tests.helpers.engine.reference_sampler import reference_sample
from tests.helpers.engine.scheduling import make_prompt

FREE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = "Describe this image in one sentence."
EMPTY = np.array([], np.int64)


@pytest.fixture(scope="module")
def llm(qwen2_vl_folder: Path) -> Iterator[LLM]:
    made = LLM(model=str(qwen2_vl_folder), max_model_len=256, kv_cache_gb=0.02, max_pixels=60_000, use_tqdm=False)
    yield made
    made.close()


def answer(llm: LLM, prompt: Any = PROMPT, **given: Any) -> Any:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **given})
    return llm.generate(prompt, params, use_tqdm=False)[0]


# --- the table ----------------------------------------------------------------------------------------------------

SUPPORTED = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "stop_token_ids", "bad_words", "ignore_eos", "max_tokens", "min_tokens", "logprobs"),
    *("skip_special_tokens", "include_stop_str_in_output", "truncate_prompt_tokens", "structured_outputs"),
    *("guided_decoding", "logit_bias", "allowed_token_ids", "prompt_logprobs", "best_of"),
)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_supported_parameter_is_taken(name: str) -> None:
    assert SamplingParams(**{name: None} if name not in SamplingParams.__slots__ else {}) is not None
    assert name == "guided_decoding" or name in SamplingParams.__slots__


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_parameter_says_what_to_use_instead(name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: 5})
    assert REFUSED[name] in caught.value.message and caught.value.code == "unsupported"
    assert SamplingParams(**{name: None}) == SamplingParams()


@pytest.mark.parametrize("given", [{"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"best_of": 1, "n": 2}], ids=str)
def test_log_probabilities_and_outputs_have_limits(given: dict[str, int]) -> None:
    (name,) = given.keys() - {"n"}
    with pytest.raises(RequestError, match=f"{name} must be from .*{given[name]} was given") as caught:
        SamplingParams(**given)
    assert caught.value.param == name


def test_an_inert_parameter_changes_nothing() -> None:
    assert SamplingParams(**dict.fromkeys(INERT, True)) == SamplingParams()


# --- limits of tokens ---------------------------------------------------------------------------------------------


def test_only_allowed_tokens_are_sampled(llm: LLM) -> None:
    for temperature in (0, 1.5):
        out = answer(llm, allowed_token_ids=[30, 31, 32], temperature=temperature, seed=1).outputs[0]
        assert set(out.token_ids) <= {30, 31, 32} and len(out.token_ids) == 12


def test_a_bad_word_is_never_completed(llm: LLM) -> None:
    tokenizer = llm.engine.processor.tokenizer
    free = answer(llm).outputs[0]
    words = [tokenizer.decode(free.token_ids[i : i + 2]).strip() for i in range(4)]
    words = [word for word in words if word]
    out = answer(llm, bad_words=words, max_tokens=24).outputs[0]
    assert words and all(word in free.text for word in words)
    spelled = {tuple(tokenizer.encode_text(space + word)) for word in words for space in ("", " ")}
    for ids in spelled:
        size = len(ids)
        assert ids not in {tuple(out.token_ids[i : i + size]) for i in range(len(out.token_ids))}


def test_a_bad_word_is_forbidden_where_its_beginning_was_written() -> None:
    builder = RequestBuilder(frozenset(), 0, encode=lambda text: [ord(letter) for letter in text])
    params = SamplingParams(bad_words=["ab", "c"])
    (request,) = builder.build("r", make_prompt([3]), params, 5)
    assert request.params.bad_words_token_ids == ((97, 98), (32, 97, 98), (99,), (32, 99))
    found = []
    for written in ([], [97], [32], [98, 97], [32, 97]):
        found.append(RequestState(Admission(request, tuple(written), (0,))).row().forbidden)
    assert found == [{99}, {98, 99}, {99}, {98, 99}, {98, 99}]


def limited_state(tokens: list[int], grammar: Any = None) -> RequestState:
    params = SamplingParams(allowed_token_ids=tokens)
    (request,) = RequestBuilder(frozenset(), 0).build("r", make_prompt([3]), params, 5)
    return RequestState(Admission(request, (), (0,)), grammar)


def allowed_bits(tokens: list[int], grammar: Any = None) -> Any:
    return limited_state(tokens, grammar).row().allowed


def test_allowed_tokens_become_bits_once() -> None:
    """A list may name the whole vocabulary, which takes tens of milliseconds to read."""
    state = limited_state([0, 33, 31, 64])
    assert state.row().allowed is state.row().allowed
    assert [int(word) & 0xFFFFFFFF for word in allowed_bits([0, 33, 31, 64])] == [0x80000001, 2, 1]


def test_a_token_must_be_allowed_by_the_list_and_by_the_grammar() -> None:
    bits = np.array([0b110, 1, 1], np.int32)
    grammar = SimpleNamespace(allowed=lambda: bits, must_end=lambda bits: False)
    assert allowed_bits([0, 1, 40], grammar).tolist() == [0b010, 0]
    assert bits.tolist() == [0b110, 1, 1], "the grammar's own stay"


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_batch_with_limits_samples_what_the_reference_samples(temperature: float) -> None:
    values = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)) * 3
    free = SamplingParams(temperature=temperature, seed=1)
    best = int(values[1].argmax())
    rows = [
        Row(free, EMPTY, EMPTY, frozenset(), 1, allowed=allowed_bits([3, 9, 9, 20])),
        Row(free, EMPTY, EMPTY, frozenset(), 1, forbidden=frozenset({best})),
        Row(free, EMPTY, EMPTY, frozenset(), 1),
    ]
    expected = [reference_sample(v.tolist(), r) for v, r in zip(values, rows, strict=True)]
    chosen = [s.token_id for s in sample(values.clone(), rows)]
    assert chosen == expected and chosen[0] in (3, 9, 20) and chosen[1] != best


def test_a_token_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="ids go from 0 to"):
        answer(llm, allowed_token_ids=[10**6])


# --- prompts ------------------------------------------------------------------------------------------------------


def test_a_cut_prompt_keeps_its_last_tokens(llm: LLM) -> None:
    whole = answer(llm)
    cut = answer(llm, truncate_prompt_tokens=5)
    assert cut.prompt_token_ids == whole.prompt_token_ids[-5:]
    by_hand = answer(llm, {"prompt_token_ids": whole.prompt_token_ids[-5:]})
    assert cut.outputs[0].token_ids == by_hand.outputs[0].token_ids
    assert answer(llm, truncate_prompt_tokens=500).prompt_token_ids == whole.prompt_token_ids


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(llm: LLM) -> None:
    out = answer(llm, {"prompt_token_ids": [40] * 400}, truncate_prompt_tokens=-1)
    assert len(out.prompt_token_ids) == 256 - 12 and out.outputs[0].finish_reason == "length"


def test_a_prompt_with_images_is_not_cut(llm: LLM) -> None:
    image = torch.zeros(64, 64, 3, dtype=torch.uint8).numpy()
    prompt = {"prompt": "<|vision_start|><|image_pad|><|vision_end|>a", "multi_modal_data": {"image": image}}
    with pytest.raises(RequestError, match="cannot be cut") as caught:
        answer(llm, prompt, truncate_prompt_tokens=2)
    assert caught.value.param == "truncate_prompt_tokens"


def test_a_chat_can_go_on_with_its_last_message(llm: LLM) -> None:
    question = {"role": "user", "content": "How many?"}
    prompt = llm.engine.processor.from_chat(
        [question, {"role": "assistant", "content": "There are "}], continue_final_message=True
    )
    begun = llm.engine.processor.from_chat([question]).text
    assert begun is not None and prompt.text == begun + "There are "


def test_only_an_assistant_s_message_goes_on() -> None:
    with pytest.raises(RequestError, match="only an assistant's"):
        mark_end([{"role": "user", "content": "a"}])
    with pytest.raises(RequestError, match="does not show"):
        cut_at_mark("what a template wrote without it")


# --- log probabilities --------------------------------------------------------------------------------------------


def test_logprobs_have_vllm_s_shape_and_ours(llm: LLM) -> None:
    out = answer(llm, logprobs=2, temperature=1.0, seed=3).outputs[0]
    assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids)
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert next(iter(entry)) == token and len(entry) in (2, 3)
        assert entry[token].logprob == entry.logprob and entry[token].rank == entry.rank
        assert [entry[other].logprob for other, _ in entry.top] == [value for _, value in entry.top]
        text = llm.engine.processor.tokenizer.decode([token], skip_special_tokens=False)
        assert isinstance(entry[token], Logprob) and entry[token].decoded_token == text
    assert out.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in out.logprobs))
    assert answer(llm).outputs[0].cumulative_logprob is None


# --- beam search --------------------------------------------------------------------------------------------------


def table(beams: Any) -> list[TokenLogprobs]:
    """A model of three tokens: 0 ends, and the likeliest first token leads to unlikely ones."""
    first = ((1, -0.1), (2, -0.5), (0, -9.0))
    later = {1: ((1, -3.0), (2, -3.5), (0, -4.0)), 2: ((0, -0.1), (2, -4.0), (1, -5.0))}
    tops = [later[beam.token_ids[-1]] if beam.token_ids else first for beam in beams]
    return [TokenLogprobs(top[0][0], Logprobs(top[0][1], 1, top), str) for top in tops]


def test_the_best_beam_need_not_begin_with_the_likeliest_token() -> None:
    best, *others = search(BeamSearchParams(beam_width=2, max_tokens=3), {0}, table)
    assert best.token_ids == (2, 0) and best.is_ended and best.cum_logprob == pytest.approx(-0.6)
    assert len(others) == 1
    (greedy,) = search(BeamSearchParams(beam_width=1, max_tokens=2, ignore_eos=True), {0}, table)
    assert greedy.token_ids == (1, 1) and not greedy.is_ended


def test_beam_search_reports_what_the_engine_computes(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    (out,) = llm.beam_search([PROMPT], params)
    prompt = answer(llm).prompt_token_ids
    assert len(out.sequences) == 3 and len({tuple(one.tokens) for one in out.sequences}) == 3
    for one in out.sequences:
        assert one.tokens[: len(prompt)] == prompt and len(one.tokens) == len(prompt) + 4
        total = 0.0
        for end in range(len(prompt), len(one.tokens)):
            forced = {"logprobs": 0, "max_tokens": 1, "allowed_token_ids": [one.tokens[end]]}
            total += answer(llm, {"prompt_token_ids": one.tokens[:end]}, **forced).outputs[0].cumulative_logprob
        assert one.cum_logprob == pytest.approx(total, abs=1e-3)
    (one,) = llm.beam_search(PROMPT, BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True))[0].sequences
    assert one.tokens[len(prompt) :] == answer(llm).outputs[0].token_ids and one.finish_reason == "length"


def test_a_beam_has_limits() -> None:
    for given in ({"beam_width": 11, "max_tokens": 1}, {"beam_width": 1, "max_tokens": 0}):
        with pytest.raises(RequestError):
            BeamSearchParams(**given)
