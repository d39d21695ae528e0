"""Tool calls: what may be asked for, and how they are found in a text that comes in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from saccade import LLM, SamplingParams
from saccade.errors import RequestError
from saccade.processor.tools import (
    CallArguments,
    CallStart,
    Content,
    ToolDelta,
    ToolParser,
    calls_for_template,
    tools_for_template,
)

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

PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TRICKY = '<tool_call>{"name": "say", "arguments": {"text": "a \\"</tool_call>\\" <tool_call> ü {"}}</tool_call>'


class CrossAttentionRows:
    """What a client has after the last delta."""

    def __init__(self, deltas: list[ToolDelta]) -> None:
        self.content = "".join(d.text for d in deltas if isinstance(d, Content))
        starts = [d for d in deltas if isinstance(d, CallStart)]
        assert [d.index for d in starts] == list(range(len(starts)))
        assert len({d.id for d in starts}) == len(starts)
        arguments = ["" for _ in starts]
        known = 0
        for delta in deltas:
            known += isinstance(delta, CallStart)
            if isinstance(delta, CallArguments):
                assert delta.index < known, "a name comes before its arguments"
                arguments[delta.index] += delta.arguments
        self.calls = [(start.name, json.loads(text)) for start, text in zip(starts, arguments, strict=True)]


def parse(*pieces: str, is_bare: bool = False) -> CrossAttentionRows:
    parser = ToolParser(is_bare=is_bare)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    seen = CrossAttentionRows(deltas)
    assert parser.has_calls == bool(seen.calls)
    return seen


WEATHER_IN_PARIS = ("get_weather", {"city": "Paris"})
TEXTS: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "plain text": ("No tools here, 1 < 2 <tool> </tool_call>.\n", "No tools here, 1 < 2 <tool> </tool_call>.\n", []),
    "one call": (PARIS, "", [WEATHER_IN_PARIS]),
    "text before a call": (f"Let me look.\n{PARIS}", "Let me look.", [WEATHER_IN_PARIS]),
    "text after a call": (f"{PARIS}\nDone.", "\nDone.", [WEATHER_IN_PARIS]),
    "two calls": (f"{PARIS}\n{PARIS}\n", "", [WEATHER_IN_PARIS, WEATHER_IN_PARIS]),
    "a tag inside a string": (TRICKY, "", [("say", {"text": 'a "</tool_call>" <tool_call> ü {'})]),
    "no closing tag": (PARIS.removesuffix("\n</tool_call>"), "", [WEATHER_IN_PARIS]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    "text between": (f"a {PARIS} b {PARIS} c", "a b c", [WEATHER_IN_PARIS, WEATHER_IN_PARIS]),
    "nothing": ("", "", []),
}
MALFORMED = [
    "<tool_call>not JSON</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>["f"]</tool_call>',
    "<tool_call></tool_call>",
    '<tool_call>{"name": "f", "argum',
    "<tool_call>",
    "text <tool_cal",
    f"<tool_call>{'[' * 5000}</tool_call>",
]


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_found_wherever_the_text_is_cut(name: str) -> None:
    text, content, calls = TEXTS[name]
    for cut in range(len(text) + 1):
        seen = parse(text[:cut], text[cut:])
        assert (seen.content, seen.calls) == (content, calls)


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_found_letter_by_letter(name: str) -> None:
    text, content, calls = TEXTS[name]
    seen = parse(*text)
    assert (seen.content, seen.calls) == (content, calls)


@pytest.mark.parametrize("text", MALFORMED, ids=lambda t: t[:40])
def test_what_is_not_a_valid_call_comes_back_as_content(text: str) -> None:
    seen = parse(text)
    assert (seen.content, seen.calls) == (text, [])


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    seen = parse(f"<tool_call>oops</tool_call>\n{PARIS}")
    assert (seen.content, seen.calls) == ("<tool_call>oops</tool_call>", [WEATHER_IN_PARIS])


def test_text_is_passed_on_before_the_answer_is_over() -> None:
    parser = ToolParser()
    assert parser.push("Let me") == [Content("Let me")]
    assert parser.push(" look <b") == [Content(" look <b")]


def test_a_call_is_told_as_soon_as_it_is_whole() -> None:
    parser = ToolParser()
    assert parser.push(PARIS[:-1]) == []
    assert [type(delta) for delta in parser.push(PARIS[-1])] == [CallStart, CallArguments]


def test_a_bare_answer_is_one_call() -> None:
    assert parse('{"name": "f", ', '"arguments": {"a": [1]}}', is_bare=True).calls == [("f", {"a": [1]})]


def test_a_bare_answer_that_was_cut_is_content() -> None:
    seen = parse('{"name": "f", "argu', is_bare=True)
    assert (seen.content, seen.calls) == ('{"name": "f", "argu', [])


def test_deltas_have_the_shape_of_openai_chunks() -> None:
    parser = ToolParser()
    start, arguments = (delta.delta() for delta in parser.push(PARIS))
    call = start["tool_calls"][0]
    assert call["id"].startswith("call_")
    assert call == {
        "index": 0,
        "id": call["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert arguments == {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Paris"}'}}]}
    assert Content("x").delta() == {"content": "x"}


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
        ((name, arguments),) = parse(out.text, is_bare=True).calls
        assert name in names
        schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}[name]
        jsonschema.validate(arguments, schema)


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
