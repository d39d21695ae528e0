"""The line that is logged for a request: its id, client, tokens and error."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from saccade.options.server import ServerOptions
from saccade.server.http.auth import Tenants
from saccade.server.http.middleware import RequestMiddleware
from saccade.server.http.origins import BrowserRules
from saccade.server.request_record import TokenCounts


def fields_of(
    caplog: pytest.LogCaptureFixture, app: Any, path: str = "/v1/bill", **headers: str
) -> list[dict[str, Any]]:
    """Of the lines that a request to `app` leaves."""
    caplog.set_level(logging.INFO)
    server = ServerOptions(api_key=("key-1", "key-2"))
    middleware = RequestMiddleware(app, Tenants(server), BrowserRules(server), lambda reason: None, logs=True)
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "client": ("203.0.113.7", 4000),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }

    async def send(message: Any) -> None:
        pass

    async def receive() -> Any:
        return {"type": "http.request"}

    asyncio.run(middleware(scope, receive, send))
    return [record.fields for record in caplog.records if hasattr(record, "fields")]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    record = scope["caller"].record
    record.count(TokenCounts(12, 0, 0, 3), None)
    await send({"type": "http.response.start", "status": 200, "headers": []})


def test_a_key_is_logged_by_its_number(caplog: pytest.LogCaptureFixture) -> None:
    (fields,) = fields_of(caplog, answer, authorization="Bearer key-2", x_request_id="abc-1")
    assert fields.pop("ms") >= 0
    assert fields == {
        "request_id": "abc-1",
        "method": "POST",
        "path": "/v1/bill",
        "status": 200,
        "client": "api-key:2",
        "prompt_tokens": 12,
        "image_tokens": 0,
        "cached_tokens": 0,
        "completion_tokens": 3,
    }
    assert "abc-1 POST /v1/bill 200" in caplog.text and "key-2" not in caplog.text.replace("api-key", "")


def test_a_stranger_is_logged_by_its_address_and_error(caplog: pytest.LogCaptureFixture) -> None:
    (fields,) = fields_of(caplog, answer, authorization="Bearer wrong")
    assert (fields["client"], fields["status"], fields["error"]) == ("203.0.113.7", 401, "invalid_api_key")


@pytest.mark.parametrize("path", ["/health", "/ready", "/live", "/v1/engine"])
def test_probes_are_not_logged(caplog: pytest.LogCaptureFixture, path: str) -> None:
    assert fields_of(caplog, answer, path, authorization="Bearer key-1") == []
