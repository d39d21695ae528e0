"""What a client may ask of an answer's form, and what is refused before it reaches the engine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from saccade.processor import structured
from saccade.processor.schema_check import problem
from saccade.processor.structured import MAX_SCHEMA_BYTES, check_schema, check_structured, structured_from
from saccade.schema import grammar_of
from saccade.types import RequestError

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def wrapped(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def node(required: bool) -> dict[str, Any]:
    inner = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    return {"$defs": {"node": {**inner, "required": ["next"] if required else []}}, "$ref": "#/$defs/node"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int) -> dict[str, Any]:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$defs": {**links, f"a{length}": {"type": "integer"}}, "$ref": "#/$defs/a0"}


# --- the forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, {"type": "text"}])
def test_free_text_needs_no_schema(given: Any) -> None:
    assert structured_from(given) is None


def test_json_object_is_the_schema_of_any_object() -> None:
    assert structured_from({"type": "json_object"}) == '{"type":"object"}'


def test_json_schema_gives_the_schema_as_text_in_its_own_order() -> None:
    text = structured_from(wrapped(OBJECT))
    assert text is not None and text.startswith('{"type":"object","properties":{"a"')


@pytest.mark.parametrize(
    "given",
    [
        "json",
        {},
        {"type": "yaml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": []}},
    ],
    ids=str,
)
def test_a_response_format_of_another_form_is_refused(given: Any) -> None:
    with pytest.raises(RequestError) as caught:
        structured_from(given)
    assert caught.value.param == "response_format"


# --- the schemas --------------------------------------------------------------------------------------------------

ACCEPTED: dict[str, Any] = {
    "an object": OBJECT,
    "a list that may end": node(required=False),
    "a tree": {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"},
    "a value or itself": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
    "a short chain of references": chain(20),
    "titles and defaults": {**OBJECT, "title": "T", "description": "d", "default": {"$ref": "http://a.example/"}},
    "a property called $ref": {"type": "object", "properties": {"$ref": {"type": "string"}}},
    "a pattern with repeats side by side": {"type": "string", "pattern": r"^\w+@(\w+\.)+\w+$"},
    "choices that exclude each other": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
}
REFUSED: dict[str, tuple[Any, str]] = {
    "a catastrophic pattern": ({"type": "string", "pattern": "(a+)+b"}, "one repeat"),
    "an invalid pattern": ({"type": "string", "pattern": "(a"}, "pattern"),
    "a pattern that looks ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "a remote reference": ({"$ref": "http://127.0.0.1:1/x.json"}, "nothing is fetched"),
    "a reference to a file": ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "nothing is fetched"),
    "a reference to itself": ({"$ref": "#"}, "without end"),
    "references in a circle": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        "without end",
    ),
    "a list without an end": (node(required=True), "without end"),
    "a tree without leaves": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "without end"),
    "choices that all go on": (
        {"anyOf": [{"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}]},
        "without end",
    ),
    "a missing definition": ({"$ref": "#/$defs/nothing"}, "references"),
    "a deep schema": (nested(100), "64 levels"),
    "a schema the compiler dies of": (chain(2000), "too complex"),
    "patterns that take minutes to intersect": (
        {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b"} for i in range(20)]},
        "simpler",
    ),
    "a schema that grows when written out": (
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]},
        "smaller",
    ),
    "a keyword that cannot be enforced": ({"not": {"type": "string"}}, '"not"'),
    "an unknown format": ({"type": "string", "format": "poem"}, '"poem"'),
    "overlapping choices": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "anyOf"),
    "an impossible range": ({"type": "integer", "minimum": 5, "maximum": 3}, "no JSON value"),
    "an unknown type": ({"type": "nothing"}, "keywords"),
    "a number that JSON does not have": ({"const": float("nan")}, "JSON does not have"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_schema_that_can_be_enforced_is_accepted(name: str) -> None:
    assert structured_from(wrapped(ACCEPTED[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused_in_time_with_the_reason(name: str) -> None:
    schema, part = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        structured_from(wrapped(schema))
    assert part in caught.value.message
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_json_schema")


def test_a_huge_schema_is_refused_by_its_size() -> None:
    with pytest.raises(RequestError, match=f"may have {MAX_SCHEMA_BYTES}"):
        structured_from(wrapped({"enum": ["x" * (10 << 20)]}))


def test_a_schema_too_deep_to_be_written_is_refused() -> None:
    with pytest.raises(RequestError, match="nested too deeply"):
        structured_from(wrapped(nested(100_000)))


def test_a_schema_is_compiled_once_however_often_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"enum": ["seen", "before"]}
    check_schema(schema)
    monkeypatch.setattr(structured.subprocess, "run", None)
    check_schema(schema)


def test_a_check_that_takes_too_long_is_ended_and_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"enum": ["slow"]}
    monkeypatch.setattr(structured, "CHECK_SECONDS", 0.001)
    with pytest.raises(RequestError, match=r"within 0\.001 s"):
        check_schema(schema)
    monkeypatch.undo()
    check_schema(schema)


@pytest.mark.parametrize("text", ["", "{", "[1]", "5", "[" * 100_000], ids=lambda t: t[:5])
def test_text_of_a_python_caller_that_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_structured(text)
    assert caught.value.param == "structured"


# --- the parts ----------------------------------------------------------------------------------------------------


def test_options_inside_a_schema_are_overruled() -> None:
    assert "EVIL" not in grammar_of('{"type": "string", "x-guidance": {"whitespace_pattern": "EVIL"}}')


@pytest.mark.parametrize("text", ["no JSON", "[" * 100_000, '"\\ud800"'], ids=lambda t: t[:8])
def test_the_check_itself_survives_any_text(text: str) -> None:
    assert problem(text)


@pytest.mark.parametrize(
    "module", ["saccade.processor.structured", "saccade.processor.tools", "saccade.processor.fetch"]
)
def test_checking_a_request_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
