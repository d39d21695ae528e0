"""One question to a running server, for commands that need to know it before they begin."""

from __future__ import annotations

import json
from typing import Any

import httpcore

from saccade.errors import ConfigError, reason_of

_SECONDS = 10.0
_OK = 200


def get_json(url: str, api_key: str | None, server: str) -> tuple[int, Any]:
    """Status and body, None for what is no JSON. ConfigError, naming `server`, where none answers."""
    status, body = _get(url, api_key, server)
    try:
        return status, json.loads(body)
    except ValueError:
        return 0, None


def get_text(url: str, api_key: str | None, server: str) -> str:
    """Empty where the server has no such page."""
    status, body = _get(url, api_key, server)
    return body.decode(errors="replace") if status == _OK else ""


def _get(url: str, api_key: str | None, server: str) -> tuple[int, bytes]:
    """Status 0 and no body where what answers is no HTTP server."""
    headers = [("authorization", f"Bearer {api_key}")] if api_key else []
    timeout = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), _SECONDS)}
    try:
        response = httpcore.request("GET", url, headers=headers, extensions=timeout)
        return response.status, response.content
    except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.UnsupportedProtocol) as error:
        raise ConfigError(
            f"no server answers at {server}: {reason_of(error)}; --url says where it is"
        ) from None
    except httpcore.ProtocolError:
        return 0, b""
