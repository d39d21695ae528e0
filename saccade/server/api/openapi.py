"""Request bodies in /openapi.json, made from the tables that check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade.server.request import fields

_STRING = {"type": "string"}
_STRING_OR_NULL = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_ERROR = _object(error=_object(message=_STRING, type=_STRING, param=_STRING_OR_NULL, code=_STRING_OR_NULL))
_CAUSE = _object(type=_STRING, message=_STRING)
_ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_CAUSE, request_id=_STRING)
_STATUSES = {
    "400": "The request is at fault",
    "401": "No key, or a wrong one",
    "403": "A page that is not allowed sent it, or it was sent to a name that is not the server's",
    "404": "The model is not served here",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Too many requests wait; try again after Retry-After",
    "503": "The engine starts, drains or was restarted; try again after Retry-After",
}


def _operation(table: Mapping[str, Any], *required: str, form: Mapping[str, Any] = _ERROR) -> dict[str, Any]:
    body = {"type": "object", "properties": dict(table), "required": list(required)}
    error = {"application/json": {"schema": form}}
    responses = {status: {"description": text, "content": error} for status, text in _STATUSES.items()}
    content = {"application/json": {"schema": body}}
    return {"requestBody": {"required": True, "content": content}, "responses": responses}


CHAT = _operation(fields.CHAT, "messages")
COMPLETION = _operation(fields.COMPLETION, "prompt")
TOKENIZE = _operation(fields.TOKENIZE)
DETOKENIZE = _operation(fields.DETOKENIZE, "tokens")
RESPONSES = _operation(fields.RESPONSES, "input")
MESSAGES = _operation(fields.MESSAGES, "messages", "max_tokens", form=_ANTHROPIC_ERROR)
COUNT_TOKENS = _operation(fields.MESSAGES, "messages", form=_ANTHROPIC_ERROR)
