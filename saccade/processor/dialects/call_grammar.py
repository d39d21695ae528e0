"""Writes the grammar of a required tool call, so that the model calls as it was trained to.

Each dialect has a `write_` function beside its parser; this module has what they share. A schema that a
dialect of plain text cannot hold an output to is `Inexpressible`: such calls are written as bare JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from saccade.processor.dialects.arguments import part_of, resolved, types_of
from saccade.processor.dialects.reader import any_of
from saccade.structured.schema_validation import MAX_SCHEMA_BYTES
from saccade.structured.structural_tag import embedded_schema, quoted_text

BREAK = r'"\n"?'
COMMA = '"," " "?'
NOTES = frozenset({"title", "description", "default", "examples", "example", "deprecated", "$schema", "$id"})
_OBJECT = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "strict"}
_STRING = NOTES | {"type", "minLength", "maxLength"}
_KEY = re.compile(r"[\w.-]{1,64}")
_DEFINITIONS = ("$defs", "definitions")
_CHOICES = ("anyOf", "oneOf")
_MAX_CHARS = 2 * MAX_SCHEMA_BYTES  # written for a grammar, which may have half of them


class Inexpressible(Exception):
    """The dialect has no grammar for this schema."""


class Function(NamedTuple):
    name: str
    parameters: Mapping[str, Any]  # an object's schema


class Member(NamedTuple):
    """An argument, or a property of an object."""

    key: str
    schema: Any
    is_required: bool


def functions_of(tools: Sequence[Mapping[str, Any]]) -> list[Function]:
    return [Function(tool["function"]["name"], parameters_of_call(tool)) for tool in tools]


def parameters_of_call(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, also where the schema does not say so. Without a schema there are none.

    Names that a schema does not list are left out, unless it says what they are.
    """
    parameters: Mapping[str, Any] = part_of(tool["function"], "parameters", {"additionalProperties": False})
    if parameters.get("properties") and not set(parameters) - _OBJECT:
        parameters = {"additionalProperties": False, **parameters}
    return parameters if parameters.keys() & {"type", "$ref"} else {"type": "object", **parameters}


def members_of(schema: Mapping[str, Any]) -> list[Member]:
    """Members in the schema's order. Names that it allows but does not list are left out."""
    properties = part_of(schema, "properties", {})
    required = part_of(schema, "required", ())
    is_map = not properties and schema.get("additionalProperties") not in (None, False)
    if set(schema) - _OBJECT or schema.get("type") != "object" or is_map or set(required) - set(properties):
        raise Inexpressible
    if not all(map(_KEY.fullmatch, properties)):
        raise Inexpressible
    return [Member(key, value, key in required) for key, value in properties.items()]


