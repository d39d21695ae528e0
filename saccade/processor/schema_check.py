"""Checks one JSON schema in a process of its own: what a client sends may take for ever or overflow the stack.

`python -m saccade.processor.schema_check` reads the schema from stdin and prints what is wrong with it, or nothing. The
limits below end it from inside, so that it cannot outlive its parent either.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher

from saccade.schema import grammar_of, limits

_CPU_SECONDS = 3
_MEMORY_BYTES = 1 << 30
_STACK_BYTES = 2 << 20  # a quarter of what the engine has, where the same schema is compiled again
_MAX_DEPTH = 64
_DATA = frozenset({"enum", "const", "default", "examples", "example"})  # keywords that hold values, not schemas
_NESTED_REPEAT = re.compile(r"(?<!\\)(?:[+*]|\{\d+,\})\??\)+(?:[+*]|\{\d+,\})")

# How the library words what it refuses, and how we do.
_WORDING = (
    (re.compile(r"Unimplemented keys: \[(.*)\]"), "it uses {0}, which is not supported; leave it out"),
    (re.compile(r"Unknown format: (\S{1,40})"), 'it uses the format "{0}", which is not supported; use a pattern'),
    (re.compile(r"regex parse error"), "a pattern is not valid, or uses look-around or back-references"),
    (re.compile(r"[Uu]nsatisfiable"), "no JSON value can follow it"),
    (re.compile(r"oneOf"), "it has a oneOf whose choices overlap; use anyOf"),
    (re.compile(r"too large|too many|too complex|fuel"), "it is too large once it is written out; make it smaller"),
)
_OTHERWISE = "it is not a JSON schema that can be enforced; check its keywords and references"


def problem(text: str) -> str | None:
    """What is wrong with a schema, as the end of a sentence; None if it can be enforced."""
    try:
        schema = json.loads(text)
        found = next(_problems_inside(schema, 0), None)
        if found is None and not _has_finite_value(schema):
            found = "it refers to itself without end, so no JSON value can follow it"
        return found or _compile_problem(text)
    except (ValueError, RecursionError):
        return _OTHERWISE


def _compile_problem(text: str) -> str | None:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar_of(text), limits=limits())
    if not is_error:
        return None
    for pattern, wording in _WORDING:
        match = pattern.search(messages[0])
        if match:
            return wording.format(*match.groups())
    return _OTHERWISE


def _problems_inside(schema: Any, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        yield f"it is nested more than {_MAX_DEPTH} levels deep"
        return
    if isinstance(schema, list):
        for entry in schema:
            yield from _problems_inside(entry, depth + 1)
    if not isinstance(schema, dict):
        return
    yield from _keyword_problems(schema)
    for name, value in schema.items():
        if name not in _DATA:
            yield from _problems_inside(value, depth + 1)


def _keyword_problems(schema: Mapping[str, Any]) -> Iterator[str]:
    reference, pattern = schema.get("$ref"), schema.get("pattern")
    if isinstance(reference, str) and not reference.startswith("#"):
        yield "its $ref leads outside of it, and nothing is fetched; put the definition under $defs"
    # Ours would cope, but clients check answers with engines that take exponential time on such a pattern.
    if isinstance(pattern, str) and _NESTED_REPEAT.search(pattern):
        yield "a pattern repeats a repeat, as (a+)+ does; write it with one repeat"


# --- references ---------------------------------------------------------------------------------------------------


def _has_finite_value(schema: Any) -> bool:
    """Whether some JSON value follows the schema without following its references for ever.

    Grows the set of references that are known to end until it grows no more.
    """
    targets = {reference: _target(schema, reference) for reference in set(_references(schema))}
    ending: set[str] = set()
    while True:
        more = {name for name, target in targets.items() if name not in ending and _ends(target, ending)}
        if not more:
            return _ends(schema, ending)
        ending |= more


def _references(schema: Any) -> Iterator[str]:
    entries = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for name, value in entries:
        if name == "$ref" and isinstance(value, str):
            yield value
        elif name not in _DATA:
            yield from _references(value)


def _target(schema: Any, reference: str) -> Any:
    """What a reference such as #/$defs/x points to; an open schema where that cannot be told."""
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
    """Whether a value can be written, given the references that are known to end."""
    if not isinstance(schema, dict):
        return True
    if isinstance(schema.get("$ref"), str) and schema["$ref"] not in ending:
        return False
    choices = [options for name in ("anyOf", "oneOf") if isinstance(options := schema.get(name), list)]
    return all(_ends(each, ending) for each in _needed(schema)) and all(
        any(_ends(option, ending) for option in options) for options in choices
    )


def _needed(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that every value has a part for."""
    yield from schema["allOf"] if isinstance(schema.get("allOf"), list) else ()
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type", "object") == "object" and isinstance(properties, dict) and isinstance(required, list):
        yield from (properties[name] for name in required if isinstance(name, str) and name in properties)
    if schema.get("type") == "array" and isinstance(schema.get("minItems"), int) and schema["minItems"] > 0:
        first = schema.get("prefixItems")
        yield from first[: schema["minItems"]] if isinstance(first, list) and first else [schema.get("items")]


# --- the process --------------------------------------------------------------------------------------------------


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    text = sys.stdin.buffer.read().decode()
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=lambda: sys.stdout.write(problem(text) or ""))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
