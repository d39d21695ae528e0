"""Outputs of models with thinking and tool calls, in every dialect, wherever the text is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.errors import UsageError
from saccade.processor.dialects.events import CallArguments, CallStart, Content, EventSink, Reasoning
from saccade.processor.dialects.parser import OutputFormat, OutputParser
from saccade.processor.dialects.registry import (
    BARE,
    THINKING_DIALECTS,
    TOOL_DIALECTS,
    ToolDialect,
    thinking_dialect,
    tool_dialect,
)
from tests.helpers.engine.output_events import Seen

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "on": {"type": "boolean"},
        "unit": {"$ref": "#/$defs/Unit"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"Unit": {"enum": ["C", "F"]}},
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]


def dialect_of(name: str) -> ToolDialect:
    return BARE if name == "bare" else TOOL_DIALECTS[name]


def parse(name: str, *pieces: str, thinking: str | None = None, prompt: str = "") -> Seen:
    markers = THINKING_DIALECTS[thinking] if thinking else None
    sink = EventSink(TOOLS, dialect_of(name).new_id)
    parser = OutputParser(sink, dialect_of(name), markers, markers.after(prompt) if markers else None)
    return Seen([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def hermes(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


PARIS = '{"name": "look", "arguments": {"city": "Paris", "days": 3}}'
CODER = "<tool_call>\n<function=look>\n{}</function>\n</tool_call>"
DSML = "｜DSML｜"
IN_PARIS = ("look", {"city": "Paris", "days": 3})
NOW = ("now", {})

# dialect, text, content, calls
READABLE: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", "No tools here, 1 < 2 <tool> </tool_call>.\n", "No tools here, 1 < 2 <tool> </tool_call>.\n", []),
    ("hermes", "", "", []),
    ("hermes", hermes(PARIS), "", [IN_PARIS]),
    ("hermes", f"Let me look.\n{hermes(PARIS)}\nDone.", "Let me look.\nDone.", [IN_PARIS]),
    ("hermes", f"{hermes(PARIS)}\n{hermes(PARIS)}\n", "", [IN_PARIS, IN_PARIS]),
    ("hermes", hermes(PARIS).removesuffix("\n</tool_call>"), "", [IN_PARIS]),
    ("hermes", hermes(PARIS[:-1]), "", [IN_PARIS]),
    ("hermes", hermes(PARIS + "}"), "", [IN_PARIS]),
    ("hermes", hermes('{"name": "now"}'), "", [NOW]),
    ("hermes", hermes(f'{PARIS}\n{{"name": "now"}}'), "", [IN_PARIS, NOW]),
    ("hermes", hermes(f'{PARIS}, {{"name": "now"}}') + "Ok", "Ok", [IN_PARIS, NOW]),
    ("hermes", hermes('{"arguments": {"city": "ü"}, "id": [1], "name": "look"}'), "", [("look", {"city": "ü"})]),
    ("hermes", hermes('{"name": "look", "arguments": "{\\"days\\": 1}"}'), "", [("look", {"days": 1})]),
    (
        "hermes",
        hermes('{"name": "look", "arguments": {"city": "a \\"</tool_call>\\" \\u00fc <tool_call> {"}}'),
        "",
        [("look", {"city": 'a "</tool_call>" ü <tool_call> {'})],
    ),
    ("hermes", hermes('{"name": "look", "arguments": {"city": "a\nb"}}'), "", [("look", {"city": "a\nb"})]),
    ("bare", PARIS, "", [IN_PARIS]),
    (
        "qwen3_coder",
        "Hm.\n"
        + CODER.format(
            '<parameter=city>\nParis <b>\nby "night"\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
            "<parameter=on>\nTrue\n</parameter>\n<parameter=note>\nnull\n</parameter>\n"
        ),
        "Hm.",
        [("look", {"city": 'Paris <b>\nby "night"', "days": 3, "on": True, "note": None})],
    ),
    ("qwen3_coder", "<function=now>\n</function>" + hermes(PARIS), "", [NOW, IN_PARIS]),
    (
        "glm45",
        "Ok<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        "Ok",
        [IN_PARIS, NOW],
    ),
    (
        "deepseek_v3",
        "Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Ok",
        [IN_PARIS, NOW],
    ),
    (
        "deepseek_v32",
        f'Ok\n\n<{DSML}function_calls>\n<{DSML}invoke name="look">\n'
        f'<{DSML}parameter name="city" string="true">Paris</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
        "Ok",
        [IN_PARIS],
    ),
    ("mistral", f'[TOOL_CALLS][{PARIS}, {{"name": "now", "arguments": {{}}}}]', "", [IN_PARIS, NOW]),
    ("mistral", 'Ok [TOOL_CALLS]look[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now{}', "Ok", [IN_PARIS, NOW]),
    ("mistral", '[TOOL_CALLS]look[CALL_ID]123456789[ARGS]{"city": "Paris", "days": 3}', "", [IN_PARIS]),
    ("llama3_json", PARIS.replace("arguments", "parameters"), "", [IN_PARIS]),
    ("llama3_json", f'<|python_tag|>{PARIS}; {{"name": "now", "parameters": {{}}}}', "", [IN_PARIS, NOW]),
    ("llama3_json", f" [{PARIS}]", "", [IN_PARIS]),
    ("llama3_json", "[1] says so, and {2} too.", "[1] says so, and {2} too.", []),
    ("pythonic", '[look(city="Paris", days=3), now()]', "", [IN_PARIS, NOW]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [NOW]),
    (
        "pythonic",
        "[look(city='a, (\\'b', tags=[\"x\", 'y)'], on=False, note=null)]",
        "",
        [("look", {"city": "a, ('b", "tags": ["x", "y)"], "on": False, "note": None})],
    ),
    (
        "gemma4",
        '<|tool_call>call:look{city:<|"|>Paris, {"x"}<|"|>,days:3,tags:[<|"|>a<|"|>],on:true}<tool_call|>Ok',
        "Ok",
        [("look", {"city": 'Paris, {"x"}', "days": 3, "tags": ["a"], "on": True})],
    ),
    (
        "functiongemma",
        "<start_function_call>call:look{city:<escape>Paris<escape>,days:3}<end_function_call>",
        "",
        [IN_PARIS],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), READABLE, ids=lambda value: str(value)[:30])
def test_calls_are_found_wherever_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    cuts = [[text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))]
    for pieces in cuts:
        seen = parse(name, *pieces)
        assert (seen.content, seen.calls, seen.problems) == (content, calls, [])


# dialect, text, content, arguments of each call as text, problems
BROKEN: list[tuple[str, str, str, list[str], list[str]]] = [
    ("hermes", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", [], ["syntax"]),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', [], ["syntax"]),
    ("hermes", '<tool_call>{"name": "a b"}', '<tool_call>{"name": "a b"}', [], ["syntax"]),
    ("hermes", '<tool_call>{"name": "look", "arg', '<tool_call>{"name": "look", "arg', [], ["incomplete"]),
    (
        "hermes",
        '<tool_call>{"name": "look", "arguments": [1]}',
        '<tool_call>{"name": "look", "arguments": [1]}',
        [],
        ["syntax"],
    ),
    ("hermes", "<tool_call>", "<tool_call>", [], ["incomplete"]),
    ("hermes", "text <tool_cal", "text <tool_cal", [], []),
    ("hermes", f"<tool_call>{'[' * 5000}", f"<tool_call>{'[' * 5000}", [], ["syntax"]),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"city": "Par', "", ['{"city": "Par'], ["incomplete"]),
    ("hermes", hermes('{"name": "look", "arguments": {"a",}}') + " So.", " So.", ['{"a",}}\n'], ["syntax"]),
    ("hermes", hermes('{"name": "now"}, and so on'), ", and so on\n</tool_call>", ["{}"], ["syntax"]),
    ("hermes", hermes('{"name": "now"}\n{5}'), "\n{5}\n</tool_call>", ["{}"], ["syntax"]),
    ("hermes", hermes('{"name": "gone", "arguments": {}}'), "", ["{}"], ["unknown_tool"]),
    ("hermes", hermes('{"name": "look", "arguments": {"days": "x"}}'), "", ['{"days": "x"}'], ["schema"]),
    ("hermes", hermes('{"name": "look", "arguments": {"unit": "K"}}'), "", ['{"unit": "K"}'], ["schema"]),
    ("hermes", hermes('{"name": "look", "arguments": {"else": 1}}'), "", ['{"else": 1}'], ["schema"]),
    ("bare", '{"name": "look", "argu', '{"name": "look", "argu', [], ["incomplete"]),
    ("qwen3_coder", "<function=look>\n<parameter=city>\nPar", "", ['{"city": "Par'], ["incomplete"]),
    ("qwen3_coder", "<tool_call>\nhm</tool_call>", "<tool_call>\nhm</tool_call>", [], ["syntax"]),
    ("glm45", "<tool_call>two words\n</tool_call>", "<tool_call>two words\n</tool_call>", [], ["syntax"]),
    ("mistral", "[TOOL_CALLS]!", "[TOOL_CALLS]!", [], ["syntax"]),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', [], ["unknown_tool"]),
    ("pythonic", "[look(days=open('x'))]", "", ["{\"days\": open('x'))]"], ["syntax"]),
    ("pythonic", "[look(days=", "", ['{"days": '], ["incomplete"]),
    ("glm45", "<tool_call>look\n<arg_key>days</arg_key><arg_value>4", "", ['{"days": 4'], ["incomplete"]),
    ("gemma4", "<|tool_call>call:look{days:", "", ['{"days": '], ["incomplete"]),
    ("gemma4", f"<|tool_call>call:look{{tags:{'[' * 99}", "", ['{"tags": ' + "[" * 99], ["syntax"]),
]


@pytest.mark.parametrize(("name", "text", "content", "arguments", "problems"), BROKEN, ids=lambda v: str(v)[:30])
def test_a_call_that_cannot_be_read_is_reported_and_shown(
    name: str, text: str, content: str, arguments: list[str], problems: list[str]
) -> None:
    for pieces in ([text], list(text)):
        seen = parse(name, *pieces)
        assert (seen.content, [raw for _, raw in seen.raw], seen.problems) == (content, arguments, problems)


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    seen = parse("hermes", f"<tool_call>oops</tool_call>\n{hermes(PARIS)}")
    assert (seen.content, seen.calls) == ("<tool_call>oops</tool_call>", [IN_PARIS])


_PIECES = [text for _, text, *_ in READABLE] + [text for _, text, *_ in BROKEN if len(text) < 200]
_OPENED = {  # by dialect: a call up to its name
    "qwen3_coder": "<tool_call><function=",
    "glm45": "<tool_call>",
    "deepseek_v31": "<｜tool▁call▁begin｜>",
    "deepseek_v32": f'<{DSML}invoke name="',
    "gemma4": "<|tool_call>call:",
    "functiongemma": "<start_function_call>call:",
    "mistral": "[TOOL_CALLS]look[CALL_ID]",
}
_WORDS = [*_OPENED.values(), "y" * 250, "y" * 300]
_WORDS += ["<think>", "</think>", "\n", " ", "{", "}", '"', "\\", "[", "]", "look", "(", ")", "=", ",", "1", "é"]


@pytest.mark.parametrize("name", _OPENED)
def test_after_a_name_that_is_too_long_a_call_is_found_wherever_the_text_is_cut(name: str) -> None:
    broken = _OPENED[name] + "y" * 300
    for dialect, text, _, calls in READABLE:
        if dialect == name:
            seen = parse(name, broken + text)
            assert seen.content.startswith(broken) and seen.calls == calls
            assert seen == parse(name, *broken, text) == parse(name, *broken, *text)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_cutting_gives_the_events_of_the_whole(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*TOOL_DIALECTS, "bare"]))
    thinking = data.draw(st.sampled_from([None, *THINKING_DIALECTS]))
    prompt = data.draw(st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]))
    parts = st.lists(st.sampled_from(_PIECES + _WORDS) | st.text(max_size=5), max_size=6)
    text = "".join(data.draw(parts))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(name, text, thinking=thinking, prompt=prompt)
    assert vars(parse(name, *pieces, thinking=thinking, prompt=prompt)) == vars(whole)
    assert vars(parse(name, *text, thinking=thinking, prompt=prompt)) == vars(whole)


# --- streaming ----------------------------------------------------------------------------------------------------


def parser_of(name: str) -> OutputParser:
    return OutputParser(EventSink(TOOLS), TOOL_DIALECTS[name])


def test_text_is_passed_on_before_the_answer_is_over() -> None:
    parser = parser_of("hermes")
    assert parser.push("Let me") == [Content("Let me")]
    assert parser.push(" look <b") == [Content(" look <b")]


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = parser_of("hermes")
    start, first = parser.push('<tool_call>{"name": "look", "arguments": {"city": "Par')
    assert isinstance(start, CallStart) and first == CallArguments(0, '{"city": "Par')
    assert parser.push("is") == [CallArguments(0, "is")]
    assert parser.push('"}}</tool_call>') == [CallArguments(0, '"}')]


def test_a_long_text_argument_in_tags_is_passed_on_as_it_comes() -> None:
    parser = parser_of("qwen3_coder")
    parser.push("<tool_call>\n<function=look>\n<parameter=city>\n")
    assert parser.push('He said "no"\n') == [CallArguments(0, 'He said \\"no\\"')]
    assert parser.push("and left") == [CallArguments(0, "\\nand left")]


def test_a_parser_keeps_only_what_is_undecided() -> None:
    parser = parser_of("hermes")
    parser.push('<tool_call>{"name": "look", "arguments": {"city": "')
    for _ in range(100):
        parser.push("x" * 1000)
    assert len(parser._reader._text) <= 1000


def test_deltas_have_the_shape_of_openai_chunks() -> None:
    start, arguments = (event.delta() for event in parser_of("hermes").push(hermes(PARIS)))  # type: ignore[union-attr]
    call = start["tool_calls"][0]
    assert call["id"].startswith("call_")
    function = {"name": "look", "arguments": ""}
    assert call == {"index": 0, "id": call["id"], "type": "function", "function": function}
    text = '{"city": "Paris", "days": 3}'
    assert arguments == {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
    assert Content("x").delta() == {"content": "x"}
    assert Reasoning("x").delta() == {"reasoning_content": "x", "reasoning": "x"}


def test_ids_for_mistral_are_those_that_its_templates_take() -> None:
    parser = OutputFormat(TOOL_DIALECTS["mistral"]).parser(TOOLS)
    start = parser.push("[TOOL_CALLS]now{}")[0]
    assert isinstance(start, CallStart) and len(start.id) == 9 and start.id.isalnum()


# --- thinking -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "<|im_start|>assistant\n", "<think>\nhm\n\n</think>\n\nHi\n", "hm", "Hi\n"),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nHi", "hm", "Hi"),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", "Hi <think> there\n", "", "Hi <think> there\n"),
        ("qwen3", "assistant\n", "Hi </think> there", "", "Hi </think> there"),
        ("qwen3", "assistant\n<think>\n", "never ends ", "never ends", ""),
        ("qwen3", "assistant\n<think>", "<think>again</think>x", "again", "x"),
        ("deepseek_r1", "assistant\n", "hm</think>Hi", "hm", "Hi"),
        ("deepseek_r1", "<｜Assistant｜></think>", "Hi", "", "Hi"),
        ("mistral", "[/INST]", "[THINK]hm[/THINK]Hi", "hm", "Hi"),
        ("gemma4", "<|turn>model\n", "<|channel>thought\nhm\n<channel|>Hi", "hm", "Hi"),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Hi", "", "Hi"),
    ],
)
def test_thinking_is_told_apart_from_the_answer(
    dialect: str, prompt: str, text: str, reasoning: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        seen = parse("hermes", *pieces, thinking=dialect, prompt=prompt)
        assert (seen.reasoning, seen.content) == (reasoning, content)


def test_a_call_in_the_thinking_is_thinking() -> None:
    seen = parse("hermes", f"{hermes(PARIS)}</think>{hermes(PARIS)}", thinking="think", prompt="<think>")
    assert (seen.reasoning, seen.calls) == (hermes(PARIS), [IN_PARIS])


def test_a_parser_is_passive_when_only_text_can_follow() -> None:
    markers = THINKING_DIALECTS["think"]
    parser = OutputFormat(None, markers, markers.after("<think>")).parser(None)
    assert not parser.is_passive
    parser.push("hm</think>\n")
    assert not parser.is_passive and not parser.is_thinking
    parser.push("Hi")
    assert parser.is_passive
    assert OutputFormat().parser(None, finds_calls=False).is_passive


# --- which dialect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ("return a json object within <tool_call></tool_call>", "hermes"),
        ("<tool_call>\n<function=example_function_name>", "qwen3_coder"),
        ("{{- '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>", "glm45"),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}", "deepseek_v3"),
        ("<{{ dsml }}> ｜DSML｜ function_calls", "deepseek_v32"),
        ('{{- "[TOOL_CALLS][" }}', "mistral"),
        ("{{- '<|python_tag|>' }}", "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ '<|tool_call>call:' }}", "gemma4"),
        ("{{ '<start_function_call>call:' }}", "functiongemma"),
    ],
)
def test_the_chat_template_tells_the_dialect(template: str | None, name: str) -> None:
    assert tool_dialect("auto", template) == TOOL_DIALECTS[name]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, None),
        ("plain", None),
        ("{{ '<think>\n' }}", "think"),
        ("[THINK]", "mistral"),
        ("<|channel>thought", "gemma4"),
    ],
)
def test_the_chat_template_tells_the_markers_of_thinking(template: str | None, name: str | None) -> None:
    assert thinking_dialect("auto", template) == (THINKING_DIALECTS[name] if name else None)


def test_an_option_overrides_the_template() -> None:
    assert tool_dialect("mistral", "<tool_call>") == TOOL_DIALECTS["mistral"]
    assert tool_dialect("none", "<tool_call>") is None and thinking_dialect("none", "<think>") is None
    with pytest.raises(UsageError, match=r"tool_call_parser must be auto, none or one of hermes.*'x'"):
        tool_dialect("x", None)
