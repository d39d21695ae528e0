"""Fields that must not hurt: each gets the answer that was promised, and a normal request works right after it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.servers.serving import (
    RunningServer,
    error_of,
    image_url,
    photo_part,
    refused,
    text_part,
)

pytestmark = pytest.mark.usefixtures("unharmed")

GOOD = photo_part(64, 64)
WHERE = "messages[0].content[0].image_url"


# --- row 21: placeholders in text ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "<|image_pad|>",
        "<image>",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|im_start|>system",
        "[IMG]",
        "\uff1c\uff5cimage_pad\uff5c\uff1e",  # the same in full-width signs
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_control_tokens_in_a_text_stay_text(server: RunningServer, text: str, role: str) -> None:
    messages = [{"role": role, "content": text}, {"role": "user", "content": [GOOD, text_part("?")]}]
    bill = server.post("/v1/bill", {"messages": messages}).json()
    plain = server.post("/v1/bill", {"messages": [{"role": role, "content": ""}, messages[1]]}).json()
    assert bill["image_tokens"] == plain["image_tokens"]
    assert bill["text_tokens"] - plain["text_tokens"] > 1


# --- rows 22-26: fields -------------------------------------------------------------------------------------------


def test_a_uuid_without_data_and_without_an_entry_is_not_found(server: RunningServer) -> None:
    part = {"type": "image_url", "image_url": None, "uuid": "never-seen"}
    refused(server.chat([part]), "image_file_not_found", WHERE)


def test_image_embeds_are_refused(server: RunningServer) -> None:
    refused(server.chat([{"type": "image_embeds", "image_embeds": "AAAA"}]), None, "messages[0].content[0].type")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"size": 1},
        {"max_pixels": 10**9},
        {"max_pixels": -1},
        {"max_pixels": 1e18},
        {"min_pixels": 0},
        {"tokenize": True},
    ],
)
def test_processor_settings_beyond_the_deployment_are_refused(server: RunningServer, kwargs: dict[str, Any]) -> None:
    response = server.chat([GOOD, text_part("?")], mm_processor_kwargs=kwargs)
    assert response.status_code == 400 and str(error_of(response)["param"]).startswith("mm_processor_kwargs")


BAD_FIELDS: list[tuple[str, Any]] = [
    ("n", 10**9),
    ("n", 0),
    ("n", "2"),
    ("n", True),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_k", -2),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("repetition_penalty", 0),
    ("seed", 2**70),
    ("stop", ["a"] * 100_000),
    ("stop", [1]),
    ("stop", ""),
    ("stop_token_ids", [2**70]),
    ("logit_bias", {str(i): 1 for i in range(100_000)}),
    ("logit_bias", {"word": 1}),
    ("logit_bias", {"1": 1000}),
    ("top_logprobs", 5),
    ("stream_options", {"include_usage": True}),
    ("tool_choice", "auto"),
    ("tools", []),
    ("tools", "all"),
    ("stream", "yes"),
    ("messages", []),
    ("messages", "hello"),
    ("model", 5),
    ("cache_salt", 5),
    ("best_of", 65),
    ("best_of", "many"),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", True),
    ("add_special_tokens", True),
    ("return_tokens_as_token_ids", 1),
    ("max_completion_tokens", 0),
    ("max_completion_tokens", 10**12),
    ("max_tokens", 10**12),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS, ids=lambda v: str(v)[:20])
def test_a_bad_value_is_refused_and_its_field_named(server: RunningServer, name: str, value: Any) -> None:
    response = server.chat(**{name: value})
    assert response.status_code == 400 and error_of(response)["param"] == name


def test_more_logprobs_than_allowed_are_refused(server: RunningServer) -> None:
    assert error_of(server.chat(logprobs=True, top_logprobs=10**6))["param"] == "top_logprobs"


def test_an_answer_longer_than_any_context_is_refused(server: RunningServer) -> None:
    refused(server.chat(max_tokens=10**12), "context_length_exceeded", "max_tokens")


def test_a_prompt_that_leaves_no_room_is_not_blamed_on_the_length_of_the_answer(server: RunningServer) -> None:
    part = text_part("word " * 5000)
    refused(server.chat([GOOD, part], max_tokens=4), "context_length_exceeded", "messages")


def test_an_answer_that_is_too_long_is_named_in_the_words_of_each_api(server: RunningServer) -> None:
    response = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 10**12})
    refused(response, "context_length_exceeded", "max_output_tokens")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10**12}
    assert server.post("/v1/messages", body).json()["error"]["message"].startswith("max_tokens: ")


INERT_FIELDS = [{"best_of": 1}, {"best_of": 2, "n": 2}, {"add_special_tokens": False}, {"media_io_kwargs": {}}]


@pytest.mark.parametrize("fields", INERT_FIELDS, ids=str)
def test_a_field_whose_value_changes_nothing_is_accepted(server: RunningServer, fields: dict[str, Any]) -> None:
    assert server.chat(max_tokens=2, **fields).status_code == 200


REFUSED_FIELDS: list[dict[str, Any]] = [
    {"best_of": 1, "n": 2},
    {"best_of": 2, "stream": True},
    {"prompt_logprobs": 0, "stream": True},
    {"n": 2, "echo": True, "logprobs": 1, "stream": True},
    {"stream": True, "max_tokens": 0, "echo": True},
    {"max_tokens": 0},
    {"prompt_logprobs": 20, "prompt": [list(range(40, 440))] * 32},
    {"logprobs": 20, "echo": True, "prompt": [list(range(40, 440))] * 32},
    {"suffix": "b"},
]


@pytest.mark.parametrize("fields", REFUSED_FIELDS, ids=lambda fields: str(fields)[:40])
def test_what_a_completion_cannot_do_is_named(server: RunningServer, fields: dict[str, Any]) -> None:
    response = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, **fields})
    assert response.status_code == 400 and error_of(response)["param"] == next(iter(fields))


@pytest.mark.parametrize("frames", [{"num_frames": 2}, {"fps": 0.5}])
def test_settings_of_videos_beside_images_are_named_as_they_were_sent(
    server: RunningServer, frames: dict[str, Any]
) -> None:
    (name,) = frames
    parts = [GOOD, text_part("?")]
    response = server.chat(parts, media_io_kwargs={"video": frames})
    refused(response, None, f"media_io_kwargs.video.{name}")
    refused(server.chat(parts, mm_processor_kwargs=frames), None, f"mm_processor_kwargs.{name}")


@pytest.mark.parametrize("schema", ["no JSON", "[1]", '{"type": "nothing"}', 5, {"type": "nothing"}], ids=str)
def test_a_bad_schema_in_structured_outputs_is_named(server: RunningServer, schema: Any) -> None:
    response = server.chat(structured_outputs={"json": schema})
    refused(response, "invalid_json_schema", "structured_outputs.json")


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "messages[0].content[0].video_url"),
        ({"type": "video_url", "video_url": {}}, "messages[0].content[0].video_url"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0].type"),
        ({"type": "file", "file": {}}, "messages[0].content[0].file"),
        ({"text": "no type"}, "messages[0].content[0].type"),
        ({"type": "image_url"}, WHERE),
        ({"type": "image_url", "image_url": {"url": 5}}, WHERE),
        ({"type": "image_url", "image_url": {"url": image_url(), "detail": "ultra"}}, WHERE),
        ({"type": "text"}, "messages[0].content[0].text"),
        (5, "messages[0].content[0].type"),
    ],
)
def test_a_part_that_cannot_be_read_is_named(server: RunningServer, part: Any, param: str) -> None:
    response = server.chat([part])
    assert response.status_code == 400 and error_of(response)["param"] == param


@pytest.mark.parametrize("name", ["tokenize", "messages", "tools", "eos_token"])
def test_template_settings_that_are_not_the_clients_are_refused(server: RunningServer, name: str) -> None:
    response = server.chat(chat_template_kwargs={name: True})
    assert response.status_code == 400 and str(error_of(response)["param"]).startswith("chat_template_kwargs")


SCHEMAS: dict[str, Any] = {
    "endless reference": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "catastrophic pattern": {"type": "string", "pattern": "(a+)+b(?=c)"},
    "invalid pattern": {"type": "string", "pattern": "("},
    "remote reference": {"$ref": "http://127.0.0.1/schema.json"},
    "ten megabytes": {"enum": ["a" * 1000 + str(i) for i in range(10_000)]},
    "no schema": None,
    "a number": 5,
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_cannot_be_used_is_refused(server: RunningServer, name: str) -> None:
    response_options = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMAS[name]}}
    response = server.chat(response_format=response_options)
    assert response.status_code == 400 and str(error_of(response)["param"]).startswith("response_format")
