"""POST /v1/messages as Anthropic's client uses it, against a running server."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.helpers.media.images import make_photo, png
from tests.helpers.servers.later import Later
from tests.helpers.servers.serving import MODEL, RunningServer, events_of, photo_part, text_part

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = Later("anthropic")

BUILTIN = "saccade-builtin"  # of the server that has a key
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
}
ANY: Any = {"type": "any", "disable_parallel_tool_use": True}
GREEDY: Any = {"max_tokens": 100, "extra_body": {"temperature": 0}}
LONG: Any = {"max_tokens": 24, "extra_body": {"temperature": 0, "ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="EMPTY", max_retries=0)


def user(*blocks: Any) -> Any:
    return [{"role": "user", "content": list(blocks)}]


def hello(words: str = "What is this?") -> Any:
    return [{"role": "user", "content": words}]


def text(words: str = "What is this?") -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(width: int = 112, height: int = 84, seed: int = 0) -> dict[str, Any]:
    return picture(png(make_photo(width, height, seed)))


def picture(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}


def ask(server: RunningServer, **fields: Any) -> httpx.Response:
    return server.post("/v1/messages", {"messages": hello(), "max_tokens": 8, "temperature": 0, **fields})


def error_of(response: httpx.Response) -> dict[str, str]:
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error", body
    assert body["request_id"] == response.headers["request-id"]
    return dict(body["error"])


# --- whole answers ------------------------------------------------------------------------------------------------


def test_a_message_has_the_text_of_the_chat_it_stands_for(server: RunningServer, client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, messages=hello(), **LONG)
    (block,) = answer.content
    chat = server.chat(max_tokens=24, ignore_eos=True).json()
    assert block.type == "text" and block.text == chat["choices"][0]["message"]["content"]
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 24


@pytest.mark.parametrize("system", ["Be short.", [{"type": "text", "text": "Be short."}]], ids=["string", "blocks"])
def test_the_system_prompt_is_the_system_message(server: RunningServer, system: Any) -> None:
    body = {"system": system, "messages": hello()}
    count = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    messages = [{"role": "system", "content": "Be short."}, *hello()]
    assert count == server.post("/v1/bill", {"messages": messages}).json()["prompt_tokens"]


def test_a_image_costs_what_it_costs_in_a_chat(server: RunningServer, client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model=MODEL, messages=user(image(640, 480), text())).input_tokens
    chat = {"messages": user(photo_part(640, 480), text_part("What is this?"))}
    assert count == server.post("/v1/bill", chat).json()["prompt_tokens"]


def test_the_count_is_what_is_charged(client: anthropic.Anthropic) -> None:
    messages = user(image(200, 300, seed=8), text())
    usage = client.messages.create(model=MODEL, messages=messages, max_tokens=2).usage
    charged = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert charged == client.messages.count_tokens(model=MODEL, messages=messages).input_tokens


def test_what_is_found_in_the_cache_is_told_apart(server: RunningServer) -> None:
    question = hello("words that fill more than one block of the cache " * 6)
    ask(server, messages=question)
    usage = ask(server, messages=question).json()["usage"]
    assert usage["cache_read_input_tokens"] > 0 and usage["input_tokens"] > 0


def test_a_stop_sequence_ends_the_answer_and_is_named(server: RunningServer) -> None:
    whole = ask(server, max_tokens=24, ignore_eos=True).json()["content"][0]["text"]
    stop = whole[5]
    body = ask(server, max_tokens=24, ignore_eos=True, stop_sequences=[stop]).json()
    assert body["stop_reason"] == "stop_sequence" and body["stop_sequence"] == stop
    assert body["content"][0]["text"] == whole[: whole.index(stop)]


def test_an_answer_that_ends_by_itself_says_end_turn(server: RunningServer) -> None:
    form = {"format": {"type": "json_schema", "schema": {"enum": [1, 2]}}}
    body = ask(server, output_config=form, max_tokens=50).json()
    assert body["stop_reason"] == "end_turn" and body["content"][0]["text"].strip() in ("1", "2")


@pytest.mark.parametrize("choice", [ANY, {"type": "tool", "name": "weather"}], ids=["any", "named"])
def test_a_required_tool_is_used(client: anthropic.Anthropic, choice: Any) -> None:
    answer = client.messages.create(
        model=MODEL, messages=hello("Weather?"), tools=[WEATHER], tool_choice=choice, **GREEDY
    )
    (block,) = answer.content
    assert answer.stop_reason == "tool_use" and block.type == "tool_use" and block.name == "weather"
    assert block.input["city"] in ("Oslo", "Rome")  # type: ignore[index]


def test_a_conversation_with_a_tool_is_the_chat_with_it(server: RunningServer) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}
    turns = [*hello("Weather?"), {"role": "assistant", "content": [text("Let me see."), use]}]
    count = server.post("/v1/messages/count_tokens", {"messages": [*turns, *user(result, text("And now?"))]}).json()
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    messages = [
        *hello("Weather?"),
        {"role": "assistant", "content": [text_part("Let me see.")], "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "t1"},
        {"role": "user", "content": [text_part("And now?")]},
    ]
    assert count["input_tokens"] == server.post("/v1/bill", {"messages": messages}).json()["prompt_tokens"]


def test_a_tools_result_may_hold_a_image(client: anthropic.Anthropic) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    looked: Any = [*hello("Look."), {"role": "assistant", "content": [use]}]

    def count(content: Any) -> int:
        result: Any = user({"type": "tool_result", "tool_use_id": "t1", "content": content})
        return client.messages.count_tokens(model=MODEL, messages=[*looked, *result]).input_tokens

    assert count([text("Here:"), image(640, 480)]) == count([text("Here:")]) + 391 + 2  # and its two marks
    assert client.messages.create(
        model=MODEL,
        messages=[*looked, *user({"type": "tool_result", "tool_use_id": "t1", "content": [image()]})],
        max_tokens=2,
    ).content


def test_fields_that_need_not_be_heeded_do_no_harm(server: RunningServer) -> None:
    marked = {**text(), "cache_control": {"type": "ephemeral"}}
    fields = {"metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": {"type": "disabled"}, "tools": []}
    assert ask(server, messages=user(marked), **fields).status_code == 200


# --- streams ------------------------------------------------------------------------------------------------------


def test_a_stream_tells_the_events_in_order(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(model=MODEL, messages=hello(), stream=True, **LONG))
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 1
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]


def test_the_stream_adds_up_to_the_whole_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model=MODEL, messages=hello(), **LONG)
    with client.messages.stream(model=MODEL, messages=hello(), **LONG) as stream:
        final = stream.get_final_message()
    assert [block.to_dict()["text"] for block in final.content] == [block.to_dict()["text"] for block in whole.content]
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 24


def test_a_streamed_tool_use_adds_up_to_its_input(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model=MODEL, messages=hello("Weather?"), tools=[WEATHER], tool_choice=ANY, **GREEDY
    ) as stream:
        final = stream.get_final_message()
    (block,) = final.content
    assert block.type == "tool_use" and block.input["city"] in ("Oslo", "Rome")  # type: ignore[index]
    assert final.stop_reason == "tool_use"


def test_a_stream_ends_without_the_mark_of_the_other_apis(server: RunningServer) -> None:
    assert "[DONE]" not in events_of(ask(server, stream=True).text.splitlines())


# --- what is refused ----------------------------------------------------------------------------------------------

FILE = {"type": "image", "source": {"type": "file"}}
URL = {"type": "image", "source": {"type": "url", "url": "http://example.com/a.png"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [text(), picture(b"%PDF-1.7")]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "system", "content": "a"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [*hello(), {"role": "assistant", "content": "It is"}]}, "messages"),
    ({"messages": user(5)}, "messages[0].content[0].type"),
    ({"messages": user({"type": "search_result"})}, "messages[0].content[0].type"),
    ({"messages": user({"type": "document"})}, "messages[0].content[0].source"),
    ({"messages": user({"type": "text"})}, "messages[0].content[0].text"),
    ({"messages": user(text(), FILE)}, "messages[0].content[1].source"),
    ({"messages": user(text(), URL)}, "messages[0].content[1].source"),
    ({"messages": user({"type": "image"})}, "messages[0].content[0].source"),
    ({"messages": user({"type": "image", "source": {"type": "base64", "data": 5}})}, "messages[0].content[0].source"),
    ({"messages": user(picture(b"%PDF-1.7")), "system": "x"}, "messages[0].content[0].source"),
    ({"messages": user(text(), RESULT)}, "messages[0].content[1].content[1].source"),
    ({"messages": user({"type": "tool_use", "name": "a", "input": {}})}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, *hello()]}, "messages[0].content[0]"),
    ({"messages": user(*[image()] * 5)}, "messages"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "text"}]}, "system[0].text"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": -9}, "top_k"),
    ({"stop_sequences": ["a"] * 1000}, "stop_sequences"),
    ({"stop_sequences": [5]}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema"),
    ({"tool_choice": ANY}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "all"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"thinking": {"type": "often"}}, "thinking.type"),
    ({"container": "c"}, "container"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"pattern": "("}}}}, "output_config.format"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "where"), BAD, ids=lambda v: str(v)[:40])
def test_what_cannot_be_read_is_named_in_the_message(
    server: RunningServer, fields: dict[str, Any], where: str, stream: bool
) -> None:
    response = ask(server, **fields, stream=stream)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error" and error["message"].startswith(where), error
    assert response.headers["x-should-retry"] == "false"


def test_counting_needs_no_length_and_refuses_the_same(server: RunningServer) -> None:
    response = server.post("/v1/messages/count_tokens", {"messages": user(FILE)})
    assert error_of(response)["message"].startswith("messages[0].content[0].source")


@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_image_is_the_clients_error(server: RunningServer, stream: bool) -> None:
    data = png(make_photo(400, 300, seed=43))
    response = ask(server, messages=user(picture(data[: len(data) // 2])), stream=stream)
    assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"


def test_the_client_raises_an_unknown_model_as_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="other", messages=hello(), max_tokens=2)
    assert caught.value.request_id is not None


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [("/v1/messages", 405, "invalid_request_error"), ("/v1/messages/batches", 404, "not_found_error")],
)
def test_paths_below_messages_have_errors_of_that_form(
    server: RunningServer, path: str, status: int, kind: str
) -> None:
    response = server.get(path)
    assert response.status_code == status and error_of(response)["type"] == kind


def test_a_body_that_is_too_large_has_its_own_type(server: RunningServer) -> None:
    with server.client() as client:
        headers = {"content-type": "application/json"}
        response = client.post("/v1/messages", content=b"a" * (97 << 20), headers=headers)
    assert response.status_code == 413 and error_of(response)["type"] == "request_too_large"


# --- keys ---------------------------------------------------------------------------------------------------------


def test_the_client_sends_its_key_in_a_header_of_its_own(page_server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=page_server.url, api_key=page_server.key, max_retries=0)
    assert client.messages.create(model=BUILTIN, messages=hello(), max_tokens=2).content


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("headers", [{}, {"x-api-key": "wrong"}, {"x-api-key": ""}, {"authorization": "Bearer wrong"}])
def test_a_wrong_key_is_refused_in_that_form(page_server: RunningServer, path: str, headers: dict[str, str]) -> None:
    with page_server.stranger(**headers) as client:
        response = client.post(path, json={})
    assert response.status_code == 401 and error_of(response)["type"] == "authentication_error"


def test_the_client_raises_a_wrong_key_as_such(page_server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=page_server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model=BUILTIN, messages=hello(), max_tokens=2)


def test_a_normal_chat_works_after_all_of_them(server: RunningServer) -> None:
    assert server.answers() and server.stats("saccade:kv_blocks_used") == 0
