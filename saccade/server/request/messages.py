"""Bodies of the Messages API, read as the chat they stand for. Knows Anthropic's block names; runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from saccade.errors import RequestError, quoted
from saccade.server.request import fields
from saccade.server.request.adapter import Chat, SourcePaths
from saccade.server.request.chat import ChatRequest, read_chat
from saccade.server.request.fields import FieldReader

_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
_ENDINGS = ((".image_url", ".source"), (".function.parameters", ".input_schema"), (".function", ""))
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessageRequest(NamedTuple):
    chat: ChatRequest
    places: SourcePaths


def read_message(body: Mapping[str, Any], reader: FieldReader, needs_length: bool = True) -> MessageRequest:
    """`needs_length` is False where nothing is answered, only counted."""
    given = reader.read(body, fields.MESSAGES)
    if "messages" not in given:
        raise RequestError("messages is missing; send a list with at least one message", param="messages")
    if needs_length and "max_tokens" not in given:
        raise RequestError("max_tokens is missing; say how long the answer may be", param="max_tokens")
    if given.get("thinking", {}).get("type") == "enabled":
        raise RequestError(
            "thinking is not supported by this server; leave it out", code="unsupported", param="thinking"
        )
    chat = Chat(SourcePaths(_NAMES, _ENDINGS))
    _add_system(chat, given.get("system"))
    for index, message in enumerate(given["messages"]):
        _add_message(chat, message, f"messages[{index}]")
    _check_last(given["messages"])
    settings = _as_chat(given)
    with chat.places.renaming():
        request = read_chat({**settings, "messages": chat.messages}, reader)
    return MessageRequest(request, chat.places)


def _as_chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is neither system nor messages, under the names a chat has for it."""
    chat = {name: given[name] for name in (*fields.CHAT_EXTRAS, "max_tokens") if name in given}
    chat |= {"stop": given.get("stop_sequences") or None, "response_format": _format(given.get("output_config"))}
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given.get("tools", ()))]
    choice = given.get("tool_choice", {"type": "auto"})
    if not tools and choice.get("type") in ("auto", "none"):
        return chat
    is_parallel = choice.get("disable_parallel_tool_use") is not True
    return {**chat, "tools": tools or None, "tool_choice": _choice(choice), "parallel_tool_calls": is_parallel}


def _format(config: Mapping[str, Any] | None) -> Any:
    given = (config or {}).get("format")
    return {**given, "json_schema": {"schema": given.get("schema")}} if isinstance(given, Mapping) else given


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") not in (None, "custom"):
        raise RequestError(
            "tools of this server are the client's own: an object with name and input_schema",
            code="unsupported",
            param=where,
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    described = {"description": tool["description"]} if "description" in tool else {}
    return {"type": "function", "function": {**function, **described}}


def _choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError("tool_choice must have the type auto, any, tool or none", param="tool_choice")
    return _CHOICES[kind]


def _check_last(messages: Sequence[Any]) -> None:
    if messages and messages[-1]["role"] == "assistant":
        raise RequestError(
            "the last message must be the user's: this server begins a new answer and does not continue one",
            code="unsupported",
            param="messages",
        )


# --- messages -----------------------------------------------------------------------------------------------------


def _add_system(chat: Chat, system: str | list[Any] | None) -> None:
    if isinstance(system, list):
        places = [f"system[{index}]" for index in range(len(system))]
        chat.say("system", [_part(*pair) for pair in zip(system, places, strict=True)], "system", places)
    elif system:
        chat.say("system", system, "system")


def _add_message(chat: Chat, message: Any, where: str) -> None:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant"):
        raise RequestError(f"{where} must be an object with the role user or assistant", param=f"{where}")
    content = message.get("content")
    if isinstance(content, str):
        chat.say(role, content, f"{where}.content")
    elif isinstance(content, list):
        _add_blocks(chat, role, content, f"{where}.content")
    else:
        raise RequestError(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")


def _add_blocks(chat: Chat, role: str, blocks: Sequence[Any], where: str) -> None:
    """One message of blocks is several of a chat, where a tool's result is a message and a call none."""
    parts: list[dict[str, Any]] = []
    places: list[str] = []
    calls = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result" and role == "user":
            if parts:
                chat.say(role, parts, where, places)
                parts, places = [], []
            _add_result(chat, block, place)
        elif kind == "tool_use" and role == "assistant":
            calls.append((block, place))
        else:
            parts.append(_part(block, place))
            places.append(place)
    if parts or not blocks:
        chat.say(role, parts, where, places)
    for block, place in calls:
        _add_call(chat, block, place)


def _add_call(chat: Chat, block: Mapping[str, Any], where: str) -> None:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, Mapping):
        raise RequestError("a tool_use block needs a string under name and an object under input", param=where)
    chat.call(block.get("id"), name, given, where)


def _add_result(chat: Chat, block: Mapping[str, Any], where: str) -> None:
    content, call_id = block.get("content"), block.get("tool_use_id")
    if content is None or isinstance(content, str):
        chat.say("tool", content or "", f"{where}.content", tool_call_id=call_id)
        return
    if not isinstance(content, list):
        raise RequestError("a tool_result's content must be a string or a list of blocks", param=f"{where}.content")
    places = [f"{where}.content[{index}]" for index in range(len(content))]
    parts = [_part(*pair) for pair in zip(content, places, strict=True)]
    chat.say("tool", parts, f"{where}.content", places, tool_call_id=call_id)


def _part(block: Any, where: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _url(block.get("source"), f"{where}.source")}}
    raise RequestError(
        f"a block of the type {quoted(kind)} cannot stand here; use text and image, tool_use in an assistant's "
        "message, tool_result in a user's",
        param=f"{where}.type",
    )


def _url(source: Any, where: str) -> str:
    """Of base64 data only the bytes count, so the media type that was claimed for them is not repeated."""
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "base64" and isinstance(source.get("data"), str):
        return f"data:;base64,{source['data']}"
    if kind == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    if kind == "file":
        raise RequestError(
            "this server keeps no files; send the picture as base64 or url", code="unsupported", param=where
        )
    raise RequestError(
        "an image's source must be {'type': 'base64', 'data': ...} or {'type': 'url', 'url': ...}",
        code="invalid_image_url",
        param=where,
    )
