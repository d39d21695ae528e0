"""JSON schema of a call that is a JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.errors import RequestError
from saccade.processor.dialects.call_grammar import Function

_MAX_DEPTH = 64


def call_schema(functions: Sequence[Function], key: str = "arguments") -> dict[str, Any]:
    """A schema of one call to one of the functions. The $refs of each are rebased."""
    calls = []
    for index, function in enumerate(functions):
        arguments = _rebased(function.parameters, f"#/anyOf/{index}/properties/{key}")
        properties = {"name": {"const": function.name}, key: arguments}
        required = {"required": ["name", key], "additionalProperties": False}
        calls.append({"type": "object", "properties": properties, **required})
    return {"anyOf": calls}


def _rebased(schema: Any, root: str, depth: int = _MAX_DEPTH) -> Any:
    if depth == 0:
        message = f"a function's parameters are nested more than {_MAX_DEPTH} levels deep"
        raise RequestError(message, param="tools")
    if isinstance(schema, list):
        return [_rebased(entry, root, depth - 1) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _rebased(value, root, depth - 1) for name, value in schema.items()}
    reference = str(schema.get("$ref"))
    if reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
