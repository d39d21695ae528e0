"""What a client may ask of an answer's form, and what is refused before it reaches the engine."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from saccade.errors import EngineUnavailable, RequestError
from saccade.helpers import process
from saccade.helpers.process import HelperProcess, _Child
from saccade.server.request.chat import read_chat, read_completion
from saccade.server.request.fields import FieldReader
from saccade.structured import schema_validation
from saccade.structured.schema import grammar_of
from saccade.structured.schema_validation import (
    CHECKS,
    MAX_SCHEMA_BYTES,
    SchemaChecks,
    check_schema,
    check_structured,
)
from saccade.structured.schema_validation_worker import problem
from saccade.structured.structured_outputs import structured_from

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


def test_free_text_needs_no_schema() -> None:
    assert structured_from({"type": "text"}) is None


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
    "a pattern with braces that count nothing": {"type": "string", "pattern": r"^\{99999\}$"},
    "many optional properties": {"properties": {f"p{i}": {"type": "integer"} for i in range(300)}},
    "a long list of names": {"enum": [f"name-{i}" for i in range(5000)]},
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
    "a pattern that repeats too often": ({"type": "string", "pattern": "^a{120000}$"}, "120000 times, and 10000 are"),
    "a range of repeats that goes too far": ({"type": "string", "pattern": "^[ab]{3,99999}$"}, "99999 times"),
    "a string that is too long": ({"type": "string", "maxLength": 2_000_000}, "maxLength is 2000000, and 1000000 is"),
    "a list that is too long": ({"type": "array", "minItems": 1e9}, "minItems"),
    "too many optional properties": ({"properties": {f"p{i}": {} for i in range(600)}}, "601 optional properties"),
    "too many choices, through references": (
        {
            "$defs": {f"d{j}": {"anyOf": [{"properties": {f"p{i}": {}}} for i in range(60)]} for j in range(9)},
            "type": "array",
            "items": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(9)]},
        },
        "500 are allowed",
    ),
    "too many objects to choose from": ({"enum": [{"a": i} for i in range(600)]}, "500 are allowed"),
    "a grammar that fails with its first letter": (
        {"anyOf": [{"type": "array", "items": {"type": "string", "maxLength": i}} for i in range(1, 450)]},
        "too complex",
    ),
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


@pytest.fixture
def checks() -> Iterator[SchemaChecks]:
    made = SchemaChecks()
    yield made
    made.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What processes were asked."""
    texts: list[str] = []
    ask = HelperProcess.ask
    monkeypatch.setattr(
        HelperProcess, "ask", lambda self, parts, seconds: (texts.append(str(parts)), ask(self, parts, seconds))[1]
    )
    return texts


def test_a_schema_is_checked_once_however_often_it_is_sent(checks: SchemaChecks, asked: list[str]) -> None:
    for _ in range(3):
        assert checks.problem('{"enum":["seen","before"]}') is None
        assert checks.problem('{"type":"nothing"}')
    assert len(asked) == 2


def test_a_scope_does_not_profit_from_what_another_one_sent(checks: SchemaChecks, asked: list[str]) -> None:
    for scope in ("one", "two", "one"):
        checks.problem('{"enum":["a"]}', scope)
    assert len(asked) == 2


def test_what_a_caller_sends_is_checked_in_its_own_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes: list[str] = []
    monkeypatch.setattr(CHECKS, "problem", lambda text, scope: scopes.append(scope))
    tool = {"type": "function", "function": {"name": "f", "parameters": OBJECT}}
    bodies = [
        {"messages": [{"role": "user"}], "response_format": wrapped(OBJECT)},
        {"messages": [{"role": "user"}], "tools": [tool], "tool_choice": "required"},
    ]
    for body in bodies:
        read_chat(body, FieldReader(strict=False).for_scope("tenant"))
    read_completion(
        {"prompt": "a", "structured_outputs": {"json": OBJECT}}, FieldReader(strict=False).for_scope("other"), 1
    )
    assert scopes == ["tenant", "tenant", "other"]


def test_what_is_remembered_of_schemas_is_small_and_bounded(
    checks: SchemaChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_validation, "_MAX_CACHED", 2)
    long = "x" * 200_000
    assert len(checks.problem(json.dumps({long: 1})) or "") < 400
    for i in range(4):
        checks.problem(json.dumps({"enum": [i, long]}))
    assert len(pickle.dumps(checks._cached)) < 2000


def test_one_process_checks_many_schemas(checks: SchemaChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = _Child.__init__
    monkeypatch.setattr(_Child, "__init__", lambda self, *args: (started.append(self), start(self, *args))[1])
    for i in range(5):
        assert checks.problem(json.dumps({"const": i})) is None
    assert len(started) == 1


@pytest.mark.parametrize("name", ["a schema the compiler dies of", "patterns that take minutes to intersect"])
def test_a_process_that_dies_of_a_schema_is_replaced(checks: SchemaChecks, name: str) -> None:
    assert checks.problem('{"const":1}') is None
    assert "too complex" in (checks.problem(json.dumps(REFUSED[name][0])) or "")
    assert all(process.pid is None for process in checks._processes.helpers)
    assert checks.problem('{"const":2}') is None


def test_a_check_without_an_answer_is_ended_and_not_remembered(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, _ = REFUSED["patterns that take minutes to intersect"]
    monkeypatch.setattr(process, "_HUNG_SECONDS", 0.01 - schema_validation.CPU_SECONDS)
    monkeypatch.setattr(process, "_MIN_SHARE", 1e9)  # that it works does not help
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="stands still"):
            check_schema(slow, scope="another")
    assert len(asked) == 2


def test_the_time_of_a_check_counts_for_its_thread_unless_the_result_is_known(checks: SchemaChecks) -> None:
    slow = json.dumps(REFUSED["patterns that take minutes to intersect"][0])
    for least, most in ((0.5 * schema_validation.CPU_SECONDS, 3600), (0, 0.1)):
        start = process.thread_seconds()
        checks.problem(slow)
        assert least <= process.thread_seconds() - start < most


def test_checks_that_were_closed_start_a_process_again(checks: SchemaChecks) -> None:
    for _ in range(2):
        assert checks.lark_of_ebnf('root ::= "a"')[1] is None
        checks.close()


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
    "module", ["saccade.structured.schema_validation", "saccade.processor.tools", "saccade.media.fetch"]
)
def test_checking_a_request_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
