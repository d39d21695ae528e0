"""Every field of vLLM's request bodies is supported, inert, or refused by name with what to do instead."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from saccade.errors import RequestError
from saccade.server.request import fields
from saccade.server.request.chat import read_chat, read_completion
from saccade.server.request.fields import FieldReader

TOOL = {"type": "function", "function": {"name": "look"}}
COMMON = (
    *("model", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed", "stop"),
    *(
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "user",
        "response_format",
        "use_beam_search",
        "top_k",
        "min_p",
    ),
    *(
        "repetition_penalty",
        "length_penalty",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
    ),
    *("skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "allowed_token_ids"),
    *("prompt_logprobs", "add_special_tokens", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "structural_tag", "guided_decoding_backend", "guided_whitespace_pattern", "priority", "echo"),
    *("request_id", "logits_processors", "return_tokens_as_token_ids", "return_token_ids", "cache_salt", "best_of"),
    *("kv_transfer_params", "vllm_xargs", "bad_words", "repetition_detection"),
)
CHAT_ONLY = (
    *("messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "reasoning_effort"),
    *("parallel_tool_calls", "add_generation_prompt", "continue_final_message", "documents", "chat_template"),
    *("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "thinking_token_budget"),
)
COMPLETION_ONLY = ("prompt", "prompt_embeds", "suffix")
TABLES = {"chat": fields.CHAT, "completion": fields.COMPLETION}
REFUSED: dict[str, Any] = {
    "use_beam_search": True,
    "length_penalty": 0.5,
    "guided_whitespace_pattern": " ",
    "logits_processors": ["a.b"],
    "kv_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "repetition_detection": {"max_pattern_size": 1},
    "documents": [{"title": "a"}],
    "chat_template": "{{ messages }}",
    "prompt_embeds": "AAAA",
    "suffix": "a",
}


def read(kind: str, **given: Any) -> Any:
    reader = FieldReader(strict=True)
    if kind == "chat":
        return read_chat({"messages": [{"role": "user", "content": "a"}], **given}, reader)
    return read_completion({"prompt": "a", **given}, reader, 1)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_every_field_has_one_fate(kind: str) -> None:
    for name in (*COMMON, *(CHAT_ONLY if kind == "chat" else COMPLETION_ONLY)):
        fates = [name in TABLES[kind], name in fields.IGNORED, name in fields.UNSUPPORTED]
        is_refused = name in REFUSED
        assert any(fates), name
        assert is_refused or name in TABLES[kind] or name in fields.IGNORED or name in fields.INERT, name


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_named_with_what_to_do_instead(name: str) -> None:
    kind = "completion" if name in COMPLETION_ONLY else "chat"
    with pytest.raises(RequestError) as caught:
        read(kind, **{name: REFUSED[name]})
    assert (caught.value.param, caught.value.code) == (name, "unsupported")
    assert fields.UNSUPPORTED[name] in caught.value.message


def test_every_inert_value_is_one_of_a_field_that_is_refused_otherwise() -> None:
    assert fields.INERT.keys() <= fields.UNSUPPORTED.keys()


def test_a_field_without_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = FieldReader(strict=True)
    with caplog.at_level(logging.INFO, "saccade.server"):
        for _ in range(2):
            reader.read({"spaces_between_special_tokens": False, "length_penalty": 1.0}, fields.CHAT)
    assert ["spaces_between_special_tokens" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_what_limits_tokens_reaches_the_sampler(kind: str) -> None:
    given = {"allowed_token_ids": [4, 5], "bad_words": ["no"], "truncate_prompt_tokens": 7, "thinking_token_budget": 0}
    params = read(kind, **given).response_options.params
    assert {name: getattr(params, name) for name in given} == given
    assert not params.samples_on_device


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [1] * 300_000),
        ("bad_words", ["a"] * 300),
        ("bad_words", ["a" * 300]),
        ("bad_words", [" "]),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("thinking_token_budget", -1),
    ],
    ids=lambda value: str(value)[:20],
)
def test_limits_of_tokens_have_limits(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read("chat", **{name: value})
    assert caught.value.param == name


def test_a_chat_goes_on_with_its_last_message_or_begins_another() -> None:
    assert read("chat", continue_final_message=True).add_generation_prompt is False
    assert read("chat").add_generation_prompt is True
    with pytest.raises(RequestError) as caught:
        read("chat", continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"response_format": {"type": "text"}, "guided_regex": "a+"}, "guided_regex"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a+"}, "tools"),
    ],
)
def test_errors_of_a_structure_name_the_field_that_asked_for_it(given: dict[str, Any], field: str) -> None:
    assert read("chat", **given).response_options.structure_field == field


@pytest.mark.parametrize("given", [{"guided_choice": []}, {"guided_regex": ""}, {"response_format": {}}])
def test_an_empty_structure_is_refused_and_not_forgotten(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        read("chat", **given)
    assert caught.value.param == next(iter(given))
