"""Tools of a request: checks of `tools` and `tool_choice`. How models write calls is in `dialects`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.errors import RequestError, quoted
from saccade.structured.schema_validation import check_schema

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What `tools` and `tool_choice` mean for one request."""

    for_template: Sequence[Tool] | None  # in the chat template
    calls: bool  # the output is searched for calls
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
