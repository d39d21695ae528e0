"""Tools of a request: what may be asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from saccade import LLM, SamplingParams
from saccade.errors import RequestError
from saccade.processor.dialects.parser import OutputFormats
from saccade.processor.dialects.registry import TOOL_DIALECTS
from saccade.processor.tools import calls_for_template, tools_for_template
from tests.helpers.engine.output_events import Seen

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"$ref": "#/$defs/Unit"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"Unit": {"enum": ["C", "F"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock.now", "parameters": {"type": "object", "properties": {}}}}
CLOCK["function"]["parameters"]["additionalProperties"] = False
TOOLS = [WEATHER, CLOCK]


# --- what may be asked for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [None, "auto"])
def test_by_default_the_model_sees_the_tools_and_decides(choice: str | None) -> None:
    plan = tools_for_template(TOOLS, choice)
    assert (plan.for_template, plan.calls, plan.structured) == (TOOLS, True, None)


@pytest.mark.parametrize(("tools", "choice"), [(TOOLS, "none"), (None, None), (None, "none")])
def test_without_tools_nothing_is_shown_and_nothing_parsed(tools: Any, choice: Any) -> None:
    plan = tools_for_template(tools, choice)
    assert (plan.for_template, plan.calls, plan.structured) == (None, False, None)


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (None, "auto", "tool_choice"),
        ([], None, "tools"),
        ("x", None, "tools"),
        ([WEATHER] * 1000, None, "tools"),
        ([5], None, "tools[0]"),
        ([WEATHER, {"type": "retrieval"}], None, "tools[1]"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], None, "tools[0].function.parameters"),
        (TOOLS, "always", "tool_choice"),
        (TOOLS, 5, "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "missing"}}, "tool_choice"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}], "required", "tools"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_its_place(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        tools_for_template(tools, choice)
    assert caught.value.param == param


def test_a_deeply_nested_schema_of_a_required_tool_is_refused() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(2000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match="64 levels"):
        tools_for_template([{"type": "function", "function": {"name": "f", "parameters": deep}}], "required")


@pytest.fixture(scope="module")
def llm(qwen2_vl_folder: Path) -> Iterator[LLM]:
    made = LLM(model=str(qwen2_vl_folder), max_model_len=1024, kv_cache_gb=0.05, max_pixels=60_000, use_tqdm=False)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "clock.now"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "function", "function": {"name": "clock.now"}}, {"clock.now"}),
    ],
    ids=["any", "the first", "the second"],
)
def test_a_required_call_is_made_with_arguments_that_fit(llm: LLM, choice: Any, names: set[str]) -> None:
    plan = tools_for_template(TOOLS, choice)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=300, n=4, structured=plan.structured)
    outs = llm.generate("Describe this image", params, use_tqdm=False)[0].outputs
    for out in outs:
        call = json.loads(out.text)
        name, arguments = call["name"], call["arguments"]
        assert name in names
        schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}[name]
        jsonschema.validate(arguments, schema)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic", "deepseek_v32", "gemma4"])
def test_whatever_a_model_writes_under_the_grammar_of_a_dialect_is_a_call(llm: LLM, name: str) -> None:
    formats = OutputFormats(TOOL_DIALECTS[name], None, lambda _: None)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=300, n=4, structured=formats.call_grammar(TOOLS))
    for out in llm.generate("Describe this image", params, use_tqdm=False)[0].outputs:
        parser = formats.after("").parser(TOOLS)
        seen = Seen(parser.push(out.text) + parser.finish())
        assert (len(seen.raw), seen.problems, seen.content) == (1, [], ""), out.text


# --- calls in earlier messages ------------------------------------------------------------------------------------


def test_arguments_of_earlier_calls_reach_the_template_as_objects() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "x"]}'}}
    (given,) = calls_for_template([call], "messages[1].tool_calls")
    assert given["function"] == {"name": "f", "arguments": {"a": [1, "x"]}}
    assert call["function"]["arguments"] == '{"a": [1, "x"]}'


@pytest.mark.parametrize("call", [{"function": {"name": "f", "arguments": {"a": 1}}}, {"name": "f"}, 5], ids=str)
def test_earlier_calls_of_another_form_are_left_to_the_template(call: Any) -> None:
    assert calls_for_template([call], "here") == [call]


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("x", "here"),
        ([{"function": {"name": "f", "arguments": "{"}}], "here[0].function.arguments"),
    ],
)
def test_earlier_calls_that_are_malformed_are_refused_with_their_place(calls: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        calls_for_template(calls, "here")
    assert caught.value.param == param
