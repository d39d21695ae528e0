"""Errors in responses: an HTTP status, a message, the field at fault and a code.

In OpenAI's form; below /v1/messages in Anthropic's.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from saccade.errors import ConfigError, EngineUnavailable, RequestError

_STATUS_OF_CODE: Mapping[str | None, int] = {
    "overloaded": 429,
    "model_not_found": 404,
    "file_not_found": 404,
    "batch_not_found": 404,
    "file_in_use": 409,
    "engine_error": 500,
}
_RETRY_AFTER_OVERLOAD = 1.0
_MAX_CHARS = 1000  # of a message: those of templates and libraries may repeat much of a request
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
    """An error response. `retry_after` is set if the same request may work later."""

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
        """Anthropic's form has no `param`, so the message begins with it. The code is among its details."""
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_KINDS.get(self.status, other)
        message = self.message
        if self.param is not None and not message.startswith(self.param):
            message = f"{self.param}: {message}"
        error: dict[str, Any] = {"type": kind, "message": message}
        if self.code is not None:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error, "request_id": request_id}

    def headers(self) -> dict[str, str]:
        """OpenAI's clients retry some errors by themselves; `x-should-retry` prevents useless attempts."""
        if self.retry_after is not None:
            return {"retry-after": str(max(1, round(self.retry_after)))}
        return {} if self.status >= 500 else {"x-should-retry": "false"}

    def response(self, path: str, request_id: str) -> Response:
        """The response in the form of the API at `path`."""
        body = self.anthropic_body(request_id) if is_anthropic(path) else self.body()
        return json_response(body, self.status, self.headers())


def is_anthropic(path: str) -> bool:
    return f"{path}/".startswith(f"{_MESSAGES}/")


def overloaded(status: int, message: str) -> ApiError:
    return ApiError(status, message, code="overloaded", retry_after=_RETRY_AFTER_OVERLOAD)


class ClientGone(Exception):
    """The client has disconnected."""


def api_error(error: Exception) -> ApiError:
    """The error response for an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        status = _STATUS_OF_CODE.get(error.code, 400)
        retry_after = _RETRY_AFTER_OVERLOAD if status == HTTPStatus.TOO_MANY_REQUESTS else None
        return ApiError(status, error.message, code=error.code, param=error.param, retry_after=retry_after)
    if isinstance(error, EngineUnavailable):
        return ApiError(503, error.message, code="engine_unavailable", retry_after=error.retry_after)
    if isinstance(error, ConfigError):  # the checkpoint has no chat template
        return ApiError(400, str(error), code="unsupported")
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
