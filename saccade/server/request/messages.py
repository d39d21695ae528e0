"""Reads bodies of the Messages API as chats. Knows Anthropic's names; runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from saccade.errors import RequestError, member, quoted
from saccade.server.request import fields
from saccade.server.request.chat import ChatRequest, read_chat
from saccade.server.request.chat_conversion import ChatBuilder, SourcePaths, document_options
from saccade.server.request.fields import FieldReader

_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
_ENDINGS = (
    (".image_url", ".source"),
    (".file", ".source"),
    (".function.parameters", ".input_schema"),
    (".function", ""),
)
_THINKING: Mapping[str, Mapping[str, bool]] = {
    "enabled": {"enable_thinking": True},
    "disabled": {"enable_thinking": False},
    "adaptive": {},
}
_SOURCES = {"base64": "data", "url": "url", "file": "file_id"}  # types, and what each has
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessageRequest(NamedTuple):
    chat: ChatRequest
    source_paths: SourcePaths


def read_message(body: Mapping[str, Any], reader: FieldReader, needs_length: bool = True) -> MessageRequest:
    """`needs_length` is False when the tokens are only counted."""
    if body.get("thread") is not None:  # Anthropic's client then sends the whole conversation by itself
        message = f"thread is not supported by this server: {fields.STATELESS}"
        raise RequestError(message, code="thread_unsupported_request", param="thread")
    values = reader.read(body, fields.MESSAGES)
    messages = values.get("messages")
    if messages is None:
        raise RequestError("messages is missing; send a list with at least one message", param="messages")
    if needs_length and "max_tokens" not in values:
        raise RequestError("max_tokens is missing; say how long the answer may be", param="max_tokens")
    chat = ChatBuilder(SourcePaths(_NAMES, _ENDINGS))
    system = values.get("system")
    if isinstance(system, list):
        chat.add_parts("system", system, "system", _part)
    elif system:
        chat.add_message("system", system, "system")
    for index, message in enumerate(messages):
        _add_message(chat, message, f"messages[{index}]")
    if messages and messages[-1]["role"] == "assistant":
        reason = "this server begins a new answer and does not continue one"
        message = f"the last message must be the user's: {reason}"
        raise RequestError(message, code="unsupported", param="messages")
    body = {**_as_chat(values), "messages": chat.messages}
    if reader.formats is not None and reader.formats.closes_in_pieces:
        body.pop("thinking_token_budget", None)  # which this API's clients always send
    with chat.source_paths.renaming():
        request = read_chat(body, reader)
    return MessageRequest(request, chat.source_paths)


def _as_chat(values: Mapping[str, Any]) -> dict[str, Any]:
    """All fields but system and messages, under their names in a chat."""
    chat = {name: values[name] for name in (*fields.CHAT_EXTRAS, "max_tokens") if name in values}
    if values.get("stop_sequences"):
        chat["stop"] = values["stop_sequences"]
    chat["response_format"] = _format(values.get("output_config"))
    chat["reasoning_effort"] = values.get("output_config", {}).get("effort")
    chat["chat_template_kwargs"] = {**_thinking(values), **chat.get("chat_template_kwargs", {})}
    budget = values.get("thinking", {}).get("budget_tokens")
    if budget is not None:
        chat["thinking_token_budget"] = budget
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(values.get("tools", ()))]
    choice = values.get("tool_choice", {"type": "auto"})
    if tools:
        chat["tools"] = tools
    elif choice.get("type") in ("auto", "none"):
        return chat
    chat["tool_choice"] = _choice(choice)
    chat["parallel_tool_calls"] = choice.get("disable_parallel_tool_use") is not True
    return chat


def _thinking(values: Mapping[str, Any]) -> Mapping[str, bool]:
    """What the chat template is told."""
    kind = values.get("thinking", {"type": "adaptive"}).get("type")
    if kind not in tuple(_THINKING):
        message = f"thinking must have the type {', '.join(_THINKING)}, not {quoted(kind)}"
        raise RequestError(message, param="thinking.type")
    return _THINKING[kind]


def _format(config: Mapping[str, Any] | None) -> Any:
    form = member(config, "format")
    if not isinstance(form, Mapping):
        return form
    return {**form, "json_schema": {"schema": form.get("schema")}}


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") not in (None, "custom"):
        message = "tools of this server are the client's own: an object with name and input_schema"
        raise RequestError(message, code="unsupported", param=path)
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in tuple(_CHOICES):
        raise RequestError("tool_choice must have the type auto, any, tool or none", param="tool_choice")
    return _CHOICES[kind]


# --- messages ---


def _add_message(chat: ChatBuilder, message: Any, path: str) -> None:
    role = member(message, "role")
    if role not in ("user", "assistant"):
        raise RequestError(f"{path} must be an object with the role user or assistant", param=path)
    content = message.get("content")
    if isinstance(content, str):
        chat.add_message(role, content, f"{path}.content")
    elif isinstance(content, list):
        _add_blocks(chat, role, content, f"{path}.content")
    else:
        raise RequestError(f"{path}.content must be a string or a list of blocks", param=f"{path}.content")


def _add_blocks(chat: ChatBuilder, role: str, blocks: Sequence[Any], path: str) -> None:
    """One message may become several: in a chat, tool results are messages and calls belong to one."""
    parts: list[dict[str, Any]] = []
    part_paths: list[str] = []
    calls = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        block_path = f"{path}[{index}]"
        place = (role, member(block, "type"))
        if place == ("user", "tool_result"):
            if parts:
                chat.add_message(role, parts, path, part_paths)
                parts = []
                part_paths = []
            _add_result(chat, block, block_path)
        elif place == ("assistant", "tool_use"):
            calls.append((block, block_path))
        elif place in (("assistant", "thinking"), ("assistant", "redacted_thinking")):
            thoughts.append(_thought(block, block_path))
        else:
            parts.append(_part(block, block_path))
            part_paths.append(block_path)
    chat.think("\n".join(filter(None, thoughts)))
    if parts or not blocks:
        chat.add_message(role, parts, path, part_paths)
    for block, block_path in calls:
        match block:
            case {"name": str(name), "input": Mapping() as arguments}:
                chat.add_call(block.get("id"), name, arguments, block_path)
            case _:
                message = "a tool_use block needs a string under name and an object under input"
                raise RequestError(message, param=block_path)


def _thought(block: Mapping[str, Any], path: str) -> str:
    """The text of a thinking block; that of a redacted one is for the server that wrote it."""
    text = block.get("thinking", "") if block["type"] == "thinking" else ""
    if not isinstance(text, str):
        raise RequestError("a thinking block needs a string under thinking", param=f"{path}.thinking")
    return text


def _add_result(chat: ChatBuilder, block: Mapping[str, Any], path: str) -> None:
    content = block.get("content")
    call_id = block.get("tool_use_id")
    path = f"{path}.content"
    if content is None:
        content = ""
    if isinstance(content, str):
        chat.add_message("tool", content, path, tool_call_id=call_id)
    elif isinstance(content, list):
        chat.add_parts("tool", content, path, _part, tool_call_id=call_id)
    else:
        raise RequestError("a tool_result's content must be a string or a list of blocks", param=path)


def _part(block: Any, path: str) -> dict[str, Any]:
    kind = member(block, "type")
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    if kind == "image":
        source = _source(block.get("source"), f"{path}.source", "image", "url")
        return {"type": "image_url", "image_url": source}
    if kind == "document":
        return _document(block, path)
    special = "thinking and tool_use in an assistant's message, tool_result in a user's"
    kinds = f"text, image and document, {special}"
    message = f"a block of the type {quoted(kind)} cannot stand here; use {kinds}"
    raise RequestError(message, param=f"{path}.type")


def _document(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A PDF, or text. The title and the context precede it."""
    source = block.get("source")
    heading = "\n".join(text for text in (block.get("title"), block.get("context")) if isinstance(text, str))
    if member(source, "type") == "text":
        text = member(source, "data")
        if not isinstance(text, str):
            raise RequestError("a text document needs a string under data", param=f"{path}.source")
        return {"type": "text", "text": f"{heading}\n\n{text}" if heading else text}
    file = _source(source, f"{path}.source", "document", "file_data")
    return {**document_options(block), "type": "file", "file": file, "heading": heading}


def _source(source: Any, path: str, what: str, name: str) -> dict[str, str]:
    """The data or URL under `name`, or a stored file. The media type of base64 data is dropped: the format is
    read from the bytes."""
    kind = member(source, "type")
    text = member(source, _SOURCES[kind]) if kind in list(_SOURCES) else None  # a list: it may be unhashable
    if isinstance(text, str):
        if kind == "base64":
            return {name: f"data:;base64,{text}"}
        return {"file_id" if kind == "file" else name: text}
    forms = "{'type': 'base64', 'data': ...}, {'type': 'url', 'url': ...} or {'type': 'file', 'file_id': ...}"
    message = f"the {what}'s source must be {forms}"
    code = "invalid_image_url" if what == "image" else "invalid_document"
    raise RequestError(message, code=code, param=path)
