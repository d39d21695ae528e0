"""A required call is written as the model was trained to write it, and only with arguments that fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from saccade.processor.dialects.events import EventSink
from saccade.processor.dialects.parser import OutputFormats, OutputParser
from saccade.processor.dialects.registry import TOOL_DIALECTS
from saccade.processor.tools import ToolUse, tools_for_template
from saccade.structured.schema import compiled
from tests.helpers.engine.output_events import Seen

LOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20, "minLength": 2},
        "days": {"type": "integer", "maximum": 9},
        "unit": {"$ref": "#/$defs/Unit"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "on": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK}},
    {"type": "function", "function": {"name": "look.now"}},
]
Call = tuple[str, dict[str, Any]]
PARIS = ("look", {"city": "Paris", "days": 3})
NOW: Call = ("look.now", {})
FULL = ("look", {"city": "Zürich", "days": 3, "unit": "F", "note": "<b>\n</b> <", "tags": ["a", "b"], "on": True})
WRONG: list[Call] = [
    ("gone", {"city": "Paris", "days": 3}),
    ("look", {"city": "Paris"}),
    ("look", {"city": "P", "days": 3}),
    ("look", {"city": "Paris, the capital of all", "days": 3}),
    ("look", {"city": "Paris", "days": 10}),
    ("look", {"city": "Paris", "days": "many"}),
    ("look", {"city": "Paris", "days": 3, "unit": "K"}),
    ("look", {"city": "Paris", "days": 3, "else": 1}),
    ("look.now", {"city": "Paris"}),
]


# --- calls as templates render them -------------------------------------------------------------------------------


def plain(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def named(call: Call, key: str = "arguments") -> str:
    return as_json({"name": call[0], key: call[1]})


def coder(call: Call) -> str:
    inner = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in call[1].items())
    return f"<tool_call>\n<function={call[0]}>\n{inner}</function>\n</tool_call>"


def glm(call: Call, space: str) -> str:
    pairs = call[1].items()
    inner = (f"<arg_key>{k}</arg_key>{space}<arg_value>{plain(v)}</arg_value>{space}" for k, v in pairs)
    return f"<tool_call>{call[0]}{space}{''.join(inner)}</tool_call>"


def deepseek(*calls: str) -> str:
    inner = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def dsml(*calls: Call) -> str:
    written = []
    for name, arguments in calls:
        kinds = {key: str(isinstance(value, str)).lower() for key, value in arguments.items()}
        inner = [
            f'<｜DSML｜parameter name="{key}" string="{kinds[key]}">{plain(value)}</｜DSML｜parameter>\n'
            for key, value in arguments.items()
        ]
        written.append(f'<｜DSML｜invoke name="{name}">\n{"".join(inner)}</｜DSML｜invoke>')
    return "<｜DSML｜function_calls>\n" + "\n".join(written) + "\n</｜DSML｜function_calls>"


def python(call: Call) -> str:
    values = {key: str(value) if isinstance(value, bool) else as_json(value) for key, value in call[1].items()}
    return f"{call[0]}({', '.join(f'{key}={value}' for key, value in values.items())})"


def gemma(value: Any, quote: str = '<|"|>') -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(gemma(entry, quote) for entry in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(entry, quote)}" for key, entry in value.items()) + "}"
    return as_json(value)


RENDERED: Mapping[str, tuple[str, Callable[..., str]]] = {
    "hermes": ("hermes", lambda *calls: "\n".join(f"<tool_call>\n{named(c)}\n</tool_call>" for c in calls)),
    "qwen3_coder": ("qwen3_coder", lambda *calls: "\n".join(map(coder, calls))),
    "glm45": ("glm45", lambda *calls: "\n".join(glm(call, "\n") for call in calls)),
    "glm47": ("glm47", lambda *calls: "".join(glm(call, "") for call in calls)),
    "mistral": ("mistral", lambda *calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{as_json(a)}" for n, a in calls)),
    "llama3_json": ("llama3_json", lambda *calls: "; ".join(named(call, "parameters") for call in calls)),
    "pythonic": ("pythonic", lambda *calls: f"[{', '.join(map(python, calls))}]"),
    "llama4": ("llama4_pythonic", lambda *calls: f"<|python_start|>[{', '.join(map(python, calls))}]<|python_end|>"),
    "deepseek_v3": (
        "deepseek_v3",
        lambda *calls: deepseek(*(f"function<｜tool▁sep｜>{n}\n```json\n{as_json(a)}\n```" for n, a in calls)),
    ),
    "deepseek_v31": (
        "deepseek_v31",
        lambda *calls: deepseek(*(f"{n}<｜tool▁sep｜>{as_json(a)}" for n, a in calls)),
    ),
    "deepseek_v32": ("deepseek_v32", dsml),
    "gemma4": (
        "gemma4",
        lambda *calls: "".join(f"<|tool_call>call:{n}{gemma(a)}<tool_call|>" for n, a in calls),
    ),
    "functiongemma": (
        "functiongemma",
        lambda *calls: "".join(
            f"<start_function_call>call:{n}{gemma(a, '<escape>')}<end_function_call>" for n, a in calls
        ),
    ),
}


# --- a tokenizer of bytes -----------------------------------------------------------------------------------------


@cache
def tokenizer() -> tuple[Tokenizer, LLTokenizer]:
    """The markers of all dialects are control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    markers = dict.fromkeys(marker for dialect in TOOL_DIALECTS.values() for marker in dialect.markers)
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", *markers)])
    return made, LLTokenizer(made.to_str())


