"""What /openapi.json says about request bodies: the field tables, as they are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade.server.request import fields

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
        "request_id": {"type": "string"},
    },
    "required": ["type", "error", "request_id"],
}
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


def _operation(table: Mapping[str, fields.Schema], *required: str, form: Mapping[str, Any] = _ERROR) -> dict[str, Any]:
    body = {"type": "object", "properties": dict(table), "required": list(required)}
    error = {"application/json": {"schema": form}}
    responses = {status: {"description": text, "content": error} for status, text in _STATUSES.items()}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": responses,
    }


CHAT = _operation(fields.CHAT, "messages")
COMPLETION = _operation(fields.COMPLETION, "prompt")
TOKENIZE = _operation(fields.TOKENIZE)
DETOKENIZE = _operation(fields.DETOKENIZE, "tokens")
RESPONSES = _operation(fields.RESPONSES, "input")
MESSAGES = _operation(fields.MESSAGES, "messages", "max_tokens", form=_ANTHROPIC_ERROR)
COUNT_TOKENS = _operation(fields.MESSAGES, "messages", form=_ANTHROPIC_ERROR)
