"""Structural tags (as vLLM and xgrammar take them) to Lark: free text in which some parts follow a structure.

Knows both spellings: `structures` with `triggers`, and nested `format` objects. Checks no schema, no regex.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saccade.errors import is_list_of, is_text, member
from saccade.structured.schema import JSON_OPTIONS

_TEXT = r"/(.|\n)*/"
_PAIR = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_ESCAPES = {"/": "\\/", "\n": "\\n", "\r": "\\r"}
_MAX_DEPTH = 32
_MAX_PARTS = 500
# Whether it comes once at most, and at least.
_TIMES = {(True, True): "", (True, False): "?", (False, True): "+", (False, False): "*"}


def lark_of_tag(tag: Mapping[str, Any]) -> str:
    """ValueError, with the end of a sentence, if it has another form."""
    if "structures" in tag:
        tags = [_old_tag(one) for one in _list(tag, "structures")]
        form: Any = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    else:
        form = tag.get("format")
    return _Rules().grammar(form)


def quoted_text(text: str) -> str:
    """A string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def quoted_regex(pattern: str) -> str:
    """A regex of Lark: between slashes, so those inside are escaped, and line breaks too."""
    return f"/{_PAIR.sub(lambda pair: _ESCAPES.get(pair[0][-1], pair[0]), pattern)}/"


def embedded_schema(schema: Any) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise ValueError("a schema must be an object")
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}, allow_nan=False)


class _Rules:
    """The rules of one grammar. Each format becomes an expression; lazy text needs a rule of its own."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0
        self._num_parts = 0
        self._makers: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda form: quoted_text(_string(form, "value")),
            "json_schema": lambda form: embedded_schema(form.get("json_schema")),
            "regex": lambda form: quoted_regex(_string(form, "pattern")),
            "any_text": lambda _: _TEXT,
            "sequence": lambda form: self._joined(form, " "),
            "or": lambda form: self._joined(form, " | "),
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def grammar(self, form: Any) -> str:
        start = self._made(form)
        return "\n".join([f"start: {start}", *self._lines])

    def _made(self, form: Any) -> str:
        kind = str(member(form, "type"))
        if kind not in self._makers:
            kinds = ", ".join(self._makers)
            raise ValueError(f"a format must be an object whose type is one of {kinds}, not {kind[:40]!r}")
        self._num_parts += 1
        self._depth += 1
        if self._depth > _MAX_DEPTH or self._num_parts > _MAX_PARTS:
            raise ValueError(f"it may have {_MAX_PARTS} parts, nested {_MAX_DEPTH} deep; make it simpler")
        rule = self._makers[kind](form)
        self._depth -= 1
        return f"({rule})"

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"part_{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def _joined(self, form: Mapping[str, Any], separator: str) -> str:
        return separator.join(self._made(element) for element in _list(form, "elements"))

    def _tag(self, form: Mapping[str, Any], trigger: str = "") -> str:
        """What follows the trigger, which is the beginning of the tag's own `begin`."""
        begin = _string(form, "begin").removeprefix(trigger)
        ends = form.get("end", "")
        if isinstance(ends, str):
            ends = [ends]
        if not is_list_of(ends, str, 1):
            raise ValueError("the end of a tag must be a string, or a list of strings")
        end = f"({' | '.join(map(quoted_text, ends))})"
        content = form.get("content")
        match content:
            case {"type": "any_text"} if all(ends):  # it ends where `end` first comes
                return f"{quoted_text(begin)} {self._rule(f'{_TEXT} {end}', '[lazy]')}"
        return f"{quoted_text(begin)} {self._made(content)} {end}"

    def _triggered(self, form: Mapping[str, Any]) -> str:
        triggers = _strings(form, "triggers")
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in _tags(form):
            begin = _string(tag, "begin")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise ValueError(f"the tag that begins with {begin[:40]!r} has no trigger")
            by_trigger[trigger].append(self._tag(tag, trigger))
        options = []
        for trigger, options_of_trigger in by_trigger.items():
            if options_of_trigger:
                prefix = self._rule(f"{_TEXT} {quoted_text(trigger)}", "[lazy]")
                options.append(f"{prefix} ({' | '.join(options_of_trigger)})")
        calls = f"({' | '.join(options)}){_times(form)}"
        return calls if form.get("stop_after_first") else f"{calls} {_TEXT}"

    def _separated(self, form: Mapping[str, Any]) -> str:
        tags = " | ".join(map(self._tag, _tags(form)))
        separator = quoted_text(_string(form, "separator"))
        many = f"({tags})" if form.get("stop_after_first") else f"({tags}) ({separator} ({tags}))*"
        return many if form.get("at_least_one") else f"({many})?"


def _tags(form: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [tag if isinstance(tag, Mapping) else {} for tag in _list(form, "tags")]


def _times(form: Mapping[str, Any]) -> str:
    return _TIMES[bool(form.get("stop_after_first")), bool(form.get("at_least_one"))]


def _old_tag(structure: Any) -> dict[str, Any]:
    if not isinstance(structure, Mapping):
        raise ValueError("each of its structures must be an object with begin, schema and end")
    content = {"type": "json_schema", "json_schema": structure.get("schema")}
    return {"begin": structure.get("begin"), "content": content, "end": structure.get("end", "")}


def _string(form: Mapping[str, Any], name: str) -> str:
    if not isinstance(form.get(name), str):
        raise ValueError(f"it needs a string under {name}")
    return str(form[name])


def _list(form: Mapping[str, Any], name: str) -> Sequence[Any]:
    entries = form.get(name)
    if not is_list_of(entries, object, 1, _MAX_PARTS):
        raise ValueError(f"it needs a list of 1 to {_MAX_PARTS} entries under {name}")
    return entries


def _strings(form: Mapping[str, Any], name: str) -> Sequence[str]:
    texts = _list(form, name)
    if not all(map(is_text, texts)):
        raise ValueError(f"it needs strings that are not empty under {name}")
    return texts
