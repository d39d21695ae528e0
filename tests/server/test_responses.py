"""POST /v1/responses as OpenAI's client uses it, against a running server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from tests.helpers.media.images import make_photo, png
from tests.helpers.servers.later import Later
from tests.helpers.servers.serving import (
    MODEL,
    RunningServer,
    as_url,
    chat_body,
    error_of,
    image_url,
    photo_part,
    text_part,
)

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
}
GREEDY = {"temperature": 0, "max_output_tokens": 8}
LONG: Any = {"temperature": 0, "max_output_tokens": 24, "extra_body": {"ignore_eos": True}}


class Invoice(BaseModel):
    number: int
    paid: bool


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)


def ask(server: RunningServer, given: Any = "What is this?", **fields: Any) -> Any:
    return server.post("/v1/responses", {"model": MODEL, "input": given, **GREEDY, **fields})


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **fields}


def text(words: str = "What is this?") -> dict[str, Any]:
    return {"type": "input_text", "text": words}


# --- whole answers ------------------------------------------------------------------------------------------------


def test_a_response_has_the_text_of_the_chat_it_stands_for(server: RunningServer, client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="What is this?", **LONG)
    chat = server.chat(max_tokens=24, ignore_eos=True).json()
    assert answer.output_text == chat["choices"][0]["message"]["content"]


def test_instructions_are_the_system_message(server: RunningServer) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    chat = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0}).json()
    answer = ask(server, "Hello", instructions="Be short.").json()
    assert answer["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_a_image_is_a_bare_string_and_its_tokens_are_counted(client: openai.OpenAI) -> None:
    given: Any = user(image(image_url(640, 480)), text())
    usage = client.responses.create(model=MODEL, input=given, max_output_tokens=4).usage
    assert usage is not None and usage.input_tokens > 391
    assert usage.input_tokens_details.image_tokens == 391  # type: ignore[attr-defined]
    assert isinstance(usage.input_tokens_details.cache_write_tokens, int)


def test_low_detail_costs_fewer_tokens(server: RunningServer) -> None:
    def tokens(detail: str) -> int:
        body = {"input": user(image(image_url(1280, 720), detail=detail))}
        return int(server.post("/v1/responses/input_tokens", body).json()["input_tokens"])

    assert tokens("low") < tokens("high") == tokens("auto") == tokens("original")


def test_a_repeated_input_is_found_in_the_cache(server: RunningServer) -> None:
    question = "words that fill more than one block of the cache " * 6
    ask(server, question)
    assert ask(server, question).json()["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_an_answer_cut_by_its_length_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hello", **LONG)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == 24


def test_the_input_is_counted_as_it_is_charged(server: RunningServer, client: openai.OpenAI) -> None:
    given: Any = user(image(image_url(300, 200)), text())
    count = client.responses.input_tokens.count(model=MODEL, input=given).input_tokens
    assert count == ask(server, given).json()["usage"]["input_tokens"]


def test_a_conversation_is_sent_as_items(server: RunningServer) -> None:
    """Text, a call and its result are the messages that a chat has for them."""
    arguments = '{"city":"Oslo"}'
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [text_part("Let me see.")], "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    count = server.post("/v1/responses/input_tokens", {"input": items}).json()["input_tokens"]
    assert count == server.post("/v1/bill", {"messages": messages}).json()["prompt_tokens"]


def test_a_tool_may_answer_with_a_image(server: RunningServer) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    seen = {"type": "function_call_output", "call_id": "c1", "output": [image(image_url(64, 64))]}
    body = ask(server, [{"role": "user", "content": "Look."}, call, seen]).json()
    assert body["usage"]["input_tokens_details"]["image_tokens"] > 0


def test_what_was_asked_is_repeated_in_the_response(server: RunningServer) -> None:
    body = ask(server, metadata={"run": "7"}, store=True, instructions="Be short.", top_p=0.5).json()
    assert body["metadata"] == {"run": "7"} and body["instructions"] == "Be short." and body["top_p"] == 0.5
    assert body["store"] is False and body["previous_response_id"] is None


def test_the_client_parses_an_answer_to_a_schema(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model=MODEL, input="Read the invoice.", text_format=Invoice, temperature=0, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Invoice)


def test_json_object_gives_an_object(server: RunningServer) -> None:
    body = ask(server, text={"format": {"type": "json_object"}}).json()
    assert body["output"][0]["content"][0]["text"].lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_required_tool_is_called(client: openai.OpenAI, choice: Any) -> None:
    answer = client.responses.create(
        model=MODEL, input="Weather?", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, temperature=0
    )
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "weather" and answer.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")


def test_a_call_and_its_result_go_back_as_they_came(client: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": "Weather?"}]
    named: Any = {"type": "function", "name": "weather"}
    first = client.responses.create(model=MODEL, input=question, tools=[WEATHER], tool_choice=named, temperature=0)
    (call,) = first.output
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = client.responses.create(
        model=MODEL, input=[*question, call.to_dict(), result], tools=[WEATHER], max_output_tokens=4
    )
    assert again.output


def test_no_tools_may_be_said_with_an_empty_list(server: RunningServer) -> None:
    assert ask(server, tools=[], tool_choice="auto").status_code == 200


# --- streams ------------------------------------------------------------------------------------------------------


def test_a_stream_tells_the_events_in_order(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="Hello", stream=True, **LONG))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_deltas_add_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="Hello", **LONG).output_text
    events = list(client.responses.create(model=MODEL, input="Hello", stream=True, **LONG))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole


def test_the_clients_own_stream_ends_with_a_parsed_response(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input="Read it.", text_format=Invoice, temperature=0, max_output_tokens=200
    ) as stream:
        final = stream.until_done().get_final_response()
    assert isinstance(final.output_parsed, Invoice) and final.usage is not None


def test_a_streamed_call_tells_its_arguments(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "name": "weather"}
    events = list(
        client.responses.create(
            model=MODEL, input="Weather?", tools=[WEATHER], tool_choice=named, temperature=0, stream=True
        )
    )
    kinds = [event.type.removeprefix("response.") for event in events]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert pieces and kinds[2] == "output_item.added" and kinds[3] == "function_call_arguments.delta"
    assert kinds[3 + len(pieces) :] == ["function_call_arguments.done", "output_item.done", "completed"]
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert done.arguments == "".join(pieces) and json.loads(done.arguments)["city"] in ("Oslo", "Rome")


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("previous_response_id", "resp_1"), ("conversation", "c"), ("background", True), ("prompt", {"id": "p"})],
)
def test_what_needs_a_memory_is_refused_by_name(server: RunningServer, name: str, value: Any) -> None:
    response = ask(server, **{name: value})
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == name and "no state" in error["message"]


PDF = image(as_url(b"%PDF-1.7"))
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": None}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "reasoning", "content": [1]}]}, "input[0].content"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
    ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": user(5)}, "input[0].content[0]"),
    ({"input": user({"type": "input_file"})}, "input[0].content[0]"),
    ({"input": user({"type": "input_image"})}, "input[0].content[0].image_url"),
    ({"input": user(image("http://example.com/a.png"))}, "input[0].content[0].image_url"),
    ({"input": user(image("file:///etc/passwd"))}, "input[0].content[0].image_url"),
    ({"input": user(image(image_url(), detail="ultra"))}, "input[0].content[0].image_url"),
    ({"input": [*user(text()), *user(text(), PDF)], "instructions": "x"}, "input[1].content[1].image_url"),
    ({"input": user(*[image(image_url())] * 5)}, "input"),
    ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "name": "a", "arguments": "{"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": [PDF]}]}, "input[0].output[0].image_url"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 1.5}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": "all"}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a", "parameters": 5}]}, "tools[0].parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "schema": {"$ref": "http://127.0.0.1/a"}}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda v: str(v)[:40])
def test_what_cannot_be_read_is_named_in_the_clients_words(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    response = ask(server, **fields)
    assert response.status_code == 400 and error_of(response)["param"] == param, response.text


def test_a_range_is_told_with_the_name_the_client_used(server: RunningServer) -> None:
    assert error_of(ask(server, max_output_tokens=-1))["message"].startswith("max_output_tokens must be")


def test_a_image_that_cannot_be_decoded_is_a_400_also_in_a_stream(server: RunningServer) -> None:
    data = png(make_photo(400, 300, seed=41))
    broken = user(text(), image(as_url(data[: len(data) // 2])))
    for stream in (False, True):
        response = ask(server, broken, stream=stream)
        assert response.status_code == 400 and error_of(response)["code"] == "image_parse_error"


def test_the_client_raises_our_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="other", input="Hello")
    assert caught.value.code == "model_not_found"


def test_a_chat_and_a_response_share_the_cache(server: RunningServer) -> None:
    part = photo_part(210, 120, seed=77)
    server.chat([part, text_part("What?")])
    before = server.stats("saccade:pictures_decoded_total")
    ask(server, user(image(image_url(210, 120, seed=77)), text("Something else?")))
    assert server.stats("saccade:pictures_decoded_total") == before


def test_a_normal_chat_works_after_all_of_them(server: RunningServer) -> None:
    assert server.post("/v1/chat/completions", chat_body()).status_code == 200
    assert server.stats("saccade:kv_blocks_used") == 0
