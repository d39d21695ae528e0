"""Regexes, choices, grammars and structural tags, as vLLM spells them: what they let through, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from saccade import SamplingParams
from saccade.errors import RequestError
from saccade.server.request.chat import read_chat, read_completion
from saccade.server.request.fields import FieldReader
from saccade.structured.schema import compiled
from saccade.structured.structured_outputs import structured_from, structured_of

BYTES = LLTokenizer("byte")
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TOOLS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=a>", "schema": POINT, "end": "</function>"},
        {"begin": "<function=b>", "schema": {"type": "boolean"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
ONE_NOTE = {
    "type": "triggered_tags",
    "triggers": ["<note"],
    "tags": [{"begin": "<note>", "content": {"type": "any_text"}, "end": "</note>"}],
    "at_least_one": True,
    "stop_after_first": True,
}
PARTS = {
    "type": "sequence",
    "elements": [
        {"type": "const_string", "value": "é: "},
        {
            "type": "or",
            "elements": [{"type": "regex", "pattern": "[0-9]+"}, {"type": "json_schema", "json_schema": POINT}],
        },
        {"type": "tag", "begin": "", "content": {"type": "const_string", "value": "!"}, "end": ""},
    ],
}
PAIRS = {
    "type": "tags_with_separator",
    "tags": [{"begin": "<a>", "content": {"type": "regex", "pattern": "x+"}, "end": "</a>"}],
    "separator": ",",
}
EBNF = 'root ::= "SELECT " col-name (", " col-name)*\ncol-name ::= [a-z]+ | "A/B"'
LARK = 'start: "SELECT " NAME (", " NAME)*\nNAME: /[a-z]+/'


def follows(given: Any, text: str) -> bool:
    structured = structured_of(given)
    assert structured is not None
    matcher = compiled(BYTES, structured, answers=1)
    data = text.encode()
    return matcher.try_consume_tokens([*data]) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"regex": r"\d{3}/[a-z]+\/"}, ["123/ab/"], ["12/ab/", "123/ab"]),
        ({"regex": "^a\n\\\nb$"}, ["a\n\nb"], ["a\nb"]),
        ({"choice": ["cat", "catalog", '"{99999}" /*']}, ["cat", "catalog", '"{99999}" /*'], ["dog", "ca", ""]),
        ({"choice": [f"word{i}" for i in range(5000)]}, ["word4999"], ["word5000"]),
        ({"grammar": EBNF}, ["SELECT ab, cd", "SELECT A/B"], ["SELECT ab,cd", "SELECT "]),
        ({"grammar": LARK}, ["SELECT ab, cd"], ["SELECT AB"]),
        ({"grammar": f"start: %json {json.dumps(POINT)}"}, ['{"x": 3}'], ["{}"]),
        ({"json": POINT}, ['{"x": 3}'], ["{}"]),
        ({"json": json.dumps(POINT), "regex": None, "disable_fallback": True}, ['{"x": 3}'], ["{}"]),
        ({"json_object": True, "choice": None}, ["{}"], ["[]"]),
        (
            {"structural_tag": TOOLS},
            ["hello", 'so <function=a>{"x": 3}</function> and <function=b>true</function>.'],
            ["<function=a>true</function>", "<function=c></function>", '<function=a>{"x": 3}'],
        ),
        ({"structural_tag": {"format": ONE_NOTE}}, ["x<note>any <b>text</note>"], ["x", "<note>a</note>more"]),
        ({"structural_tag": json.dumps({"format": PARTS})}, ["é: 12!", 'é: {"x": 1}!'], ["é: 12", "é: !"]),
        ({"structural_tag": {"format": PAIRS}}, ["", "<a>xx</a>,<a>x</a>"], ["<a>x</a>,", "<a></a>"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_structure_lets_through_what_follows_it(given: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not follows(given, text)] == []
    assert [text for text in bad if follows(given, text)] == []


NESTED: dict[str, Any] = {"type": "const_string", "value": "a"}
for _ in range(40):
    NESTED = {"type": "sequence", "elements": [NESTED]}
SLOW_EBNF = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(9000)), 'r9000 ::= "a"'])
SLOW = "start: SLOW\nSLOW: " + " & ".join(f"/.*a.{{{i}}}b/" for i in range(20))

REFUSED: dict[str, tuple[Any, str, str]] = {
    "a repeat": ({"regex": "a{120000}"}, "regex", "120000 times, and 10000 are"),
    "a repeat of a repeat": ({"regex": "(a+)+b"}, "regex", "one repeat"),
    "look-around": ({"regex": "(?=a)b"}, "regex", "look-around"),
    "an open bracket": ({"regex": "(a"}, "regex", "pattern is not valid"),
    "a last backslash": ({"regex": "a\\"}, "regex", "not valid"),
    "half a character": ({"regex": "\ud800"}, "regex", "UTF-8"),
    "patterns that take minutes": ({"grammar": SLOW}, "grammar", "simpler"),
    "a long regex": ({"regex": "a" * (300 << 10)}, "regex", "may have 262144"),
    "no choice": ({"choice": []}, "choice", "at least one"),
    "a choice that is no text": ({"choice": [1]}, "choice", "list of strings"),
    "long choices": ({"choice": ["x" * 1000] * 300}, "choice", "may have 262144"),
    "an unknown rule": ({"grammar": "start: nothing"}, "grammar", 'at 1(8): unknown name: "nothing"'),
    "an unknown rule of EBNF": ({"grammar": "root ::= nothing"}, "grammar", "'nothing' not found"),
    "EBNF that takes seconds to convert": ({"grammar": SLOW_EBNF}, "grammar", "too complex"),
    "deep EBNF": ({"grammar": "root ::= " + "(" * 5000}, "grammar", "nested too deeply"),
    "a deep grammar": ({"grammar": "start: " + "(" * 5000}, "grammar", "too deeply nested"),
    "a rule that repeats too often": ({"grammar": 'start: "a"{3,99999}'}, "grammar", "99999 times"),
    "the same with a tilde": ({"grammar": 'start: "a" ~ 3..99999'}, "grammar", "99999 times"),
    "settings of the library": ({"grammar": '%llguidance {"no_forcing": false}\nstart: "a"'}, "grammar", "settings"),
    "settings in a schema": ({"grammar": 'start: %json {"x-guidance": {"lenient": true}}'}, "grammar", "settings"),
    "a bad schema in it": ({"grammar": 'start: %json {"pattern": "(a+)+"}'}, "grammar", "one repeat"),
    "special tokens": ({"grammar": "start: <|im_end|>"}, "grammar", "special tokens"),
    "JSON as a grammar": ({"grammar": '{"grammars": []}'}, "grammar", "Lark or EBNF"),
    "an unknown format": ({"structural_tag": {"format": {"type": "poem"}}}, "structural_tag", "'poem'"),
    "a tag without a trigger": (
        {"structural_tag": {**TOOLS, "triggers": ["<tool="]}},
        "structural_tag",
        "'<function=a>' has no trigger",
    ),
    "a tag with a bad schema": (
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"$ref": "http://a.example/"}}}},
        "structural_tag",
        "nothing is fetched",
    ),
    "a deep tag": ({"structural_tag": {"format": NESTED}}, "structural_tag", "32 deep"),
    "a tag that is no JSON": ({"structural_tag": "{"}, "structural_tag", "must be JSON"),
    "white space": ({"json": {}, "whitespace_pattern": " "}, "whitespace_pattern", "not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_in_time_with_its_field_and_the_reason(name: str) -> None:
    given, kind, reason = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        structured_of(given)
    assert reason in caught.value.message and len(caught.value.message) < 500
    assert caught.value.param == f"structured_outputs.{kind}"
    assert caught.value.code == ("unsupported" if kind == "whitespace_pattern" else "invalid_grammar")


def test_an_answer_follows_one_structure_only() -> None:
    with pytest.raises(RequestError, match="json and regex"):
        structured_of({"json": {}, "regex": "a"})
    assert structured_of({"json": None}) is None
    with pytest.raises(RequestError, match="guided_regex and guided_choice"):
        read(guided_regex="a", guided_choice=["b"])


# --- over HTTP ----------------------------------------------------------------------------------------------------


def read(kind: str = "chat", **fields: Any) -> str | None:
    reader = FieldReader(strict=True)
    if kind == "chat":
        body = {"messages": [{"role": "user", "content": "a"}], **fields}
        return read_chat(body, reader).response_options.params.structured
    return read_completion({"prompt": "a", **fields}, reader, 1).response_options.params.structured


SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"guided_json": POINT}, {"json": POINT}),
    ({"guided_regex": "[ab]+", "guided_decoding_backend": "xgrammar"}, {"regex": "[ab]+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": EBNF}, {"grammar": EBNF}),
    ({"structural_tag": json.dumps(TOOLS)}, {"structural_tag": TOOLS}),
    ({"response_format": TOOLS}, {"structural_tag": TOOLS}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
]


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize(("old", "new"), SPELLINGS, ids=lambda given: "-".join(given))
def test_the_older_spellings_mean_the_same(kind: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read(kind, **old) == read(kind, structured_outputs=new) == structured_of(new)


@pytest.mark.parametrize("field", ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"])
def test_a_bad_value_is_refused_under_the_name_the_client_used(field: str) -> None:
    bad = ["(", 5] if field == "guided_choice" else "("
    with pytest.raises(RequestError) as caught:
        read(**{field: bad})
    assert caught.value.param == field


def test_a_response_format_of_text_leaves_room_for_a_structure() -> None:
    assert read(response_format={"type": "text"}, guided_choice=["a"]) == structured_of({"choice": ["a"]})
    assert structured_from({"type": "text"}) is None


def test_parameters_take_one_structure() -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured="{}", structured_outputs={"json": {}})
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs="{}")
