"""Tools of a request: checks of `tools` and `tool_choice`. How models write calls is in `dialects`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.errors import RequestError, is_list_of, quoted
from saccade.processor.dialects.arguments import object_text
from saccade.processor.dialects.call_grammar import functions_of
from saccade.processor.dialects.call_schema import call_schema
from saccade.processor.dialects.parser import OutputFormats
from saccade.structured.schema_validation import check_grammar, check_schema

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What `tools` and `tool_choice` mean for one request."""

    for_template: Sequence[Tool] | None  # in the chat template
    calls: bool  # the output is searched for calls
    structured: str | None = None  # for SamplingParams: what the output is held to
    is_bare: bool = False  # that is one call as JSON, not in the model's own dialect


NO_TOOLS = ToolUse(None, calls=False)


def tools_for_template(
    tools: Any,
    tool_choice: Any = None,
    scope: str = "",
    *,
    formats: OutputFormats | None = None,
    parallel: bool = True,
) -> ToolUse:
    """Check tools and tool_choice. A required call becomes a grammar, cached for the tenant `scope`.

    `formats` is how the model writes calls; `parallel`: it may make several.
    """
    if tools is None:
        if tool_choice not in (None, "none"):
            raise RequestError("tool_choice needs tools to choose from", param="tool_choice")
        return NO_TOOLS
    checked = _check_tools(tools)
    if tool_choice in (None, "auto"):
        return ToolUse(checked, calls=True)
    if tool_choice == "none":
        return NO_TOOLS
    is_any = tool_choice == "required"
    choices = checked if is_any else [_named(checked, tool_choice)]
    bare = check_schema(call_schema(functions_of(choices)), param="tools", scope=scope)
    grammar = _own_grammar(choices, formats, scope, many=is_any and parallel)
    return ToolUse(checked, calls=True, structured=grammar or bare, is_bare=grammar is None)


def _own_grammar(
    tools: Sequence[Tool], formats: OutputFormats | None, scope: str, *, many: bool
) -> str | None:
    """A grammar of calls in the model's own dialect. None where it has none that can be enforced.

    It is checked with its markers as text: token ids mean nothing to the process that checks it.
    """
    if formats is None:
        return None
    as_text = formats.call_grammar(tools, many=many, by_id=False)
    if as_text is None:
        return None
    try:
        check_grammar(as_text, "tools", param="tools", scope=scope)
    except RequestError:  # too large in this form
        return None
    return formats.call_grammar(tools, many=many)


def _check_tools(tools: Any) -> list[Tool]:
    if not is_list_of(tools, object, 1, MAX_TOOLS):
        raise RequestError(f"tools must be a list of 1 to {MAX_TOOLS} tools", param="tools")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    return list(tools)


def _check_tool(tool: Any, where: str) -> None:
    match tool:
        case {"type": "function", "function": Mapping() as function}:
            name = function.get("name")
            parameters = function.get("parameters", {})
        case _:
            raise RequestError('a tool must be {"type": "function", "function": {"name": ...}}', param=where)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"a function's name must have 1 to 64 letters, digits, _, - or ., not {quoted(name)}"
        raise RequestError(message, param=f"{where}.function.name")
    if not isinstance(parameters, Mapping | None):
        message = "a function's parameters must be a JSON schema"
        raise RequestError(message, param=f"{where}.function.parameters")


def _named(tools: Sequence[Tool], tool_choice: Any) -> Tool:
    match tool_choice:
        case {"type": "function", "function": {"name": str(name)}}:
            for tool in tools:
                if tool["function"]["name"] == name:
                    return tool
            message = f"tool_choice names the function {quoted(name)}, which is not among the tools"
        case _:
            example = '{"type": "function", "function": {"name": ...}}'
            message = f'tool_choice must be "none", "auto", "required" or {example}'
    raise RequestError(message, param="tool_choice")


def calls_for_template(calls: Any, where: str) -> Any:
    """An assistant message's tool_calls with their arguments parsed, as templates print them as JSON."""
    if not isinstance(calls, (list, tuple)):
        raise RequestError("tool_calls must be a list", param=where)
    return [_call_for_template(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call_for_template(call: Any, where: str) -> Any:
    match call:
        case {"function": {"arguments": str(arguments)} as function}:
            pass
        case _:
            return call  # parsed already, or left to the template
    try:
        parsed = json.loads(object_text(arguments))
    except (ValueError, RecursionError):
        message = "the arguments of a tool call must be JSON as text"
        raise RequestError(message, param=f"{where}.function.arguments") from None
    return {**call, "function": {**function, "arguments": parsed}}
