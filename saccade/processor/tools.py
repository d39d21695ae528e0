"""Tools: checks of `tools` and `tool_choice`, and the Hermes tool call parser.

The model writes <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once or more, with text around.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.errors import RequestError, quoted
from saccade.structured.schema_validation import check_schema

MAX_TOOLS = 128
_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What `tools` and `tool_choice` mean for one request."""

    for_template: Sequence[Tool] | None  # in the chat template
    calls: bool  # the output is parsed for calls, by a `ToolParser`
    structured: str | None = None  # for SamplingParams: a schema of one call without tags


NO_TOOLS = ToolPlan(None, calls=False)


def tools_for_template(tools: Any, tool_choice: Any = None, scope: str = "") -> ToolPlan:
    """Check tools and tool_choice. A required call becomes a schema, cached for the tenant `scope`."""
    if tools is None:
        if tool_choice not in (None, "none"):
            raise RequestError("tool_choice needs tools to choose from", param="tool_choice")
        return NO_TOOLS
    checked = _check_tools(tools)
    if tool_choice in (None, "auto"):
        return ToolPlan(checked, calls=True)
    if tool_choice == "none":
        return NO_TOOLS
    chosen = checked if tool_choice == "required" else [_named(checked, tool_choice)]
    return ToolPlan(checked, calls=True, structured=_call_schema(chosen, scope))


def _check_tools(tools: Any) -> list[Tool]:
    if not isinstance(tools, (list, tuple)) or not 1 <= len(tools) <= MAX_TOOLS:
        raise RequestError(f"tools must be a list of 1 to {MAX_TOOLS} tools", param="tools")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    return list(tools)


def _check_tool(tool: Any, where: str) -> None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise RequestError('a tool must be {"type": "function", "function": {"name": ...}}', param=where)
    name = function.get("name")
    parameters = function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"a function's name must have 1 to 64 letters, digits, _, - or ., not {quoted(name)}"
        raise RequestError(message, param=f"{where}.function.name")
    if parameters is not None and not isinstance(parameters, Mapping):
        message = "a function's parameters must be a JSON schema"
        raise RequestError(message, param=f"{where}.function.parameters")


def _named(tools: Sequence[Tool], tool_choice: Any) -> Tool:
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or tool_choice.get("type") != "function":
        named = '{"type": "function", "function": {"name": ...}}'
        raise RequestError(f'tool_choice must be "none", "auto", "required" or {named}', param="tool_choice")
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    message = f"tool_choice names the function {quoted(name)}, which is not among the tools"
    raise RequestError(message, param="tool_choice")


def _call_schema(tools: Sequence[Tool], scope: str) -> str:
    """A schema of one call to one of the tools. Each tool's $refs are rebased."""
    calls = []
    for index, tool in enumerate(tools):
        parameters = tool["function"].get("parameters") or {"type": "object"}
        arguments = _rebased(parameters, f"#/anyOf/{index}/properties/arguments")
        properties = {"name": {"const": tool["function"]["name"]}, "arguments": arguments}
        required = {"required": ["name", "arguments"], "additionalProperties": False}
        calls.append({"type": "object", "properties": properties, **required})
    return check_schema({"anyOf": calls}, param="tools", scope=scope)


def _rebased(schema: Any, root: str, depth: int = 64) -> Any:
    if depth == 0:
        raise RequestError("a function's parameters are nested more than 64 levels deep", param="tools")
    if isinstance(schema, list):
        return [_rebased(entry, root, depth - 1) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _rebased(value, root, depth - 1) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def calls_for_template(calls: Any, where: str) -> Any:
    """An assistant message's tool_calls with their arguments parsed, as templates print them as JSON."""
    if not isinstance(calls, (list, tuple)):
        raise RequestError("tool_calls must be a list", param=where)
    return [_call_for_template(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call_for_template(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call  # parsed already, or left to the template
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        message = "the arguments of a tool call must be JSON as text"
        raise RequestError(message, param=f"{where}.function.arguments") from None
    return {**call, "function": {**function, "arguments": parsed}}


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is not part of a call."""

    text: str

    def delta(self) -> dict[str, Any]:
        """As it stands in an OpenAI chunk."""
        return {"content": self.text}


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    id: str
    name: str

    def delta(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": ""}
        call = {"index": self.index, "id": self.id, "type": "function", "function": function}
        return {"tool_calls": [call]}


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A call's arguments as JSON text, appended to what came before for this index."""

    index: int
    arguments: str

    def delta(self) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.index, "function": {"arguments": self.arguments}}]}


ToolDelta = Content | CallStart | CallArguments


class ToolParser:
    """Streaming parser: output text in; content and calls out.

    A call is returned when it is complete; an invalid one comes back as content. White space around calls is
    dropped. `is_bare` is for an output that is one call without tags.
    """

    def __init__(self, *, is_bare: bool = False) -> None:
        self.num_calls = 0
        self._is_bare = is_bare
        self._text = ""  # pending: the beginning of a tag, or an incomplete call
        self._space = ""  # pending white space, returned only if text follows

    @property
    def has_calls(self) -> bool:
        """Whether the finish reason is tool_calls."""
        return self.num_calls > 0

    def push(self, text: str) -> list[ToolDelta]:
        self._text += text
        return [] if self._is_bare else list(self._advance())

    def finish(self) -> list[ToolDelta]:
        """The output has ended. A call that lacks only its closing tag counts."""
        rest = self._text
        self._text = ""
        deltas: list[ToolDelta] = []
        if self._is_bare or rest.startswith(_OPEN):
            deltas = list(self._call(rest.removeprefix(_OPEN)))
        if not deltas:
            deltas = list(self._content(rest))
        if self._space and not self.has_calls:
            deltas.append(Content(self._space))
        self._space = ""
        return deltas

    def _advance(self) -> Iterator[ToolDelta]:
        while True:
            if self._text.startswith(_OPEN):
                end = _end_of_call(self._text)
                if end is None:
                    return
                whole = self._text[:end]
                self._text = self._text[end:]
                yield from list(self._call(whole[len(_OPEN) : -len(_CLOSE)])) or self._content(whole)
                continue
            start = _start_of_tag(self._text)
            before = self._text[:start]
            self._text = self._text[start:]
            yield from self._content(before)
            if not self._text.startswith(_OPEN):
                return

    def _call(self, body: str) -> Iterator[ToolDelta]:
        found = _parsed(body)
        if found is None:
            return
        name, arguments = found
        index = self.num_calls
        self._space = ""
        self.num_calls += 1
        yield CallStart(index, f"call_{secrets.token_hex(12)}", name)
        yield CallArguments(index, arguments)

    def _content(self, text: str) -> Iterator[ToolDelta]:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            yield Content(shown)


def _start_of_tag(text: str) -> int:
    """Index of an opening tag, or of a prefix of one at the end; the text's length if there is neither."""
    start = text.find(_OPEN)
    if start >= 0:
        return start
    for length in range(min(len(_OPEN) - 1, len(text)), 0, -1):
        if _OPEN.startswith(text[-length:]):
            return len(text) - length
    return len(text)


def _end_of_call(text: str) -> int | None:
    """End of the first closing tag outside a JSON string; None if there is none yet."""
    at = text.find(_CLOSE)
    while at >= 0:
        if '"' not in _STRINGS.sub("", text[:at]):
            return at + len(_CLOSE)
        at = text.find(_CLOSE, at + 1)
    return None


def _parsed(body: str) -> tuple[str, str] | None:
    """Name and arguments of a call; None if it is not one."""
    try:
        call = json.loads(body)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return None
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return None
        return call["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
