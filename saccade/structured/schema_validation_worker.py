"""The process that checks schemas and grammars: `python -m saccade.structured.schema_validation_worker`.

The reply to each is what is wrong with it, or nothing. A text that needs too much CPU time, memory or stack
ends the process.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from saccade.helpers.main import limit_memory, serve
from saccade.structured.schema import JSON_OPTIONS, compiled, is_schema, limits, rules_of
from saccade.structured.schema_validation import EBNF_MARK

_MEMORY_MB = 1024
_STACK_BYTES = 2 << 20  # a quarter of the engine's, which compiles the same schema again
_MAX_DEPTH = 64
_MAX_REPEAT = 10_000  # in a pattern
_MAX_COUNT = 1_000_000  # of letters, items or properties
_MAX_CHOICES = 500  # at one point: the library fails at about as many
_TRIAL_BYTES = 8
_MAX_WORDS = 200  # characters of the library's message that are quoted
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_DATA = frozenset({"enum", "const", "default", "examples", "example"})  # hold values, not schemas
_REPEAT = re.compile(r"(?<!\\)\{(\d+)(?:,(\d*))?\}")
_NESTED_REPEAT = re.compile(r"(?<!\\)(?:[+*]|\{\d+,\})\??\)+(?:[+*]|\{\d+,\})")
_LARK_REPEAT = re.compile(r"~\s*(\d+)(?:\s*\.\.\s*(\d+))?")
_SPECIAL_TOKEN = re.compile(r"<(?:\||\[)")
_LITERAL = re.compile(r'//[^\n]*|#[^\n]*|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/')  # and comments

# The library's messages and ours.
_WORDING = (
    (r"Unimplemented keys: \[(.*)\]", "it uses {0}, which is not supported; leave it out"),
    (r"Unknown format: (\S{1,40})", 'it uses the format "{0}", which is not supported; use a pattern'),
    (r"regex parse error", "a pattern is not valid, or uses look-around or back-references"),
    (r"[Uu]nsatisfiable", "no JSON value can follow it"),
    (r"oneOf", "it has a oneOf whose choices overlap; use anyOf"),
    (r"too large|too many|too complex|fuel", "it is too large once it is written out; make it smaller"),
)
_OTHERWISE = "it is not a JSON schema that can be enforced; check its keywords and references"


def problem(text: str) -> str | None:
    """What is wrong with a text, as the end of a sentence; None if it can be enforced."""
    try:
        return _schema_problem(text) if is_schema(text) else _grammar_problem(text)
    except (ValueError, RecursionError):
        return _OTHERWISE


def _schema_problem(text: str) -> str | None:
    schema = json.loads(text)
    problem = next(_problems_inside(schema, schema, 0), None)
    if problem is not None:
        return problem
    if not _has_finite_value(schema):
        return "it refers to itself without end, so no JSON value can follow it"
    return _compile_problem(text) or _trial_problem(text)


def _compile_problem(text: str) -> str | None:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(rules_of(text), limits=limits())
    if not is_error:
        return None
    for pattern, wording in _WORDING:
        match = re.search(pattern, messages[0])
        if match:
            return wording.format(*(group[:_MAX_WORDS] for group in match.groups()))
    return _OTHERWISE


def _trial_problem(text: str) -> str | None:
    """Compile as the engine does, which can take ten times as long, and match a few bytes."""
    matcher = compiled(_byte_tokenizer(), text, answers=1)
    for _ in range(_TRIAL_BYTES):
        if matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if mask:
            matcher.consume_token((mask & -mask).bit_length() - 1)  # the lowest allowed token
    return "it is too complex to be followed; make it simpler" if matcher.is_error() else None


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def _problems_inside(schema: Any, root: Any, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        yield f"it is nested more than {_MAX_DEPTH} levels deep"
        return
    if isinstance(schema, list):
        for entry in schema:
            yield from _problems_inside(entry, root, depth + 1)
    if not isinstance(schema, dict):
        return
    yield from _keyword_problems(schema)
    yield from _count_problems(schema)
    if (count := _choices(schema, root)) > _MAX_CHOICES:
        yield f"it has {count} optional properties and choices at one place, and {_MAX_CHOICES} are allowed"
    for name, value in schema.items():
        if name not in _DATA:
            yield from _problems_inside(value, root, depth + 1)


def _keyword_problems(schema: Mapping[str, Any]) -> Iterator[str]:
    match schema:
        case {"$ref": str(reference)} if not reference.startswith("#"):
            yield "its $ref leads outside of it, and nothing is fetched; put the definition under $defs"
    match schema:
        # The library would cope, but clients validate outputs with regex engines of exponential time.
        case {"pattern": str(pattern)} if _NESTED_REPEAT.search(pattern):
            yield "a pattern repeats a repeat, as (a+)+ does; write it with one repeat"


def _count_problems(schema: Mapping[str, Any]) -> Iterator[str]:
    for name in _COUNTS:
        if isinstance(schema.get(name), (int, float)) and schema[name] > _MAX_COUNT:
            yield f"its {name} is {schema[name]}, and {_MAX_COUNT} is allowed; lower it or leave it out"
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        yield from _repeat_problems(pattern)


def _repeat_problems(pattern: str) -> Iterator[str]:
    counts = [count for pair in _REPEAT.findall(pattern) for count in pair if count]
    maximum = max((int(count[:20]) for count in counts), default=0)
    if maximum > _MAX_REPEAT:
        limit = f"{_MAX_REPEAT} are allowed; lower it or use * or +"
        yield f"a pattern repeats something {maximum} times, and {limit}"


def _choices(schema: Mapping[str, Any], root: Any) -> int:
    """Alternatives at the start of a value of this schema: nested choices and optional properties.

    A schema with a reference counts as none, since its target is checked by itself.
    """
    if "$ref" in schema:
        return 0
    count = 0
    stack: list[Any] = [schema]
    visited: set[int] = set()
    while stack:
        inner = stack.pop()
        if not isinstance(inner, dict) or id(inner) in visited:
            continue
        visited.add(id(inner))
        count += ("$ref" not in inner) + _optional(inner)
        for name in ("anyOf", "oneOf", "allOf"):
            stack += _entries(inner, name)
        if isinstance(inner.get("$ref"), str):
            stack.append(_target(root, inner["$ref"]))
    return count


def _entries(schema: Mapping[str, Any], name: str) -> list[Any]:
    """The entries of a list in a schema; none where something else stands there."""
    entries = schema.get(name)
    return entries if isinstance(entries, list) else []


def _optional(schema: Mapping[str, Any]) -> int:
    """Optional properties, and values of an enum that are objects or lists."""
    count = sum(isinstance(value, (dict, list)) for value in _entries(schema, "enum"))
    properties = schema.get("properties")
    if isinstance(properties, dict):
        required = {name for name in _entries(schema, "required") if isinstance(name, str)}
        count += len(properties.keys() - required)
    return count


def _has_finite_value(schema: Any) -> bool:
    """Whether a finite JSON value matches the schema: a fixed point over references."""
    targets = {reference: _target(schema, reference) for reference in set(_references(schema))}
    ending: set[str] = set()
    while True:
        more = {name for name, target in targets.items() if name not in ending and _ends(target, ending)}
        if not more:
            return _ends(schema, ending)
        ending |= more


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for entry in schema:
            yield from _references(entry)
    if isinstance(schema, dict):
        for name, value in schema.items():
            if (name, type(value)) == ("$ref", str):
                yield value
            elif name not in _DATA:
                yield from _references(value)


def _target(schema: Any, reference: str) -> Any:
    """The target of a reference such as #/$defs/x; an empty schema if there is none."""
    for step in unquote(reference).removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and name in schema:
            schema = schema[name]
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return {}
    return schema


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether a finite value matches, given the references that are known to end."""
    match schema:
        case {"$ref": str(reference)} if reference not in ending:
            return False
        case {}:
            pass
        case _:
            return True
    if not all(_ends(part, ending) for part in _needed(schema)):
        return False
    choices = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    return all(any(_ends(option, ending) for option in options) for options in choices)


def _needed(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of parts that every value has."""
    yield from _entries(schema, "allOf")
    match schema:
        case {"type": "array", "minItems": int(minimum)} if minimum > 0:
            yield from _entries(schema, "prefixItems")[:minimum] or [schema.get("items")]
        case {"type": kind} if kind != "object":
            return
        case {"properties": dict() as properties}:
            names = [name for name in _entries(schema, "required") if isinstance(name, str)]
            yield from (properties[name] for name in names if name in properties)


