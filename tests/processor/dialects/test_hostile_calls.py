"""Calls and schemas as nobody should write them: no error, no long wait, nothing told twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from saccade.processor.dialects.arguments import as_json, fits, types_of
from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.parser import OutputParser
from saccade.processor.dialects.registry import TOOL_DIALECTS
from tests.helpers.engine.output_events import Seen


def read(dialect: str, text: str, parameters: Mapping[str, Any] | None = None) -> Seen:
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters or {}}}]
    parser = OutputParser(EventSink(tools), TOOL_DIALECTS[dialect])
    return Seen([event for letter in text for event in parser.push(letter)] + parser.finish())


@pytest.mark.parametrize("kind", [None, 5, {"type": "string"}, [["string"]]])
def test_a_type_that_is_none_allows_everything(kind: Any) -> None:
    schema = {"properties": {"a": {"type": kind}}}

    assert types_of(schema["properties"]["a"], schema) == frozenset()
    assert fits({"a": 5}, schema)


def test_a_schema_that_only_refers_to_itself_allows_everything() -> None:
    endless = {"anyOf": [{"$ref": "#/$defs/a"}]}

    assert fits({"a": 1}, {"$defs": {"a": endless}, "$ref": "#/$defs/a"})


def test_a_check_stops_at_its_number_of_steps() -> None:
    """Without a limit this would be 10,000 times 10,000 comparisons."""
    values = list(range(10_000))
    wrong = [0] * 9_999 + [-1]  # nobody looks at the last one

    assert fits({"a": wrong}, {"properties": {"a": {"items": {"enum": values}}}})
    assert fits({"a": wrong}, {"properties": {"a": {"items": {"type": "integer", "required": values}}}})
    assert not fits({"a": [0, -1]}, {"properties": {"a": {"items": {"enum": [0]}}}})


def test_a_long_reference_is_not_followed() -> None:
    long = "#" + "/" * 10_000 + "$defs/text"

    assert not fits({"a": 1}, {"$defs": {"text": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/text"}}})
    assert fits({"a": 1}, {"$defs": {"text": {"type": "string"}}, "properties": {"a": {"$ref": long}}})


HALF = "\\ud800"


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"a\\": \\"' + HALF + '\\"}"}</tool_call>'),
        ("glm45", f'<tool_call>look\n<arg_key>a</arg_key><arg_value>"{HALF}"</arg_value></tool_call>'),
        ("pythonic", f"[look(a='{HALF}')]"),
    ],
)
def test_half_a_character_stays_an_escape(dialect: str, text: str) -> None:
    """Alone it has no UTF-8, so that no response could hold it."""
    seen = read(dialect, text)

    assert seen.raw == [("look", '{"a": "' + HALF + '"}')]
    assert seen.problems == []


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("gemma4", "<|tool_call>call:look{a:NaN}<tool_call|>"),
        ("glm45", "<tool_call>look\n<arg_key>a</arg_key><arg_value>NaN</arg_value></tool_call>"),
    ],
)
def test_numbers_that_json_does_not_have_are_text(dialect: str, text: str) -> None:
    assert read(dialect, text).calls == [("look", {"a": "NaN"})]


def test_a_number_too_large_is_text() -> None:
    assert json.loads(as_json("1e999", frozenset({"number"}))) == "1e999"


@pytest.mark.parametrize(
    ("dialect", "text", "rest"),
    [
        ("llama3_json", '{"name": "look", "parameters": {}}; {"name": "other"}', '; {"name": "other"}'),
        ("pythonic", "[look(), other(b=2)]", ", other(b=2)]"),
        ("mistral", '[TOOL_CALLS][{"name": "look", "arguments": {}}, {"nam": 5}]', ', {"nam": 5}]'),
    ],
)
def test_a_call_before_a_broken_one_is_not_told_again_as_text(dialect: str, text: str, rest: str) -> None:
    seen = read(dialect, text)

    assert (seen.raw, seen.content) == ([("look", "{}")], rest)


def test_a_call_after_a_broken_one_of_mistral_is_found() -> None:
    seen = read("mistral", '[TOOL_CALLS]look[ARGS]{"a": bad}[TOOL_CALLS]look[ARGS]{"a": 2}')

    assert seen.raw == [("look", '{"a": bad}'), ("look", '{"a": 2}')]
    assert seen.problems == ["syntax"]


@pytest.mark.parametrize(
    "call", ["<function=look>\n<parameter=a>\n1\n</parameter>\n?</function>", '{"name": "look", "arguments": {?}}']
)
def test_the_tags_of_a_broken_call_of_qwen3_coder_are_not_text(call: str) -> None:
    seen = read("qwen3_coder", f"<tool_call>\n{call}\n</tool_call>done")

    assert (seen.content, seen.problems) == ("done", ["syntax"])


def test_an_answer_in_json_is_no_broken_call() -> None:
    seen = read("llama3_json", '{"answer": 5}')

    assert (seen.content, seen.problems) == ('{"answer": 5}', [])


def test_held_white_space_is_told_whole() -> None:
    assert read("hermes", "a" + " \n" * 500 + "b ").content == "a" + " \n" * 500 + "b "
