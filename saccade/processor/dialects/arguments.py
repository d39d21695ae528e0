"""Arguments of a tool call: checked against the tool's JSON schema, and read from text by their type.

The check is small on purpose: types, required and unknown properties, enums. It stops after a bounded number
of steps, because schemas come from clients; a `tool_choice` that must hold is enforced by a grammar instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from saccade.errors import is_list_of

_MAX_STEPS = 20_000
_MAX_DEPTH = 100  # of schemas in each other, also where one refers to itself
_MAX_REFERENCE = 512  # characters
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_PYTHON = {"True": True, "False": False, "None": None}  # models write them now and then


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each tool's parameters, by its name."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: part_of(function, "parameters", {}) for function in functions}


def part_of(schema: Mapping[str, Any], name: str, default: Any) -> Any:
    """What a schema has there; the default where that is nothing, empty or null."""
    return schema.get(name) or default


def object_text(arguments: str) -> str:
    """Models and clients may leave out an object without members."""
    return arguments or "{}"


def parsed_object(text: str) -> dict[str, Any] | None:
    """A JSON object; None if the text is no such thing."""
    try:
        value = json.loads(object_text(text), parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def no_constant(name: str) -> NoReturn:
    """A hook for `json.loads`, which would take NaN and Infinity."""
    raise ValueError(f"{name} is not JSON")


# --- text to values -----------------------------------------------------------------------------------------


def types_of(schema: Any, parameters: Mapping[str, Any]) -> frozenset[str]:
    """The types that a property may have; none if its schema does not say."""
    schema = resolved(schema, parameters)
    if not isinstance(schema, Mapping):
        return frozenset()
    types = set(_kinds(schema))
    for name in ("anyOf", "oneOf"):
        for choice in _listed(schema.get(name))[:_MAX_DEPTH]:
            match choice:
                case {"type": str(kind)}:
                    types.add(kind)
    if types:
        return frozenset(types)
    return frozenset({"string"} if is_list_of(schema.get("enum"), str, 1) else ())


def as_json(text: str, types: frozenset[str]) -> str:
    """An argument that the model wrote as plain text, as JSON of a type that its schema allows."""
    stripped = text.strip()
    if "string" in types and stripped not in {"null"} & types:
        return json.dumps(text, ensure_ascii=False)
    try:
        value = _PYTHON[stripped] if stripped in _PYTHON else json.loads(stripped, parse_constant=no_constant)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)  # the check against the schema says so


# --- the check ----------------------------------------------------------------------------------------------


def fits(value: Any, parameters: Mapping[str, Any]) -> bool:
    return _Check(parameters).fits(value, parameters)


class _Check:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MAX_STEPS

    def fits(self, value: Any, schema: Any, depth: int = _MAX_DEPTH) -> bool:
        schema = resolved(schema, self._root)
        self._left -= 1
        if self._left < 0 or not depth or not isinstance(schema, Mapping):
            return schema is not False
        self._left -= sum(len(_listed(schema.get(name))) for name in ("type", "enum", "required"))
        if not _has_type(value, schema) or not _is_listed(value, schema):
            return False
        choices = _listed(schema.get("anyOf")) or _listed(schema.get("oneOf"))
        if choices and not any(self.fits(value, choice, depth - 1) for choice in choices):
            return False
        match value:
            case dict():
                return self._object_fits(value, schema, depth - 1)
            case list() if "items" in schema:
                return all(self.fits(entry, schema["items"], depth - 1) for entry in value)
        return True

    def _object_fits(self, value: dict[str, Any], schema: Mapping[str, Any], depth: int) -> bool:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            properties = {}
        if not value.keys() >= {name for name in _listed(schema.get("required")) if isinstance(name, str)}:
            return False
        other = schema.get("additionalProperties", True)
        if schema.get("patternProperties"):
            other = True
        return all(self.fits(entry, properties.get(name, other), depth) for name, entry in value.items())


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema names. It is unchecked: they may be anything."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return [kinds]
    return [kind for kind in _listed(kinds) if isinstance(kind, str)]


def _has_type(value: Any, schema: Mapping[str, Any]) -> bool:
    kinds = [kind for kind in _kinds(schema) if kind in _TYPES]
    return not kinds or any(_is(value, kind) for kind in kinds)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if (type(value), kind) == (float, "integer"):
        return bool(value.is_integer())
    return isinstance(value, _TYPES[kind])


def _is_listed(value: Any, schema: Mapping[str, Any]) -> bool:
    if value != schema.get("const", value):
        return False
    values = schema.get("enum")
    return not isinstance(values, (list, tuple)) or value in values


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema, or what its `$ref` names inside of `root`; anything is allowed where that leads nowhere."""
    for _ in range(8):
        match schema:
            case {"$ref": str(reference)}:
                pass
            case _:
                return schema
        if len(reference) > _MAX_REFERENCE:
            break
        schema = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) and name else schema
    return {}
