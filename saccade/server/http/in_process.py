"""Calls a route of this server without a connection. The caller's tenant is known already."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from saccade.server.accounts import Account
from saccade.server.http.request_context import Caller
from saccade.server.request_record import RequestRecord

_PIECE = 1 << 16  # as bodies arrive from a socket


class Answer(NamedTuple):
    status: int
    retry_after: bytes
    request_id: str
    content: bytes


async def post(app: ASGIApp, account: Account, client: str, path: str, body: bytes) -> Answer:
    """`client`: shares of the gate are counted under this name."""
    request_id = uuid.uuid4().hex
    caller = Caller(request_id, account.name, RequestRecord(), client, account)
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "caller": caller,
    }
    pieces = _pieces(body)
    status = 0
    headers: dict[bytes, bytes] = {}
    content = bytearray()

    async def receive() -> Message:
        for message in pieces:
            await asyncio.sleep(0)  # others have their turn
            return message
        await asyncio.Event().wait()  # this client never leaves
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        else:
            content.extend(message.get("body", b""))

    await app(scope, receive, send)
    return Answer(status, headers.get(b"retry-after", b""), request_id, bytes(content))


def _pieces(body: bytes) -> Iterator[Message]:
    for end in range(_PIECE, len(body) + _PIECE, _PIECE):
        piece = body[end - _PIECE : end]
        yield {"type": "http.request", "body": piece, "more_body": end < len(body)}
