"""Thinking in the answers of three APIs: apart from the text, and counted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import saccade
from saccade import SamplingParams
from saccade.processor.dialects.parser import OutputFormat, OutputFormats
from saccade.processor.dialects.registry import THINKING_DIALECTS, TOOL_DIALECTS
from saccade.processor.output import RequestOutputBuilder
from saccade.processor.tokenizer import Tokenizer
from saccade.server.api.chat import ChatEvents
from saccade.server.api.messages import MessageEvents
from saccade.server.api.responses import ResponseEvents
from saccade.server.generation import BilledPrompt, Delta, Generation
from saccade.server.metrics import Metrics
from saccade.server.request.chat import read_chat
from saccade.server.request.fields import FieldReader
from saccade.server.request_record import RequestRecord
from saccade.types.bill import Bill
from saccade.types.events import TokenEvent

TOOL = {"type": "function", "function": {"name": "look"}}
TEXT = 'I see.\n</think>\n\nHi <tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
CHAT = read_chat({"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}, FieldReader(strict=False))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(saccade.__file__).parent / "builtin")


def thinking_format(tokenizer: Tokenizer) -> OutputFormat:
    formats = OutputFormats(TOOL_DIALECTS["hermes"], THINKING_DIALECTS["think"], tokenizer.token_id)
    return formats.after("assistant\n<think>\n")


def generation_of(tokenizer: Tokenizer) -> Generation:
    prompt: Any = SimpleNamespace(token_ids=[1], where={}, items=())
    outputs = [RequestOutputBuilder(0, tokenizer, SamplingParams())]
    billed = [BilledPrompt(prompt, Bill(1, 0, 0, 1, ()))]
    return Generation(billed, outputs, RequestRecord(), Metrics("m", dict), thinking_format(tokenizer))


def play(shape: Any, generation: Generation, tokenizer: Tokenizer, text: str = TEXT) -> list[Any]:
    """The events of an answer that comes three tokens at a time."""
    ids = tokenizer.encode(text)
    events = list(shape.begin())
    for start in range(0, len(ids), 3):
        delta = Delta(0)
        for token in ids[start : start + 3]:
            delta.text += generation.outputs[0].push(TokenEvent("r", token, None, None))
            delta.token_ids.append(token)
        events += shape.take(delta)
    rest = generation.outputs[0].push(TokenEvent("r", None, None, "stop"))
    events += shape.take(Delta(0, rest, finish_reason="stop"))
    return events + list(shape.end())


def test_a_chat_gives_thinking_text_and_calls_streamed_as_whole(tokenizer: Tokenizer) -> None:
    service: Any = SimpleNamespace(processor=SimpleNamespace(tokenizer=tokenizer), names=["m"])
    generation = generation_of(tokenizer)
    shape = ChatEvents(service, CHAT, "id", generation)
    deltas = [chunk["choices"][0]["delta"] for chunk in play(shape, generation, tokenizer)]
    whole = shape.whole()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("I see.", "I see.", "Hi")
    for name in ("reasoning_content", "reasoning", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["arguments"] for call in calls) == message["tool_calls"][0]["function"]["arguments"]
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert whole["choices"][0]["finish_reason"] == "tool_calls"


def test_tokens_of_thinking_are_counted_up_to_its_closing_marker(tokenizer: Tokenizer) -> None:
    generation = generation_of(tokenizer)
    service: Any = SimpleNamespace(processor=SimpleNamespace(tokenizer=tokenizer), names=["m"])
    shape = ChatEvents(service, CHAT, "id", generation)
    play(shape, generation, tokenizer)
    counted = shape.whole()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    ids = generation.outputs[0].token_ids
    assert "</think>" in tokenizer.decode(ids[:counted])
    assert "</think>" not in tokenizer.decode(ids[: counted - 1])


def test_an_answer_that_only_thinks_has_no_content(tokenizer: Tokenizer) -> None:
    generation = generation_of(tokenizer)
    service: Any = SimpleNamespace(processor=SimpleNamespace(tokenizer=tokenizer), names=["m"])
    shape = ChatEvents(service, CHAT, "id", generation)
    play(shape, generation, tokenizer, "on and on")
    assert shape.whole()["choices"][0]["message"]["content"] is None
    assert generation.reasoning_tokens == len(generation.outputs[0].token_ids)


def test_a_response_has_reasoning_items(tokenizer: Tokenizer) -> None:
    generation = generation_of(tokenizer)
    shape = ResponseEvents("m", CHAT, {}, "id", generation)
    events = play(shape, generation, tokenizer)
    told = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
    response = shape.whole()
    reasoning, message, call = response["output"]
    assert (reasoning["type"], message["type"], call["type"]) == ("reasoning", "message", "function_call")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": told}] and told == "I see."
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == generation.reasoning_tokens > 0


def test_a_message_has_thinking_blocks(tokenizer: Tokenizer) -> None:
    generation = generation_of(tokenizer)
    shape = MessageEvents("m", CHAT, "id", generation)
    events = play(shape, generation, tokenizer)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "I see."
    content = as_received(shape.whole())["content"]
    assert content == [
        {"type": "thinking", "thinking": "I see.", "signature": ""},
        {"type": "text", "text": "Hi"},
        {**content[2], "type": "tool_use", "name": "look", "input": {"at": 1}},
    ]


def as_received(body: Any) -> Any:
    return json.loads(msgspec.json.encode(body))


def test_arguments_reach_a_message_as_the_model_wrote_them(tokenizer: Tokenizer) -> None:
    """Half of a surrogate pair has no UTF-8 and 1e999 no number in Python, but JSON has both."""
    generation = generation_of(tokenizer)
    shape = MessageEvents("m", CHAT, "id", generation)
    call = '{"name": "look", "arguments": {"a": "\\ud800", "b": 1e999, "c": 0.10}}'
    play(shape, generation, tokenizer, f"</think><tool_call>{call}</tool_call>")
    assert b'"input":{"a": "\\ud800", "b": 1e999, "c": 0.10}' in msgspec.json.encode(shape.whole())


def test_arguments_that_are_no_json_reach_a_message_as_they_are(tokenizer: Tokenizer) -> None:
    generation = generation_of(tokenizer)
    shape = MessageEvents("m", CHAT, "id", generation)
    play(shape, generation, tokenizer, '</think><tool_call>{"name": "look", "arguments": {"at": x}}</tool_call>')
    assert shape.whole()["content"][-1]["input"] == {"INVALID_JSON": '{"at": x}}'}
    text = generation._metrics.text().decode()
    assert 'saccade:tool_call_problems_total{reason="syntax"} 1.0' in text


def test_markers_that_are_control_tokens_are_shown_to_the_parser_alone(tokenizer: Tokenizer) -> None:
    shown, hidden = tokenizer.token_id("<|vision_start|>"), tokenizer.token_id("<|im_end|>")
    assert shown is not None and hidden is not None and tokenizer.is_special(shown)
    output = RequestOutputBuilder(0, tokenizer, SamplingParams(), frozenset({shown}))
    ids = [*tokenizer.encode("a"), shown, hidden, *tokenizer.encode("b")]
    text = "".join(output.push(TokenEvent("r", token, None, None)) for token in ids)
    assert text == "a<|vision_start|>b"