class GrammarWriter:
    """The rules of one grammar in Lark. Methods return expressions.

    `token_id` gives the token of a marker, where it is one: the library takes such a token by its id only.
    """

    def __init__(self, markers: Sequence[str], token_id: Callable[[str], int | None]) -> None:
        pairs = ((marker, token_id(marker)) for marker in markers)
        self._ids = {marker: i for marker, i in pairs if i is not None}
        self._marker = re.compile(f"({any_of(self._ids)})")
        self._lines: list[str] = []
        self._num_chars = 0

    def has_token(self, marker: str) -> bool:
        return marker in self._ids

    def grammar(self, calls: str) -> str:
        """The whole grammar. Most models break the line after thinking."""
        return "\n".join([f"start: SPACE? {calls}", r"SPACE: /[ \n]{1,4}/", *self._lines])

    def rule(self, body: str, attributes: str = "") -> str:
        return self._add(f"part_{len(self._lines)}", f"{attributes}: {body}")

    def terminal(self, body: str) -> str:
        return self._add(f"PART_{len(self._lines)}", f": {body}")

    def _add(self, name: str, definition: str) -> str:
        self._lines.append(name + self._counted(definition))
        return name

    def _counted(self, text: str) -> str:
        """A small schema may ask for a large grammar: a definition is written wherever one refers to it."""
        self._num_chars += len(text)
        if self._num_chars > _MAX_CHARS:
            raise Inexpressible
        return text

    def literal(self, text: str) -> str:
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else quoted_text(part) for part in self._split(text)
        )

    def _split(self, text: str) -> list[str]:
        """Markers that are tokens, and the text between them."""
        return [part for part in self._marker.split(text) if part]

    def json(self, schema: Any, root: Mapping[str, Any] | None = None) -> str:
        """A value as JSON. `root` has the definitions that the schema refers to."""
        if root is None or not isinstance(schema, Mapping):
            return embedded_schema(schema)
        if not all(_is_definition(reference) for reference in _references(schema)):
            raise Inexpressible
        definitions = {name: root[name] for name in _DEFINITIONS if name in root}
        return self._counted(embedded_schema({**definitions, **schema}))

    def any_of(self, options: Sequence[str]) -> str:
        return self.rule(" | ".join(options))

    def repeated(self, call: str, separator: str, many: bool) -> str:
        return f"{call} ({separator} {call})*" if many else call

    def in_turn(self, members: Sequence[Member], write: Callable[[Member], str]) -> str:
        """Members one after the other, each with its own end."""
        parts = [(member, write(member)) for member in members]
        return " ".join(f"({text})" if member.is_required else f"({text})?" for member, text in parts)

    def listed(self, members: Sequence[Member], separator: str, write: Callable[[Member], str]) -> str:
        """The same with a separator between them. Made from the last one to the first."""
        first = later = ""  # what may follow, as the first of all and after another
        for member in reversed(members):
            name = self.rule(write(member))
            begins = f"{name} {later}"
            goes_on = f"{quoted_text(separator)} {name}"
            if member.is_required:
                first = self.rule(begins)
            else:
                first = self.rule(f"{begins} | {first}") if first else f"{self.rule(begins)}?"
            later = self.rule(f"{goes_on} {later}" if member.is_required else f"({goes_on})? {later}")
        return first

    def value(self, schema: Any, root: Mapping[str, Any], end: str, *, lines: bool = False) -> str:
        """An argument as `ArgumentWriter.copy_text` reads it: a string as it is, other types as JSON."""
        types = types_of(schema, root)
        if "string" not in types:
            return f"{self.json(schema, root)} {self._end(end, lines)}"
        return self.string(resolved(schema, root), root, end, or_null="null" in types, lines=lines)

    def _end(self, end: str, lines: bool) -> str:
        return self.literal(f"\n{end}" if lines else end)

    def string(
        self,
        schema: Mapping[str, Any],
        root: Mapping[str, Any],
        end: str,
        *,
        or_null: bool,
        lines: bool = False,
    ) -> str:
        """Plain text and what ends it, the first time it comes. `lines`: after a line break."""
        for name in _CHOICES:
            if {name} <= set(schema) <= NOTES | {name}:
                first = _first_string(schema[name], root)
                return self.string(first, root, end, or_null=or_null, lines=lines)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices is not None:
            texts = ["null" if choice is None and or_null else choice for choice in choices]
            if not all(isinstance(text, str) and text and end not in text for text in texts):
                raise Inexpressible
            return f"{self.terminal(' | '.join(map(quoted_text, texts)))} {self._end(end, lines)}"
        if set(schema) - _STRING:
            raise Inexpressible
        match schema.get("minLength", 0), schema.get("maxLength"):
            case int(low), int() | None as high:
                return self._text_until(end, low, high, lines)
        raise Inexpressible

    def _text_until(self, end: str, low: int, high: int | None, lines: bool) -> str:
        """Text of `low` to `high` letters. What would end it must not come too early."""
        more = "*" if high is None else f"{{0,{max(0, high - low)}}}"
        letters = rf"[^<\n]{{{low}}}(.|\n){more}" if low else rf"(.|\n){more}"
        if lines:
            letters += r"\n?"
        head, *later = self._split(end)
        if head in self._ids:  # no text contains it
            return f"/{letters}/ {self.literal(end)}"
        if not later:
            return self.rule(f"/{letters}/ {quoted_text(end)}", "[lazy]")
        first = re.escape(head[0])
        if low or high is not None:
            return f"/[^{first}]{{{low},{'' if high is None else high}}}/ {self.literal(end)}"
        # The end has a token inside of it. What comes before the token may also be part of the text.
        close = self.terminal(quoted_text(head))
        piece = self.terminal(f"/[^{first}]+|{first}/")
        return self.rule(f"({piece} | {close})* {close} {self.literal(''.join(later))}")


def _first_string(choices: Sequence[Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first choice of a string that has no choices itself, since a schema may refer to itself."""
    for choice in choices:
        option = resolved(choice, root)
        if "string" in types_of(option, root) and not any(name in option for name in _CHOICES):
            return option  # type: ignore[no-any-return]
    raise Inexpressible


def _is_definition(reference: Any) -> bool:
    return str(reference).startswith(("#/$defs/", "#/definitions/"))


def _references(schema: Any) -> list[Any]:
    if isinstance(schema, list):
        return [reference for entry in schema for reference in _references(entry)]
    if not isinstance(schema, Mapping):
        return []
    inner = [reference for value in schema.values() for reference in _references(value)]
    return [schema["$ref"], *inner] if "$ref" in schema else inner
