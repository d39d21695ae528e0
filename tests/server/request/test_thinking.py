"""What clients say of thinking, in three APIs, and what of it reaches the chat template."""

from __future__ import annotations

from typing import Any

import pytest

from saccade.errors import RequestError
from saccade.processor.dialects.parser import output_formats
from saccade.processor.messages import Form, read_messages
from saccade.server.request.chat import ChatRequest, read_chat
from saccade.server.request.fields import FieldReader
from saccade.server.request.messages import read_message
from saccade.server.request.responses import read_response

READER = FieldReader(strict=False)
USER = {"role": "user", "content": "a"}


def chat(**fields: Any) -> ChatRequest:
    return read_chat({"messages": [USER], **fields}, READER)


def message(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    body = {"messages": [*messages, USER], "max_tokens": 9, **fields}
    return read_message(body, READER).chat


def response(*items: dict[str, Any], **fields: Any) -> ChatRequest:
    return read_response({"input": [*items, USER], **fields}, READER).chat


OFF = {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("request_", "kwargs"),
    [
        (chat(), {}),
        (chat(chat_template_kwargs={"enable_thinking": False}), OFF),
        (chat(reasoning_effort="high"), {"reasoning_effort": "high"}),
        (chat(reasoning_effort="none"), {"reasoning_effort": "none", **OFF}),
        (
            chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}),
            {"reasoning_effort": "high"},
        ),
        (message(thinking={"type": "disabled"}), OFF),
        (message(thinking={"type": "adaptive"}), {}),
        (message(thinking={"type": "enabled", "budget_tokens": 1024}), {"enable_thinking": True, "thinking": True}),
        (message(output_config={"effort": "low"}), {"reasoning_effort": "low"}),
        (response(reasoning={"effort": "minimal"}), {"reasoning_effort": "minimal"}),
    ],
)
def test_what_a_client_says_of_thinking_reaches_the_template(request_: ChatRequest, kwargs: dict[str, Any]) -> None:
    assert request_.chat_template_kwargs == kwargs


def test_a_budget_of_thinking_is_one_of_tokens() -> None:
    params = message(thinking={"type": "enabled", "budget_tokens": 1024}).response_options.params
    assert params.thinking_token_budget == 1024
    assert chat(thinking_token_budget=7).response_options.params.thinking_token_budget == 7
    assert chat().response_options.params.thinking_token_budget is None


def test_messages_are_answered_where_no_token_could_end_the_thinking() -> None:
    reader = FieldReader(strict=False, formats=output_formats("<think></think>", lambda _: None))
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"messages": [USER], "max_tokens": 9, "thinking": thinking}
    assert read_message(body, reader).chat.response_options.params.thinking_token_budget is None
    known = FieldReader(strict=False, formats=output_formats("<think></think>", lambda _: 5))
    assert read_message(body, known).chat.response_options.params.thinking_token_budget == 1024


@pytest.mark.parametrize(
    ("read", "param"),
    [
        (lambda: chat(reasoning_effort=3), "reasoning_effort"),
        (lambda: response(reasoning={"effort": "x" * 99}), "reasoning.effort"),
        (lambda: message(output_config={"effort": 5}), "output_config.effort"),
        (lambda: message(thinking={}), "thinking.type"),
        (lambda: message(thinking={"type": "enabled", "budget_tokens": -1}), "thinking.budget_tokens"),
        (lambda: message(thinking={"type": "enabled", "budget_tokens": "a"}), "thinking.budget_tokens"),
        (lambda: response({"type": "reasoning", "content": 5}), "input[0].content"),
        (
            lambda: message({"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}),
            "messages[0].content[0].thinking",
        ),
    ],
)
def test_what_cannot_be_said_is_refused_in_the_clients_words(read: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read()
    assert caught.value.param == param


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}


def test_thinking_blocks_of_earlier_turns_go_to_the_template() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    text = {"type": "text", "text": "Hi"}
    request = message(
        {"role": "assistant", "content": [thought, text]},
        {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"}, use]},
    )
    assert request.messages[:2] == [
        {"role": "assistant", "content": [text], "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    ]


def test_reasoning_items_of_earlier_turns_go_to_the_template() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    request = response(thought, {"role": "assistant", "content": "Hi"}, thought, call, thought)
    first, second, last = request.messages
    assert first == {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}
    assert second["reasoning_content"] == "hm" and second["tool_calls"][0]["id"] == "c"
    assert last == USER, "thinking belongs to the assistant"


def test_both_names_of_thinking_in_a_chat_are_known() -> None:
    given = [{"role": "assistant", "content": "Hi", "reasoning": "hm"}, {"role": "user", "content": "a"}]
    read = read_messages(given, Form(True, True), str, allow_paths=False)
    assert read.messages[0]["reasoning_content"] == "hm" and "reasoning_content" not in read.messages[1]
