"""Errors as clients read them: a status, a sentence, the field at fault and a code. No library's words.

Two forms: OpenAI's, and Anthropic's below /v1/messages.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from saccade.engine.ipc.client import EngineUnavailable
from saccade.errors import ConfigError, RequestError

_STATUS_OF_CODE = {"overloaded": 429, "model_not_found": 404, "engine_error": 500}
_RETRY_AFTER_OVERLOAD = 1.0
_MAX_CHARS = 1000  # of a message: a template or a library may repeat more of a request than we would
_MESSAGES = "/v1/messages"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer that is an error. `retry_after` is given where the same request may work later."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_CHARS else f"{message[: _MAX_CHARS - 3]}..."
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """That form has no place for the field at fault, so the message begins with it."""
        kind = _ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        is_named = self.param is None or self.message.startswith(self.param)
        message = self.message if is_named else f"{self.param}: {self.message}"
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}

    def headers(self) -> dict[str, str]:
        """Clients retry 5xx on their own, so they are told when that is of no use."""
        if self.retry_after is not None:
            return {"retry-after": str(max(1, round(self.retry_after)))}
        return {} if self.status >= 500 else {"x-should-retry": "false"}

    def response(self, path: str, request_id: str) -> Response:
        """In the form of the API that `path` belongs to."""
        body = self.anthropic_body(request_id) if is_anthropic(path) else self.body()
        return json_response(body, self.status, self.headers())


def is_anthropic(path: str) -> bool:
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


class ClientGone(Exception):
    """Nobody reads the answer any more."""


def api_error(error: Exception) -> ApiError:
    """The answer to whatever went wrong on the way."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        status = _STATUS_OF_CODE.get(error.code or "", 400)
        retry_after = _RETRY_AFTER_OVERLOAD if status == HTTPStatus.TOO_MANY_REQUESTS else None
        return ApiError(status, error.message, code=error.code, param=error.param, retry_after=retry_after)
    if isinstance(error, EngineUnavailable):
        return ApiError(503, error.message, code="engine_unavailable", retry_after=error.retry_after)
    if isinstance(error, ConfigError):  # a checkpoint without a chat template, found out by the first chat
        return ApiError(400, str(error), code="unsupported")
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
