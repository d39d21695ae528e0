"""vLLM's kinds of structured output (json, regex, choice, grammar, ...) to `SamplingParams.structured`.

That text is a JSON schema or a Lark grammar. Both are checked in the same process, within the same limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from saccade.errors import RequestError, is_list_of, is_text, quoted
from saccade.structured.schema_validation import (
    ANY_OBJECT,
    CHECKS,
    check_grammar,
    check_schema,
    check_schema_text,
    check_text_size,
)
from saccade.structured.structural_tag import lark_of_tag, quoted_regex, quoted_text

_TYPES = ("text", "json_object", "json_schema", "structural_tag")
KINDS = ("json", "regex", "choice", "grammar", "structural_tag", "json_object")
_INERT = ("disable_fallback", "backend", "backend_was_auto")  # of vLLM's own choice of libraries
_EBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def structured_from(response_format: Any, scope: str = "") -> str | None:
    """OpenAI's response_format, with vLLM's structural_tag. None for text."""
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind not in _TYPES:
        types = ", ".join(_TYPES)
        message = f"response_format must be an object whose type is one of {types}, not {quoted(kind)}"
        raise RequestError(message, code="invalid_json_schema", param="response_format")
    if kind == "text":
        return None
    if kind == "json_schema":
        return check_schema(_schema_in(response_format), scope=scope)
    return structured_as(kind, response_format, "response_format", scope)


def _schema_in(response_format: Mapping[str, Any]) -> Any:
    match response_format:
        case {"json_schema": {"schema": Mapping() as schema}}:
            return schema
    message = "response_format of the type json_schema needs an object under json_schema.schema"
    raise RequestError(message, code="invalid_json_schema", param="response_format")


def structured_of(options: Any, *, param: str = "structured_outputs", scope: str = "") -> str | None:
    """The structure of an object with one of `KINDS`: a mapping, or `StructuredOutputsParams`; None: none.

    RequestError with `param`.KIND if the engine cannot enforce it.
    """
    if is_dataclass(options) and not isinstance(options, type):
        options = {item.name: getattr(options, item.name) for item in fields(options)}
    if not isinstance(options, Mapping):
        raise _invalid(f"{param} must be an object, not {quoted(options)}", param)
    names = [name for name, value in options.items() if not (value is None or value is False)]
    for name in names:
        if name not in (*KINDS, *_INERT):
            remedy = f"{quoted(name)} is not supported; leave it out"
            message = f"{param} takes one of {', '.join(KINDS)}, and {remedy}"
            raise RequestError(message, code="unsupported", param=f"{param}.{str(name)[:64]}")
    kinds = [name for name in names if name in KINDS]
    if len(kinds) > 1:
        raise _invalid(f"{param} takes one kind of structure, but has {' and '.join(kinds)}", param)
    if not kinds:
        return None
    return structured_as(kinds[0], options[kinds[0]], f"{param}.{kinds[0]}", scope)


def structured_as(kind: str, value: Any, param: str, scope: str = "") -> str:
    """One kind by itself. `param` names the field in errors."""
    if kind == "json":
        check = check_schema_text if isinstance(value, str) else check_schema
        return check(value, param=param, scope=scope)
    if kind == "json_object":
        return check_schema(json.loads(ANY_OBJECT), param=param, scope=scope)
    make: Callable[[Any, str], str] = _MAKERS[kind]
    return check_grammar(make(value, param), kind.replace("_", " "), param=param, scope=scope)


def _from_regex(value: Any, param: str) -> str:
    pattern = _text(value, param)
    return f"start: {quoted_regex(pattern)}"


def _from_choice(value: Any, param: str) -> str:
    """One token of the grammar, not a rule each: of those the library takes few."""
    choices = [value] if isinstance(value, str) else value
    if not is_list_of(choices, str, 1):
        raise _invalid(f"{param} must be a list of strings with at least one, not {quoted(value)}", param)
    check_text_size(sum(map(len, choices)), param)
    return f"start: CHOICE\nCHOICE: {' | '.join(map(quoted_text, choices))}"


def _from_grammar(value: Any, param: str) -> str:
    grammar = _text(value, param).lstrip()
    if grammar.startswith("{"):
        raise _invalid(
            f"{param} must be a grammar in Lark or EBNF, not JSON; {param} has {quoted(value)}", param
        )
    if not _EBNF.search(grammar):
        return grammar
    lark, problem = CHECKS.lark_of_ebnf(grammar)
    if problem is not None:
        raise _invalid(f"the grammar cannot be used: {problem}", param)
    return lark


def _from_structural_tag(value: Any, param: str) -> str:
    try:
        tag = json.loads(_text(value, param)) if isinstance(value, str) else value
        if not isinstance(tag, Mapping):
            raise ValueError("it must be an object with format, or with structures and triggers")
        return lark_of_tag(tag)
    except json.JSONDecodeError:
        raise _invalid(f"{param} must be JSON, not {quoted(value)}", param) from None
    except RecursionError:
        raise _invalid("the structural tag cannot be used: it is nested too deeply", param) from None
    except (TypeError, ValueError) as error:
        raise _invalid(f"the structural tag cannot be used: {error}", param) from None


_MAKERS: Mapping[str, Callable[[Any, str], str]] = {
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
    "structural_tag": _from_structural_tag,
}


def _text(value: Any, param: str) -> str:
    if not is_text(value):
        raise _invalid(f"{param} must be a string that is not empty, not {quoted(value)}", param)
    check_text_size(len(value), param)
    return value


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, code="invalid_grammar", param=param)
