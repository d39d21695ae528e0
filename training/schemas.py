"""JSON schemas that questions are held to."""

from __future__ import annotations

import json
from random import Random
from typing import Any

Schema = dict[str, Any]
_EMPTY = {"string": '""', "integer": "0", "number": "0", "boolean": "false", "array": "[]", "null": "null"}


def empty(kind: str, *, is_optional: bool) -> str:
    """The value, as JSON, of something that is not there."""
    return "null" if is_optional else _EMPTY[kind]


def closed(schema: Schema) -> str:
    """The answer about a picture that holds nothing of what a schema asks for."""
    if "anyOf" in schema:
        return "null"
    if schema["type"] == "object":
        return json.dumps({key: json.loads(closed(part)) for key, part in schema["properties"].items()})
    return "null" if "null" in schema["type"] else _EMPTY[schema["type"]]


def optional(rng: Random, schema: Schema) -> Schema:
    """The schema with null allowed for each single value, in one of the two ways this is written."""
    return _optional(schema, is_any_of=rng.random() < 0.4)


def _optional(schema: Schema, *, is_any_of: bool) -> Schema:
    if "anyOf" in schema or isinstance(schema["type"], list):
        return schema
    if schema["type"] == "object":
        parts = {key: _optional(part, is_any_of=is_any_of) for key, part in schema["properties"].items()}
        return {**schema, "properties": parts}
    if schema["type"] == "array":
        is_rows = schema["items"].get("type") == "object"
        return {**schema, "items": _optional(schema["items"], is_any_of=is_any_of)} if is_rows else schema
    return {"anyOf": [schema, {"type": "null"}]} if is_any_of else {"type": [schema["type"], "null"]}
