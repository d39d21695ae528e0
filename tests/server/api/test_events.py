"""Answers as typed events, and chats made from other APIs: against fakes, without a process or a model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.engine.ipc.client import EngineUnavailable
from saccade.errors import RequestError
from saccade.processor.dialects.parser import PLAIN
from saccade.server.api.chat import ChatEvents
from saccade.server.api.chunks import TextEvent
from saccade.server.api.content_blocks import BlockOutput
from saccade.server.api.events import EventShape, send_events
from saccade.server.api.messages import MessageEvents
from saccade.server.api.responses import ResponseEvents
from saccade.server.errors import api_error
from saccade.server.generation import Delta, Generation
from saccade.server.http.response import ResponseWriter, event_bytes
from saccade.server.request.chat import ChatRequest, read_chat
from saccade.server.request.chat_conversion import ChatBuilder, SourcePaths
from saccade.server.request.fields import FieldReader
from saccade.server.request.messages import read_message
from saccade.server.request.responses import read_response
from tests.helpers.fakes.fake_stream import Wire, new_stream, running, started, token

READER = FieldReader(strict=False)
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
LOOK = {"type": "function", "function": {"name": "look"}}


def chat(**fields: Any) -> ChatRequest:
    return read_chat({"messages": [{"role": "user", "content": "a"}], **fields}, READER)


# --- blocks -------------------------------------------------------------------------------------------------------


def told(request: ChatRequest, *texts: str, finish: str = "stop") -> tuple[BlockOutput, list[str]]:
    """The answer after these pieces, and its events in short."""
    generation: Any = SimpleNamespace(output_format=PLAIN, report_call=lambda problem: None)
    answer, events = BlockOutput(request, generation), []
    for index, text in enumerate(texts):
        piece = Delta(0, text, finish_reason=finish if index == len(texts) - 1 else None)
        for event in answer.take(piece):
            events.append(f"{event.kind} {event.block.index}")
    return answer, events


def test_a_text_is_one_block_however_it_arrives() -> None:
    answer, events = told(chat(), "Hel", "lo", "")
    assert events == ["open 0", "add 0", "add 0", "close 0"]
    assert answer.blocks[0].text == "Hello" and answer.finish_reason == "stop"


def test_text_and_calls_are_blocks_in_their_order() -> None:
    answer, events = told(chat(tools=[LOOK]), "Let me see. ", CALL, CALL, "")
    assert events == ["open 0", "add 0", "close 0", "open 1", "add 1", "close 1", "open 2", "add 2", "close 2"]
    assert [block.call is not None for block in answer.blocks] == [False, True, True]
    assert json.loads(answer.blocks[1].text) == {"at": 1} and answer.finish_reason == "tool_calls"


def test_only_one_call_is_told_when_calls_may_not_be_parallel() -> None:
    answer, _ = told(chat(tools=[LOOK], parallel_tool_calls=False), CALL + CALL)
    assert len(answer.blocks) == 1


def test_an_answer_without_a_word_is_one_empty_block() -> None:
    answer, events = told(chat(), "")
    assert events == ["open 0", "close 0"] and answer.blocks[0].text == ""


def test_the_block_in_which_the_length_ended_is_cut() -> None:
    answer, _ = told(chat(), "Hel", finish="length")
    assert answer.blocks[-1].is_cut and answer.finish_reason == "length"


# --- event shapes ------------------------------------------------------------------------------------------


def response_events(generation: Generation) -> ResponseEvents:
    request = read_response({"input": "a"}, READER)
    return ResponseEvents("m", request.chat, request.echo, "id-1", generation)


def message_events(generation: Generation) -> MessageEvents:
    request = read_message({"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}, READER)
    return MessageEvents("m", request.chat, "id-1", generation)


MakeShape = Callable[[Generation], EventShape]


def played(make: MakeShape, *items: Any) -> list[dict[str, Any]]:
    """The events of a stream in which the engine gives these items; an error ends it as a route would."""
    wire = Wire()

    async def play() -> None:
        stream = new_stream()
        for item in items:
            stream.lose(item) if isinstance(item, EngineUnavailable) else stream.push(item)
        writer, generation = wire.writer(), await started(stream)
        await _send(writer, generation, make(generation))

    running(play)
    assert wire.sent[-1]["more_body"] is False
    blocks = [block for block in wire.body().decode().split("\n\n") if block and not block.startswith(":")]
    named = [block.split("\n", 1) for block in blocks]
    events = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name for name, _ in named] == [f"event: {event['type']}" for event in events]
    return events


async def _send(writer: ResponseWriter, generation: Generation, shape: EventShape) -> None:
    try:
        await send_events(writer, generation, shape, asyncio.to_thread, stream=True)
    except (RequestError, EngineUnavailable) as error:
        await writer.error(api_error(error))


def test_a_response_that_fails_half_way_ends_with_its_failure() -> None:
    events = played(response_events, token(1), EngineUnavailable("the engine is gone", 1.0))
    last = events[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine is gone"}
    assert last["response"]["output"][0]["content"][0]["text"] == "1"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_a_message_that_fails_half_way_ends_with_an_error_event() -> None:
    events = played(message_events, token(1), EngineUnavailable("the engine is gone", 1.0))
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "overloaded_error"
    assert "message_stop" not in [event["type"] for event in events]


def test_while_nothing_comes_a_message_has_begun_and_pings() -> None:
    wire = Wire("/v1/messages")

    async def play() -> None:
        stream = new_stream()
        stream.push(token(1, "stop"))
        generation = await started(stream)
        silent: Any = _Silent(generation)
        await send_events(wire.writer(), silent, message_events(generation), asyncio.to_thread, stream=True)

    running(play)
    body = wire.body().decode()
    assert body.index("event: message_start") < body.index("event: ping") < body.index("event: content_block_start")


class _Silent:
    """A generation whose first piece is silence."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def deltas(self) -> Any:
        yield None
        async for piece in self._generation.deltas():
            yield piece

    def finish(self) -> None:
        pass