# --- Lark grammars ------------------------------------------------------------------------------------------


def _grammar_problem(text: str) -> str | None:
    problem = next(_problems_in_lark(text), None)
    if problem is not None:
        return problem
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits())
    if is_error:
        return _worded(messages[0])
    return _trial_problem(text)


def _problems_in_lark(text: str) -> Iterator[str]:
    code = _LITERAL.sub('""', text)
    patterns = [literal for literal in _LITERAL.findall(text) if literal[0] == "/" and literal[1] != "/"]
    if "%llguidance" in code:
        yield "it has %llguidance, whose settings are not for clients; leave it out"
    if _SPECIAL_TOKEN.search(code):
        yield "it names special tokens or token ids, which is not supported; write them as text"
    for part in (_LARK_REPEAT.sub(r"{\1,\2}", code), *patterns):
        yield from _repeat_problems(part)
    if any(_NESTED_REPEAT.search(pattern) for pattern in patterns):
        yield "a pattern repeats a repeat, as (a+)+ does; write it with one repeat"
    for schema in _embedded_schemas(text):
        if schema.pop("x-guidance", JSON_OPTIONS) != JSON_OPTIONS:
            yield "a schema in it has x-guidance, whose settings are not for clients; leave it out"
        yield from _problems_inside(schema, schema, 0)
        if not _has_finite_value(schema):
            yield "a schema in it refers to itself without end, so no JSON value can follow it"