def formats(name: str, has_tokens: bool = True) -> OutputFormats:
    token_id = tokenizer()[0].token_to_id if has_tokens else lambda _: None
    return OutputFormats(TOOL_DIALECTS[name], None, token_id)


@cache
def plan(name: str, choice: str = "required", parallel: bool = True) -> ToolUse:
    asked = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    return tools_for_template(TOOLS, asked, formats=formats(name), parallel=parallel)


def follows(grammar: str | None, text: str) -> bool:
    assert grammar is not None
    matcher = compiled(tokenizer()[1], grammar, answers=1)
    assert not matcher.is_error()
    tokens = tokenizer()[0].encode(text).ids
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def read(name: str, text: str, tools: list[Any] = TOOLS) -> Seen:
    parser = OutputParser(EventSink(tools, TOOL_DIALECTS[name].new_id), TOOL_DIALECTS[name])
    return Seen(parser.push(text) + parser.finish())


dialects = pytest.mark.parametrize(("name", "render"), RENDERED.values(), ids=RENDERED)


@dialects
def test_a_dialect_accepts_its_own_calls_and_reads_them(name: str, render: Callable[..., str]) -> None:
    assert not plan(name).is_bare
    for calls in ([PARIS], [FULL], [NOW], [PARIS, NOW, FULL]):
        for space in ("", "\n\n"):
            assert follows(plan(name).structured, space + render(*calls))
        seen = read(name, render(*calls))
        assert (seen.calls, seen.problems, seen.content) == (calls, [], "")


@dialects
def test_calls_that_nobody_offered_are_impossible(name: str, render: Callable[..., str]) -> None:
    for call in WRONG:
        assert not follows(plan(name).structured, render(call)), call
    assert not follows(plan(name).structured, "It is sunny.")
    assert not follows(plan(name).structured, "")


@dialects
def test_one_call_is_made_where_one_is_asked_for(name: str, render: Callable[..., str]) -> None:
    alone = plan(name, parallel=False).structured
    assert follows(alone, render(PARIS)) and follows(alone, render(NOW)) and not follows(alone, render(PARIS, NOW))
    by_name = plan(name, "look").structured
    assert follows(by_name, render(PARIS))
    assert not follows(by_name, render(NOW)) and not follows(by_name, render(PARIS, PARIS))


