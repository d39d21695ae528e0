"""Request id, tenant, browser rules, response headers and access log of every request. Sees no bodies."""

from __future__ import annotations

import encodings.unicode_escape  # noqa: F401  of the access log: later there may be no descriptor to load it
import logging
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.errors import quoted
from saccade.server.accounts import Account
from saccade.server.errors import ApiError, is_anthropic
from saccade.server.http.auth import Headers, Tenants, is_open, peer_of
from saccade.server.http.origins import BrowserRules
from saccade.server.http.parser import PEER
from saccade.server.http.request_context import Caller
from saccade.server.http.response import SEND_BODY
from saccade.server.request_record import RequestRecord
from saccade.server.tracing import UNMATCHED, Ended, Traces
from saccade.types.request import OTHER_LABEL

logger = logging.getLogger("saccade.server")

_SAFE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_POLLED = frozenset({"/v1/engine", "/v1/plan/measured"})  # an open page asks for them again and again
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


@dataclass(frozen=True)
class RequestMiddleware:
    app: ASGIApp
    tenants: Tenants
    rules: BrowserRules
    on_refusal: Callable[[str], None]
    logs: bool
    traces: Traces | None = None
    routes: Sequence[BaseRoute] = ()  # of the app, for the names of traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        record = RequestRecord(_address(scope))
        scope[SEND_BODY] = send
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers_out = MutableHeaders(scope=message)
                headers_out["x-request-id"] = request_id
                if is_anthropic(scope["path"]):  # Anthropic's clients read this header
                    headers_out["request-id"] = request_id
                for name, value in _HEADERS.items():  # the page has its own policy
                    headers_out.setdefault(name, value)
                if "caller" in scope:
                    headers_out.update(scope["caller"].account.headers())
            await send(message)

        path = scope["path"]
        try:
            account = self.tenants.find(path, scope["headers"], _connected(scope))
            self.rules.check(scope["method"], path, headers)
            _check_codings(scope["headers"])
            client = account.name or peer_of(scope.get("client"))
            record.client = _name_of(account) or record.client
            scope["caller"] = Caller(request_id, account.name, record, client, account)
            await self.app(scope, receive, send_with_headers)
        except ApiError as error:
            record.fail(str(error.code))
            self.on_refusal("unauthorized" if error.status == HTTPStatus.UNAUTHORIZED else str(error.code))
            await error.response(scope["path"], request_id)(scope, receive, send_with_headers)
        finally:
            record.mark("ended")
            if path not in _POLLED and not is_open(path):
                short_path = path[:100].encode("unicode_escape").decode()
                route = self._route_of(scope) if self.traces else UNMATCHED
                request = Ended(scope["method"], short_path, route, status, request_id, record)
                self._report(request, headers)

    def _route_of(self, scope: Scope) -> str:
        """Also of a request that was refused before it came to a route."""
        routes = (route for route in self.routes if isinstance(route, Route))
        return next((route.path for route in routes if route.matches(scope)[0] != Match.NONE), UNMATCHED)

    def _report(self, request: Ended, headers: Mapping[bytes, bytes]) -> None:
        if self.logs:
            _log(request)
        if self.traces is not None:
            self.traces.report(request, headers)


def _check_codings(headers: Headers) -> None:
    """None is undone here but chunks."""
    for name, value in headers:
        coding = value.decode("latin-1").strip().lower()
        if name == b"content-encoding" and coding not in ("", "identity"):
            message = f"the header Content-Encoding is {quoted(coding)}; send the body as it is, without one"
            raise ApiError(415, message, code="unsupported_media_type")
        if name == b"transfer-encoding" and coding != "chunked":
            message = f"the header Transfer-Encoding is {quoted(coding)}, and only chunked is known"
            raise ApiError(501, message, code="unsupported")


def _log(request: Ended) -> None:
    ms = request.record.ms_between("arrived", "ended")
    line = f"{request.request_id} {request.method} {request.path} {request.status or 'left'} {ms:.0f} ms"
    fields = {
        "request_id": request.request_id,
        "method": request.method,
        "path": request.path,
        "status": request.status,  # 0: the client disconnected before the response
        "ms": round(ms, 1),
        **request.record.fields(),
    }
    logger.info("%s%s", line, request.record.text(), extra={"fields": fields})


def _address(scope: Scope) -> str:
    return _host(scope.get("client"))


def _host(peer: tuple[str, int] | None) -> str:
    return str(peer[0]) if peer else ""


def _name_of(account: Account) -> str:
    """A key is named by its number: the account's own name is made from the key."""
    label = account.settings.label
    return account.name if label == OTHER_LABEL else label


def _connected(scope: Scope) -> str:
    """The other end of the connection. X-Forwarded-For may have changed `client`, and clients write that."""
    return _host(scope.get("state", {}).get(PEER))


def _request_id(header: bytes) -> str:
    """The id the client sent, if it is safe to write into a log and a header; otherwise a new one."""
    if _SAFE_ID.fullmatch(header):
        return header.decode()
    return uuid.uuid4().hex
