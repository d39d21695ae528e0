"""One question to a running server, for commands that need to know it before they begin."""

from __future__ import annotations

import json
from typing import Any

import httpcore

from saccade.errors import ConfigError, reason_of

_SECONDS = 10.0


def get_json(url: str, api_key: str | None, server: str) -> tuple[int, Any]:
    """Status and body, None for what is no JSON. ConfigError, naming `server`, where none answers."""
    headers = [("authorization", f"Bearer {api_key}")] if api_key else []
    timeout = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), _SECONDS)}
    try:
        response = httpcore.request("GET", url, headers=headers, extensions=timeout)
        return response.status, json.loads(response.content)
    except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.UnsupportedProtocol) as error:
        raise ConfigError(
            f"no server answers at {server}: {reason_of(error)}; --url says where it is"
        ) from None
    except (httpcore.ProtocolError, ValueError):
        return 0, None