@dialects
def test_markers_may_be_plain_text(name: str, render: Callable[..., str]) -> None:
    """As the process that checks grammars sees them: there tokens are bytes."""
    grammar = formats(name, has_tokens=False).call_grammar(TOOLS, many=True)
    if name == "mistral":
        render = lambda *calls: f"[TOOL_CALLS][{', '.join(map(named, calls))}]"  # noqa: E731 (the older form)
    matcher = compiled(LLTokenizer("byte"), grammar or "", answers=1)
    text = render(FULL, NOW) if name != "llama4_pythonic" else f"[{python(FULL)}, {python(NOW)}]"
    data = list(text.encode())
    assert matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x+$"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/b/items"}, "b": {"items": {"type": "null"}}}},
        {"type": "object", "properties": {"a b": {"type": "string"}}},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"anyOf": [{"type": "object", "properties": {"a": {"type": "string"}}}]},
    ],
    ids=["pattern", "reference", "name", "map", "choice"],
)
def test_what_plain_text_cannot_be_held_to_is_written_as_bare_json(schema: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    in_text = tools_for_template(tools, "required", formats=formats("qwen3_coder"))
    assert in_text.is_bare and follows(in_text.structured, '{"name": "f", "arguments": {}}')
    in_json = tools_for_template(tools, "required", formats=formats("hermes"))
    assert not in_json.is_bare
    assert follows(in_json.structured, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')


def levels(width: int) -> dict[str, Any]:
    """A small schema that is large with all its references written out."""
    below = {
        f"L{i}": {"type": "object", "properties": {f"p{j}": {"$ref": f"#/$defs/L{i + 1}"} for j in range(width)}}
        for i in range(6)
    }
    top = {"type": "object", "properties": {"x": {"$ref": "#/$defs/L0"}}}
    return {**top, "$defs": {**below, "L6": {"type": "boolean"}}}


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("gemma4", levels(20)),  # 20 ** 6 booleans
        (
            "glm45",
            {
                "type": "object",
                "properties": {f"k{i}": {"$ref": "#/$defs/A"} for i in range(400)},
                "$defs": {"A": {"type": "integer", "description": "a" * 100_000}},
            },
        ),
    ],
    ids=["wide", "repeated"],
)
def test_the_grammar_of_a_small_schema_is_never_large(name: str, schema: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert formats(name).call_grammar(tools) is None


def test_a_choice_that_refers_to_itself_is_one_of_its_texts() -> None:
    itself = {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "string", "enum": ["C"]}]}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": itself}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = formats("qwen3_coder").call_grammar(tools)
    assert follows(grammar, coder(("f", {"x": "C"}))) and not follows(grammar, coder(("f", {"x": "K"})))


def test_a_text_ends_where_it_is_read_to_end() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = formats("qwen3_coder").call_grammar(tools)
    for text in ("", "x\n", "</para\n", "\n\nx", "123456789"):
        call = coder(("f", {"a": text}))
        assert follows(grammar, call) and read("qwen3_coder", call, tools).calls == [("f", {"a": text})]
    for text in ("</parameter>y", "0123456789"):
        assert not follows(grammar, coder(("f", {"a": text}))), text


def test_a_boolean_is_held_to_its_only_value() -> None:
    properties = {"a": {"type": "boolean", "const": True}, "b": {"type": "boolean"}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    ]
    grammar = formats("pythonic").call_grammar(tools)
    assert follows(grammar, "[f(a=true, b=False)]") and not follows(grammar, "[f(a=false, b=False)]")
    assert not follows(grammar, "[f(a=False)]")
    assert read("pythonic", "[f(a=true, b=False)]", tools).calls == [("f", {"a": True, "b": False})]


def test_without_a_dialect_calls_are_bare_json() -> None:
    made = tools_for_template(TOOLS, "required", formats=OutputFormats(None, None, lambda _: None))
    assert made.is_bare and follows(made.structured, named(PARIS))


NESTED = {
    "type": "object",
    "properties": {
        "box": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "label": {"type": "string"}, "to": {"type": "number"}},
            "required": ["to"],
        },
        "unit": {"anyOf": [{"type": "string", "enum": ["C", "F"]}, {"type": "null"}]},
    },
}


def test_gemma_nests_values_in_its_own_notation() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": NESTED}}]
    grammar = formats("gemma4").call_grammar(tools)
    for arguments in ({}, {"box": {"to": 1.5}}, {"box": {"x": 1, "label": "}", "to": 2}, "unit": "C"}, {"unit": None}):
        text = f"<|tool_call>call:f{gemma(arguments)}<tool_call|>"
        assert follows(grammar, text) and read("gemma4", text, tools).calls == [("f", arguments)]
    for wrong in ({"box": {"x": 1}}, {"box": {"label": "a", "x": 1, "to": 2}}, {"unit": "K"}):
        assert not follows(grammar, f"<|tool_call>call:f{gemma(wrong)}<tool_call|>")


def test_an_optional_choice_is_one_of_its_texts() -> None:
    schema = {"type": "object", "properties": {"unit": NESTED["properties"]["unit"]}}  # type: ignore[index]
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = formats("qwen3_coder").call_grammar(tools)
    assert follows(grammar, coder(("f", {"unit": "C"}))) and not follows(grammar, coder(("f", {"unit": "K"})))
