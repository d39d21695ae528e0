"""/openapi.json: the routes, with request bodies made from the tables that check them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from saccade.server.request import fields
from saccade.server.request.batches import BATCH
from saccade.server.request.media_files import PURPOSES
from saccade.server.request.plan import PLAN

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


_CHAT = _operation(fields.CHAT, "messages")
_COMPLETION = _operation(fields.COMPLETION, "prompt")
_TOKENIZE = _operation(fields.TOKENIZE)
_DETOKENIZE = _operation(fields.DETOKENIZE, "tokens")
_RESPONSES = _operation(fields.RESPONSES, "input")
_MESSAGES = _operation(fields.MESSAGES, "messages", "max_tokens", form=_ANTHROPIC_ERROR)
_COUNT_TOKENS = _operation(fields.MESSAGES, "messages", form=_ANTHROPIC_ERROR)

SCORE_ROUTES = ("/score", "/v1/score")
RERANK_ROUTES = ("/rerank", "/v1/rerank", "/v2/rerank")

BODIES: dict[str, dict[str, Any]] = {  # of POST routes
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETION,
    "/v1/bill": _CHAT,
    "/v1/plan": _operation(PLAN),
    "/tokenize": _TOKENIZE,
    "/detokenize": _DETOKENIZE,
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": _RESPONSES,
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _COUNT_TOKENS,
    **dict.fromkeys(("/v1/embeddings", "/pooling"), _operation(fields.EMBEDDING)),
    **dict.fromkeys(SCORE_ROUTES, _operation(fields.SCORE)),
    **dict.fromkeys(RERANK_ROUTES, _operation(fields.RERANK, "query", "documents")),
    "/v1/batches": _operation(BATCH, "input_file_id", "endpoint", "completion_window"),
}
_READ = {
    "/live": "Whether the process lives",
    "/health": "Whether the engine lives",
    "/ready": "Whether a new request would be admitted",
    "/v1/models": "The names of the model",
    "/v1/models/{name}": "One of them",
    "/metrics": "Prometheus metrics",
    "/version": "Of the server",
    "/v1/engine": "State and counters of the engine",
    "/v1/plan/options": "GPUs that have names, and limits of a plan",
    "/v1/plan/measured": "Requests and latencies of the last hour",
    "/v1/files": "Files for batches, and results of batches",
    "/v1/files/{id}": "One of them",
    "/v1/files/{id}/content": "Its bytes",
    "/v1/batches": "Batches, the newest first",
    "/v1/batches/{id}": "One of them",
}
_FORM = _object(purpose={"enum": list(PURPOSES)}, file={"type": "string", "format": "binary"})
_FORM_BODY = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
_OTHERS: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/files", "post"): {"requestBody": _FORM_BODY, "responses": {"200": {"description": "The file"}}},
    ("/v1/files/{id}", "delete"): {"responses": {"200": {"description": "It is deleted"}}},
    ("/v1/batches/{id}/cancel", "post"): {"responses": {"200": {"description": "The batch"}}},
}
_PARAMETER = re.compile(r"\{(\w+)\}")


def _of_path(method: str, path: str, operation: Mapping[str, Any]) -> dict[str, Any]:
    names = _PARAMETER.findall(path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": _STRING} for name in names]
    return {"operationId": f"{method} {path}", "parameters": parameters, **operation}


def document(version: str) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for path, operation in BODIES.items():
        responses = {"200": {"description": "The answer"}, **operation["responses"]}
        paths[path] = {"post": {"operationId": path, **operation, "responses": responses}}
    for path, text in _READ.items():
        responses = {"200": {"description": text}}
        paths.setdefault(path, {})["get"] = _of_path("get", path, {"responses": responses})
    for (path, method), operation in _OTHERS.items():
        paths.setdefault(path, {})[method] = _of_path(method, path, operation)
    return {"openapi": "3.1.0", "info": {"title": "Saccade", "version": version}, "paths": paths}
