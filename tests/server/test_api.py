"""The API as clients see it: shapes, fields, streams of a running server."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.helpers.servers.serving import (
    MODEL,
    RunningServer,
    chat_body,
    error_of,
    events_of,
    image_url,
    photo_part,
    text_part,
    until,
)

LONG = {"max_tokens": 24, "ignore_eos": True}


def stream(server: RunningServer, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[Any]:
    with server.client() as client, client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(list(response.iter_lines()))


def text_of(events: list[Any]) -> str:
    chunks = [event for event in events if event != "[DONE]"]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


# --- chat completions ---------------------------------------------------------------------------------------------


def test_a_chat_answer_has_the_shape_of_openai(server: RunningServer) -> None:
    body = server.chat().json()
    assert body["object"] == "chat.completion" and body["model"] == MODEL and body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant" and isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] in ("stop", "length")
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_usage_tells_image_tokens_from_text_tokens(server: RunningServer) -> None:
    usage = server.chat([photo_part(640, 480), text_part("What?")]).json()["usage"]
    details = usage["prompt_tokens_details"]
    assert details["image_tokens"] == 391 and details["video_tokens"] == 0
    assert details["text_tokens"] == usage["prompt_tokens"] - 391


def test_a_stream_gives_the_same_text_as_a_whole_answer(server: RunningServer) -> None:
    whole = server.chat(**LONG).json()["choices"][0]["message"]["content"]
    assert text_of(stream(server, chat_body(**LONG))) == whole


def test_a_stream_begins_with_the_role_and_ends_with_done(server: RunningServer) -> None:
    events = stream(server, chat_body(**LONG))
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1] == "[DONE]"
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}


def test_a_stream_has_no_usage_unless_it_is_asked_for(server: RunningServer) -> None:
    assert all("usage" not in event for event in stream(server, chat_body())[:-1])


def test_include_usage_adds_one_chunk_without_choices(server: RunningServer) -> None:
    events = stream(server, chat_body(stream_options={"include_usage": True}))
    *chunks, last, done = events
    assert done == "[DONE]" and last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks)


def test_continuous_usage_counts_in_every_chunk(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(server, chat_body(**LONG, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts) and counts[-1] == 24 and counts[0] < 24


def test_n_answers_come_back_under_their_indices(server: RunningServer) -> None:
    body = server.chat(n=3, temperature=1.5, seed=1, **LONG).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in body["choices"]}) > 1
    assert body["usage"]["completion_tokens"] == 72


def test_a_seed_repeats_the_answer(server: RunningServer) -> None:
    first, second = (
        server.chat(temperature=1.2, seed=7, **LONG).json()["choices"][0]["message"]["content"] for _ in range(2)
    )
    assert first == second


def test_a_stop_string_ends_the_answer_and_is_not_shown(server: RunningServer) -> None:
    text = server.chat(**LONG).json()["choices"][0]["message"]["content"]
    stop = text[5]
    choice = server.chat(stop=[stop], **LONG).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
    assert choice["message"]["content"] == text[: text.index(stop)]


def test_a_stop_string_is_shown_when_it_is_asked_for(server: RunningServer) -> None:
    text = server.chat(**LONG).json()["choices"][0]["message"]["content"]
    shown = server.chat(stop=text[5], include_stop_str_in_output=True, **LONG).json()["choices"][0]
    assert shown["message"]["content"] == text[: text.index(text[5]) + 1]


def test_an_answer_ended_by_a_stop_string_still_knows_what_was_cached(server: RunningServer) -> None:
    question = "a prompt that is long enough to fill several blocks of the cache " * 4
    text = server.chat(question, **LONG).json()["choices"][0]["message"]["content"]
    usage = server.chat(question, stop=text[5], **LONG).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_max_completion_tokens_wins_over_max_tokens(server: RunningServer) -> None:
    body = server.chat(max_tokens=9, max_completion_tokens=3, ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == 3


def test_logprobs_have_one_entry_per_token_with_alternatives(server: RunningServer) -> None:
    choice = server.chat(logprobs=True, top_logprobs=3, ignore_eos=True).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 4 and all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["logprob"] <= 0 for entry in content)
    assert content[0]["token"] == content[0]["top_logprobs"][0]["token"]


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(server: RunningServer) -> None:
    fields: dict[str, Any] = {"logprobs": True, **LONG}
    whole = server.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    chunks = stream(server, chat_body(**fields))[:-1]
    parts = [entry["token"] for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert parts == [entry["token"] for entry in whole]


def test_token_ids_are_returned_when_they_are_asked_for(server: RunningServer) -> None:
    body = server.chat(return_token_ids=True, ignore_eos=True).json()
    assert len(body["choices"][0]["token_ids"]) == 4
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]


def test_the_bill_of_an_answer_names_each_image(server: RunningServer) -> None:
    body = server.chat([photo_part(640, 480), text_part("What?")], include_bill=True).json()
    (item,) = body["bill"]["items"]
    assert (item["width"], item["height"], item["tokens"]) == (640, 480, 391)
    assert {"queue", "decode", "encode", "first_token", "total"} <= set(body["bill"]["times_ms"])


def test_a_repeated_image_is_not_decoded_again(server: RunningServer) -> None:
    part = photo_part(300, 200, seed=99)
    server.chat([part, text_part("What?")])
    before = server.stats("saccade:pictures_decoded_total")
    server.chat([text_part("Something else:"), part])
    assert server.stats("saccade:pictures_decoded_total") == before


def test_detail_low_costs_fewer_tokens(server: RunningServer) -> None:
    def tokens(detail: str) -> int:
        parts = [photo_part(1280, 720, detail=detail), text_part("What?")]
        return int(server.post("/v1/bill", chat_body(parts)).json()["image_tokens"])

    assert tokens("low") < tokens("high") == tokens("auto") == tokens("original")


def test_a_request_may_ask_for_fewer_pixels(server: RunningServer) -> None:
    parts = [photo_part(640, 480), text_part("What?")]
    bill = server.post("/v1/bill", chat_body(parts, mm_processor_kwargs={"max_pixels": 28 * 28 * 50})).json()
    assert bill["image_tokens"] <= 50


def test_ignored_and_unknown_fields_do_no_harm(server: RunningServer) -> None:
    extra = {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "something_new": 1, "stream": False}
    assert server.chat(**extra).status_code == 200
    assert until(lambda: any("something_new" in line for line in server.log))


@pytest.mark.parametrize("field", ["functions", "audio", "chat_template", "suffix", "prompt_embeds"])
def test_a_known_but_unsupported_field_is_named(server: RunningServer, field: str) -> None:
    response = server.chat(**{field: [1]})
    assert response.status_code == 400
    assert (error_of(response)["param"], error_of(response)["code"]) == (field, "unsupported")


def test_tokens_of_log_probabilities_may_be_shown_as_ids(server: RunningServer) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    as_text, as_ids = (server.chat(**fields, return_tokens_as_token_ids=shown).json() for shown in (False, True))
    (choice,), (plain,) = as_ids["choices"], as_text["choices"]
    entries = choice["logprobs"]["content"]
    shown = [entry["token"] for entry in entries]
    assert shown == [f"token_id:{token}" for token in choice["token_ids"][: len(entries)]]
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
    assert [entry["bytes"] for entry in entries] == [entry["bytes"] for entry in plain["logprobs"]["content"]]
    body = {"prompt": "a", "max_tokens": 3, "logprobs": 1, "temperature": 0}
    texts, ids = (
        server.post("/v1/completions", {**body, "return_tokens_as_token_ids": shown}).json()["choices"][0]["logprobs"]
        for shown in (False, True)
    )
    assert all(
        token.startswith("token_id:")
        for token in (*ids["tokens"], *(name for top in ids["top_logprobs"] for name in top))
    )
    assert (ids["text_offset"], ids["token_logprobs"]) == (texts["text_offset"], texts["token_logprobs"])


def test_a_image_may_be_named_again_by_its_uuid(server: RunningServer) -> None:
    named = {**photo_part(64, 64, seed=5), "uuid": "cat"}
    first = server.chat([named, text_part("What?")]).json()
    again = server.chat([{"type": "image_url", "image_url": None, "uuid": "cat"}, text_part("What?")]).json()
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


def test_the_same_uuid_with_other_bytes_means_the_other_bytes(server: RunningServer) -> None:
    for size in (64, 128):
        named = {**photo_part(size, size), "uuid": "dog"}
        answer = server.chat([named, text_part("What?")]).json()
    again = server.chat([{"type": "image_url", "uuid": "dog"}, text_part("What?")]).json()
    assert again["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_a_uuid_is_not_found_under_another_salt(server: RunningServer) -> None:
    server.chat([{**photo_part(64, 64), "uuid": "bird"}, text_part("?")], cache_salt="a")
    response = server.chat([{"type": "image_url", "uuid": "bird"}, text_part("?")], cache_salt="b")
    assert response.status_code == 400 and error_of(response)["code"] == "image_file_not_found"


def test_a_salt_keeps_the_prefix_cache_apart(server: RunningServer) -> None:
    question = "shared words that fill more than one block of the cache " * 4
    server.chat(question, cache_salt="first")

    def cached(salt: str) -> int:
        return int(server.chat(question, cache_salt=salt).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("first") > 0
    assert cached("second") == 0


def test_control_tokens_stay_hidden_unless_they_are_asked_for(server: RunningServer) -> None:
    (token,) = server.post("/tokenize", {"prompt": "<|vision_pad|>"}).json()["tokens"]
    bias = {"logit_bias": {str(token): 100}, "ignore_eos": True, "max_tokens": 2}
    assert server.chat(**bias).json()["choices"][0]["message"]["content"] == ""
    shown = server.chat(**bias, skip_special_tokens=False).json()["choices"][0]["message"]["content"]
    assert shown == "<|vision_pad|>" * 2


# --- tools and forms ----------------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,  # a random model would write whatever else may be there
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_required_tool_is_called_with_arguments_of_its_schema(server: RunningServer, choice: Any) -> None:
    asked = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    (answer,) = server.chat(**asked, max_tokens=100).json()["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls" and call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")


def test_a_streamed_tool_call_adds_up_to_the_whole_one(server: RunningServer) -> None:
    fields = {"tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 100}
    (call,) = server.chat(**fields).json()["choices"][0]["message"]["tool_calls"]
    events = stream(server, chat_body(**fields))[:-1]
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert deltas[0]["function"]["name"] == "weather"
    assert "".join(delta["function"].get("arguments", "") for delta in deltas) == call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tools_that_may_be_called_need_not_be(server: RunningServer) -> None:
    assert server.chat(tools=[WEATHER]).status_code == 200


BOUNDED = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": BOUNDED}}},
        {"structured_outputs": {"json": BOUNDED}},
        {"structured_outputs": {"json": json.dumps(BOUNDED)}},
    ],
    ids=["response_format", "structured_outputs", "structured_outputs as text"],
)
def test_an_answer_follows_the_schema_it_was_given(server: RunningServer, fields: dict[str, Any]) -> None:
    (answer,) = server.chat(**fields, max_tokens=200).json()["choices"]
    assert json.loads(answer["message"]["content"])["a"] in (1, 2)


def test_json_object_gives_an_object(server: RunningServer) -> None:
    (answer,) = server.chat(response_format={"type": "json_object"}, max_tokens=20).json()["choices"]
    assert answer["message"]["content"].lstrip().startswith("{")


# --- other routes -------------------------------------------------------------------------------------------------


def test_completions_take_text_lists_and_token_ids(server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": "The quick"}).json()["tokens"]
    fields = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    texts = []
    for prompt in ("The quick", ["The quick", "brown"], ids, [ids]):
        body = server.post("/v1/completions", {"prompt": prompt, **fields}).json()
        assert body["object"] == "text_completion"
        texts.append(body["choices"][0]["text"])
    assert len(set(texts)) == 1


def test_completions_stop_after_sixteen_tokens_by_default(server: RunningServer) -> None:
    body = server.post("/v1/completions", {"prompt": "The quick", "ignore_eos": True}).json()
    assert body["usage"]["completion_tokens"] == 16


def test_streamed_completions_add_up_to_the_whole(server: RunningServer) -> None:
    fields = {"prompt": ["The quick", "brown fox"], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    whole = server.post("/v1/completions", fields).json()["choices"]
    texts = ["", ""]
    for event in stream(server, fields, "/v1/completions")[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]


def test_completions_repeat_their_prompts_if_asked(server: RunningServer) -> None:
    fields = {"prompt": ["The quick", "brown fox"], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "n": 2}
    plain = [choice["text"] for choice in server.post("/v1/completions", fields).json()["choices"]]
    echoed = [choice["text"] for choice in server.post("/v1/completions", {**fields, "echo": True}).json()["choices"]]
    prompts = ["The quick", "The quick", "brown fox", "brown fox"]
    assert echoed == [prompt + text for prompt, text in zip(prompts, plain, strict=True)]
    texts = [""] * 4
    for event in stream(server, {**fields, "echo": True}, "/v1/completions")[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == echoed


def test_requests_are_limited_to_tokens_and_cut(server: RunningServer) -> None:
    fields = {"prompt": "The quick brown fox", "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    limits = {"allowed_token_ids": [40, 41], "truncate_prompt_tokens": 3, "bad_words": ["fox"]}
    body = server.post("/v1/completions", {**fields, **limits, "add_special_tokens": False}).json()
    assert set(body["choices"][0]["token_ids"]) <= {40, 41} and len(body["prompt_token_ids"]) == 3


def test_a_chat_goes_on_with_the_assistant_s_last_message(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "There are"}]
    body = {"messages": messages, "max_tokens": 2, "return_token_ids": True}
    ids = [
        server.post("/v1/chat/completions", {**body, "continue_final_message": on}).json()["prompt_token_ids"]
        for on in (True, False)
    ]
    assert len(ids[0]) < len(ids[1]) and ids[1][: len(ids[0])] == ids[0]


def test_completion_logprobs_have_the_older_shape(server: RunningServer) -> None:
    body = server.post("/v1/completions", {"prompt": "a", "max_tokens": 3, "logprobs": 2, "ignore_eos": True}).json()
    logprobs = body["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 3


def test_the_model_card_tells_lengths_limits_and_prices(server: RunningServer) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert card["id"] == MODEL and card["max_model_len"] == 4096
    assert card["multimodal"]["limit_per_prompt"]["image"] == 4
    assert card["multimodal"]["tokens_per_picture"]["640x480"] == 391
    assert server.get(f"/v1/models/{MODEL}").json() == card


def test_models_say_how_large_the_kv_cache_is(server: RunningServer) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert card["kv_cache"]["block_size"] == 16
    assert until(lambda: server.stats("saccade:kv_blocks_total") == card["kv_cache"]["blocks"])


def test_an_unknown_model_is_a_404(server: RunningServer) -> None:
    for response in (server.get("/v1/models/other"), server.chat(model="other")):
        assert response.status_code == 404 and error_of(response)["code"] == "model_not_found"


def test_the_bill_is_what_the_engine_charges(server: RunningServer) -> None:
    body = chat_body([photo_part(333, 222), text_part("What is this?")])
    bill = server.post("/v1/bill", body).json()
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    assert bill["prompt_tokens"] == usage["prompt_tokens"]
    assert bill["image_tokens"] == usage["prompt_tokens_details"]["image_tokens"]


def test_the_bill_runs_nothing(server: RunningServer) -> None:
    before = server.stats("saccade:pictures_decoded_total"), server.stats("saccade:steps_total")
    server.post("/v1/bill", chat_body([photo_part(100, 100, seed=1234), text_part("?")]))
    assert (server.stats("saccade:pictures_decoded_total"), server.stats("saccade:steps_total")) == before


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    body = server.post("/tokenize", {"prompt": "The quick brown fox", "return_token_strs": True}).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert server.post("/detokenize", {"tokens": body["tokens"]}).json()["prompt"] == "The quick brown fox"


def test_tokenize_expands_the_images_of_a_chat(server: RunningServer) -> None:
    body = chat_body([photo_part(640, 480), text_part("What?")])
    count = server.post("/tokenize", {"messages": body["messages"]}).json()["count"]
    assert count == server.post("/v1/bill", body).json()["prompt_tokens"]


def test_input_tokens_count_the_responses_form_of_a_chat(server: RunningServer) -> None:
    parts = [{"type": "input_image", "image_url": image_url(640, 480)}, {"type": "input_text", "text": "What?"}]
    body = server.post("/v1/responses/input_tokens", {"input": [{"role": "user", "content": parts}]}).json()
    chat = chat_body([photo_part(640, 480), text_part("What?")])
    assert body["object"] == "response.input_tokens"
    assert body["input_tokens"] == server.post("/v1/bill", chat).json()["prompt_tokens"]


def test_unknown_routes_and_methods_are_errors_in_the_same_form(server: RunningServer) -> None:
    assert error_of(server.get("/v1/nothing"))["code"] == "not_found"
    assert error_of(server.get("/v1/chat/completions"))["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/live", "/health", "/ready", "/version", "/metrics", "/v1/models", "/"])
def test_reading_routes_answer_head_as_well(server: RunningServer, path: str) -> None:
    with server.client() as client:
        assert client.get(path).status_code == client.head(path).status_code == 200


def test_a_request_id_is_given_back(server: RunningServer) -> None:
    response = server.post("/v1/bill", chat_body(), headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert until(lambda: any("abc-1" in line for line in server.log))


def test_two_requests_may_carry_the_same_id(server: RunningServer) -> None:
    with server.client(**{"x-request-id": "twin"}) as client:
        body = chat_body(stream=True, **LONG)
        with client.stream("POST", "/v1/chat/completions", json=body) as open_one:
            assert client.post("/v1/chat/completions", json=chat_body()).status_code == 200
            open_one.read()


def test_the_openapi_document_describes_the_bodies(server: RunningServer) -> None:
    document = json.loads(server.get("/openapi.json").text)
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in body["properties"] and "max_completion_tokens" in body["properties"]


def test_answers_carry_headers_that_keep_browsers_safe(server: RunningServer) -> None:
    headers = server.get("/").headers
    assert headers["x-content-type-options"] == "nosniff" and "default-src 'none'" in headers["content-security-policy"]
    assert "access-control-allow-origin" not in headers


def test_the_log_says_what_was_chosen_and_no_prompt(server: RunningServer) -> None:
    server.chat("a secret question")
    assert until(lambda: any("/v1/chat/completions 200" in line for line in server.log))
    (line, *_) = [line for line in server.log if "/v1/chat/completions 200" in line]
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO \S+ POST ", line)
    assert re.search(r" ms from 127\.0\.0\.1: \d+ prompt tokens \(\d+ of media.*\), \d+ answer tokens$", line)
    log = "".join(server.log)
    assert "KV cache" in log and "such requests fit" in log and "/v1/chat/completions" in log
    assert "secret" not in log