def _embedded_schemas(text: str) -> Iterator[dict[str, Any]]:
    """The schemas of %json. One that is not JSON is left to the library, or is inside of a string."""
    for match in re.finditer(r"%json\s*", text):
        try:
            schema = json.JSONDecoder().raw_decode(text, match.end())[0]
        except (ValueError, RecursionError):
            continue
        if isinstance(schema, dict):
            yield schema


def _worded(message: str) -> str:
    if "regex parse error" in message:
        return "a pattern is not valid, or uses look-around or back-references"
    if re.search(r"too large|too many|too complex|fuel", message):
        return "it is too large once it is written out; make it smaller"
    return f"it is not valid: {message.splitlines()[0][:_MAX_WORDS]}"


def lark_of_ebnf(text: str) -> str:
    """The grammar in Lark after a mark, or what is wrong with it."""
    try:
        return EBNF_MARK + gbnf_to_lark(text).removeprefix("%llguidance {}").lstrip()
    except RecursionError:
        return "it is nested too deeply"
    except Exception as error:  # the converter raises plain ones
        return f"it is not valid EBNF: {str(error)[:_MAX_WORDS]}"


# --- the process --------------------------------------------------------------------------------------------


def main() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library writes there what it dies of
    limit_memory(_MEMORY_MB)
    threading.stack_size(_STACK_BYTES)
    serve(_answer)


def _answer(body: bytes, fds: Sequence[int]) -> bytes:
    """Answer in a thread, since it has the stack."""
    replies: list[str] = []
    thread = threading.Thread(target=lambda: replies.append(_reply(body.decode())))
    thread.start()
    thread.join()
    if not replies:  # the thread failed
        raise MemoryError
    return replies[0].encode()


def _reply(text: str) -> str:
    if text.startswith(EBNF_MARK):
        return lark_of_ebnf(text.removeprefix(EBNF_MARK))
    return problem(text) or ""


if __name__ == "__main__":
    main()