def test_an_error_before_the_first_byte_of_a_message_has_its_status_and_form() -> None:
    wire = Wire("/v1/messages")

    async def check() -> None:
        await wire.writer().error(api_error(RequestError("too much", code="overloaded")))

    running(check)
    assert wire.sent[0]["status"] == 429
    body = json.loads(wire.body())
    error = {"type": "rate_limit_error", "message": "too much", "details": {"error_code": "overloaded"}}
    assert body == {"type": "error", "error": error, "request_id": "id-1"}


# --- source paths ------------------------------------------------------------------------------------------


def source_paths() -> SourcePaths:
    endings = ((".image_url", ".source"), (".function", ""))
    chat = ChatBuilder(SourcePaths({"messages": "input", "max_tokens": "longest"}, endings))
    chat.add_message("system", "a", "system")
    chat.add_message("user", [{}, {}], "turn[0]", ["turn[0].a", "turn[0].b"])
    chat.add_call("c", "look", "{}", "turn[1]")
    return chat.source_paths


@pytest.mark.parametrize(
    ("param", "original"),
    [
        ("messages", "input"),
        ("max_tokens", "longest"),
        ("tools[0].function.name", "tools[0].name"),
        ("messages[0]", "system"),
        ("messages[0].content", "system"),
        ("messages[1].content[1].image_url", "turn[0].b.source"),
        ("messages[2].tool_calls[0].function.arguments", "turn[1].arguments"),
        ("temperature", "temperature"),
    ],
)
def test_a_chats_field_has_the_name_the_client_gave_it(param: str, original: str) -> None:
    assert source_paths().original(param) == original


def test_an_error_is_told_in_the_clients_words() -> None:
    with pytest.raises(RequestError) as caught, source_paths().renaming():
        raise RequestError("max_tokens must be 1 or more", code="c", param="max_tokens")
    assert (caught.value.message, caught.value.param, caught.value.code) == (
        "longest must be 1 or more",
        "longest",
        "c",
    )


def test_a_call_joins_the_assistants_message_before_it() -> None:
    chat = ChatBuilder(SourcePaths({}, ()))
    chat.add_message("assistant", "Let me see.", "turn[0]")
    chat.add_call("a", "look", "{}", "turn[1]")
    chat.add_call("b", "look", "{}", "turn[2]")
    (message,) = chat.messages
    assert [call["id"] for call in message["tool_calls"]] == ["a", "b"]


# --- OpenAI's chunks ---------------------------------------------------------------------------------------


@given(text=st.text(), name=st.text(min_size=1))
def test_an_event_that_is_encoded_once_has_the_bytes_of_one_that_is_encoded_anew(text: str, name: str) -> None:
    def make(content: str) -> dict[str, Any]:
        return {"model": name, "choices": [{"delta": {"content": content}, "finish_reason": None}]}

    assert TextEvent(make)(text) == event_bytes(make(text))


@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": True}}], ids=["plain", "usage"])
def test_a_stream_of_text_has_the_bytes_of_one_without_the_short_way(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Any = SimpleNamespace(processor=SimpleNamespace(tokenizer=None), names=["m"])
    request = chat(stream=True, **fields)
    monkeypatch.setattr(time, "time", lambda: 7.0)

    def sent(is_short: bool) -> bytes:
        wire = Wire()

        async def play() -> None:
            stream = new_stream()
            generation = await started(stream)
            shape = ChatEvents(service, request, "id-1", generation)
            assert shape.is_plain
            shape.is_plain = is_short
            sending = asyncio.create_task(send_events(wire.writer(), generation, shape, asyncio.to_thread, stream=True))
            for number in range(5):
                stream.push(token(number, "length" if number == 4 else None))
                await asyncio.sleep(0)
            await sending

        running(play)
        return wire.body()

    assert sent(is_short=True) == sent(is_short=False)


@pytest.mark.parametrize(
    "fields", [{"stream": False}, {"logprobs": True}, {"tools": [LOOK]}, {"return_token_ids": True}]
)
def test_what_has_more_than_text_takes_the_long_way(fields: dict[str, Any]) -> None:
    service: Any = SimpleNamespace(processor=SimpleNamespace(tokenizer=None), names=["m"])

    async def check() -> None:
        generation = await started(new_stream())
        assert not ChatEvents(service, chat(**{"stream": True, **fields}), "id-1", generation).is_plain

    running(check)
