"""Reads bodies of the Responses API as chats. Knows OpenAI's item names; runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from saccade.errors import RequestError, member
from saccade.server.request import fields
from saccade.server.request.chat import ChatRequest, read_chat
from saccade.server.request.chat_conversion import ChatBuilder, SourcePaths, document_options
from saccade.server.request.fields import FieldReader

_STATEFUL = ("previous_response_id", "conversation", "prompt", "background")
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_ROLES = ("user", "assistant", "system", "developer")
_ENDINGS = ((".function", ""), (".file", ""))
_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "user": None,
}
"""Fields of a request that its response repeats, with their defaults."""

MAX_ECHO_BYTES = 1 << 20
"""As JSON. It is kept while the response runs, and three events of a stream repeat it."""


class ResponseRequest(NamedTuple):
    chat: ChatRequest
    source_paths: SourcePaths
    echo: Mapping[str, Any]  # see _ECHOED; with temperature and top_p


def read_response(body: Mapping[str, Any], reader: FieldReader) -> ResponseRequest:
    for name in _STATEFUL:
        if body.get(name):
            reason = f"{name} needs what a server keeps between requests, and this one keeps no state"
            message = f"{reason}; send the whole conversation as input"
            raise RequestError(message, code="unsupported", param=name)
    values = reader.read(body, fields.RESPONSES)
    if "input" not in values:
        raise RequestError("input is missing; send a string or a list of items", param="input")
    if "message.output_text.logprobs" in values.get("include", ()):
        message = "include asks for log probabilities, which only /v1/chat/completions gives"
        raise RequestError(message, code="unsupported", param="include")
    chat = ChatBuilder(SourcePaths(_NAMES, _ENDINGS))
    _add_input(chat, values)
    body = {**_as_chat(values), "messages": chat.messages}
    with chat.source_paths.renaming():
        request = read_chat(body, reader)
    params = request.response_options.params
    echo = {**_echo(values), "temperature": params.temperature, "top_p": params.top_p}
    return ResponseRequest(request, chat.source_paths, echo)


def _echo(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Instructions do not count: like all text of the prompt they are limited by the context."""
    sizes = {name: len(msgspec.json.encode(values[name])) for name in _ECHOED if name in values}
    sizes.pop("instructions", None)
    if sum(sizes.values()) > MAX_ECHO_BYTES:
        sizes_text = f"{', '.join(sizes)} have {sum(sizes.values())} bytes together"
        limit = f"a response repeats at most {MAX_ECHO_BYTES} of what it was asked"
        largest = max(sizes, key=lambda name: sizes[name])
        raise RequestError(f"{sizes_text}, but {limit}; send less", param=largest)
    return {name: values.get(name, value) for name, value in _ECHOED.items()}


def _as_chat(values: Mapping[str, Any]) -> dict[str, Any]:
    """All fields but the input, under their names in a chat."""
    same = (*fields.CHAT_EXTRAS, "stop", "stream_options", "parallel_tool_calls")
    chat = {name: values[name] for name in same if name in values}
    chat["max_tokens"] = values.get("max_output_tokens")
    chat["response_format"] = _format(values.get("text"))
    chat["reasoning_effort"] = values.get("reasoning", {}).get("effort")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(values.get("tools", ()))]
    choice = values.get("tool_choice")
    if tools:
        chat["tools"] = tools
    elif choice in ("auto", "none"):  # some clients always send it
        return chat
    if member(choice, "type") == "function":
        choice = {"type": "function", "function": {"name": member(choice, "name")}}
    return {**chat, "tool_choice": choice}


def _format(text: Mapping[str, Any] | None) -> Any:
    form = member(text, "format")
    if member(form, "type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if member(tool, "type") != "function":
        message = "tools of this server are functions: {'type': 'function', 'name': ...}"
        raise RequestError(message, code="unsupported", param=path)
    function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
    return {"type": "function", "function": function}


# --- input --------------------------------------------------------------------------------------------------


def _add_input(chat: ChatBuilder, values: Mapping[str, Any]) -> None:
    if "instructions" in values:
        chat.add_message("system", values["instructions"], "instructions")
    if isinstance(values["input"], str):
        chat.add_message("user", values["input"], "input")
        return
    if not values["input"]:
        raise RequestError("input must have at least one item", param="input")
    for index, item in enumerate(values["input"]):
        _add_item(chat, item, f"input[{index}]")


def _add_item(chat: ChatBuilder, item: Any, path: str) -> None:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise _invalid(f"a message's role must be one of {', '.join(_ROLES)}", f"{path}.role")
        _add_content(chat, item.get("role"), item.get("content"), f"{path}.content")
    elif kind == "function_call":
        for name in ("name", "arguments"):
            if not isinstance(item.get(name), str):
                raise _invalid(f"a function_call needs a string under {name}", f"{path}.{name}")
        chat.add_call(item.get("call_id"), item["name"], item["arguments"], path)
    elif kind == "function_call_output":
        _add_content(chat, "tool", item.get("output"), f"{path}.output", tool_call_id=item.get("call_id"))
    elif kind == "reasoning":
        chat.think(_thought(item, path))
    else:
        kinds = "a message, a reasoning, a function_call or a function_call_output"
        raise _invalid(f"{path} must be {kinds}", path)


def _thought(item: Mapping[str, Any], path: str) -> str:
    """The text of a reasoning item, or its summary where a server hides the text."""
    parts: Any = next(filter(None, map(item.get, ("content", "summary"))), [])
    if not isinstance(parts, list) or not all(map(_has_text, parts)):
        raise _invalid("a reasoning item needs a list of parts with a string under text", f"{path}.content")
    return "\n".join(part["text"] for part in parts)


def _has_text(part: Any) -> bool:
    return isinstance(member(part, "text"), str)


def _add_content(chat: ChatBuilder, role: Any, content: Any, path: str, **fields: Any) -> None:
    if isinstance(content, list):
        chat.add_parts(role, content, path, _part, **fields)
    else:
        chat.add_message(role, content, path, **fields)


def _part(part: Any, path: str) -> dict[str, Any]:
    """A part of a chat. In the Responses API, `image_url` is a string, and `detail` a field next to it."""
    kind = member(part, "type")
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if kind == "input_file":
        return _file(part, path)
    if kind != "input_image":
        raise _invalid(f"{path} must be an input_text, input_image, input_file or output_text", path)
    source = {"url": part.get("image_url"), "file_id": part.get("file_id"), "detail": part.get("detail")}
    return {"type": "image_url", "image_url": source}


def _file(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    names = ("file_data", "file_url", "file_id")
    source = {name: part[name] for name in names if part.get(name)}
    if not source or not all(isinstance(value, str) for value in source.values()):
        raise _invalid("an input_file needs a string under file_data, file_url or file_id", path)
    return {**document_options(part), "type": "file", "file": source}


def _invalid(message: str, path: str) -> RequestError:
    return RequestError(message, code="invalid_input", param=path)
