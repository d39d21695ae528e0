"""From what a client asks of the answer's form to a schema the engine can enforce. Never imports torch.

`scope` is whose requests may profit from each other: what was found about a schema is remembered for it alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from saccade.errors import RequestError, quoted
from saccade.structured.check_pool import SchemaChecks
from saccade.structured.schema import unavailable

MAX_SCHEMA_BYTES = 256 << 10
CHECKS = SchemaChecks()
ANY_OBJECT = '{"type":"object"}'
_TYPES = ("text", "json_object", "json_schema")


def structured_from(response_format: Any, scope: str = "") -> str | None:
    """`SamplingParams.structured` for OpenAI's response_format: a JSON schema as text, or None for free text."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind not in _TYPES:
        raise _refused(
            f"response_format must be an object whose type is one of {', '.join(_TYPES)}, not {quoted(kind)}"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        _check_available("response_format")
        return ANY_OBJECT
    return check_schema(_schema_in(response_format), scope=scope)


def check_schema(schema: Any, *, param: str = "response_format", scope: str = "") -> str:
    """The schema as text, once it is known that the engine can enforce it; RequestError otherwise."""
    _check_available(param)
    text = _as_text(schema, param)
    try:
        found = CHECKS.problem(text, scope) if text != ANY_OBJECT else None
    except TimeoutError:
        found = "it could not be compiled in time; make it simpler, or send it again"
    if found is not None:
        raise _refused(f"the JSON schema cannot be used: {found}", param)
    return text


def check_structured(text: str) -> None:
    """The same check for `SamplingParams.structured` as a Python caller wrote it."""
    check_schema_text(text, param="structured")


def check_schema_text(text: str, *, param: str, scope: str = "") -> str:
    """The same check for a schema that comes as text."""
    _check_size(len(text), param)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise _refused(f"{param} must be a JSON schema as text, but {quoted(text)} is not JSON", param) from None
    return check_schema(schema, param=param, scope=scope)


def _check_available(param: str) -> None:
    if (reason := unavailable()) is not None:
        raise RequestError(reason, code="unsupported", param=param)


def _schema_in(response_format: Mapping[str, Any]) -> Any:
    given = response_format.get("json_schema")
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping):
        raise _refused("response_format of the type json_schema needs an object under json_schema.schema")
    return schema


def _as_text(schema: Any, param: str) -> str:
    if not isinstance(schema, Mapping):
        raise _refused(f"a JSON schema must be an object, not {type(schema).__name__}", param)
    try:
        text = json.dumps(schema, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise _refused("the JSON schema is nested too deeply or holds values that JSON does not have", param) from None
    _check_size(len(text), param)
    return text


def _check_size(size: int, param: str) -> None:
    if size > MAX_SCHEMA_BYTES:
        raise _refused(f"the JSON schema has {size} bytes and may have {MAX_SCHEMA_BYTES}; make it smaller", param)


def _refused(message: str, param: str = "response_format") -> RequestError:
    return RequestError(message, code="invalid_json_schema", param=param)
