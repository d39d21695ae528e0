"""The routes. Each is a few lines: what it answers is made elsewhere; this file says where and under which limits."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from saccade import __version__
from saccade.engine.ipc.client import EngineUnavailable
from saccade.errors import RequestError
from saccade.server.api import openapi
from saccade.server.api import tokenize as text
from saccade.server.api.chat import answer_chat
from saccade.server.api.completions import answer_completion
from saccade.server.api.engine_view import engine_view
from saccade.server.api.messages import answer_message
from saccade.server.api.models import model_card, model_list
from saccade.server.api.responses import answer_response
from saccade.server.errors import ApiError, ClientGone, api_error, json_response
from saccade.server.http.caller import Caller
from saccade.server.http.limits import ByteLease, Upload, read_body
from saccade.server.http.middleware import RequestMiddleware
from saccade.server.http.origins import BrowserRules
from saccade.server.http.response import ResponseWriter, while_connected
from saccade.server.http.text_tally import TextTally
from saccade.server.metrics import CONTENT_TYPE
from saccade.server.page import STATIC, page_file
from saccade.server.service import Service

logger = logging.getLogger("saccade.server")

Handler = Callable[[Service, ResponseWriter, Upload, Caller, ByteLease], Awaitable[None]]
Counter = Callable[[Service, Upload, Caller, ByteLease], Awaitable[dict[str, Any]]]

_STALE_SECONDS = 30.0  # without a sign of life of a ready engine, /health says so before it is even restarted
_SILENT_SECONDS = 5.0  # and /ready, which costs nobody a restart: an engine at work beats twice a second or every step
_IMAGE_CODES = ("invalid_image", "image_", "empty_image", "unsupported_image", "invalid_base64", "failed_to_download")


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="Saccade", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_generating_routes(app, service)
    _add_reading_routes(app, service)
    app.add_exception_handler(HTTPException, _on_http_error)
    for kind in (ApiError, EngineUnavailable, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(
        RequestMiddleware,
        keys=service.keys,
        rules=BrowserRules(service.server),
        on_refusal=service.metrics.refused,
        logs=service.server.enable_access_log,
    )
    if service.server.allowed_origins:  # outermost: a browser's preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.server.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id", "x-api-key", "anthropic-version"],
        )
    return app


# --- routes with a body -------------------------------------------------------------------------------------------


def _add_generating_routes(app: FastAPI, service: Service) -> None:
    handlers: dict[str, tuple[Handler, dict[str, Any]]] = {
        "/v1/chat/completions": (answer_chat, openapi.CHAT),
        "/v1/completions": (answer_completion, openapi.COMPLETION),
        "/v1/bill": (_answering(text.bill), openapi.CHAT),
        "/tokenize": (_answering(text.tokenize), openapi.TOKENIZE),
        "/detokenize": (_answering(text.detokenize), openapi.DETOKENIZE),
        "/v1/responses": (answer_response, openapi.RESPONSES),
        "/v1/responses/input_tokens": (_answering(text.input_tokens), openapi.RESPONSES),
        "/v1/messages": (answer_message, openapi.MESSAGES),
        "/v1/messages/count_tokens": (_answering(text.message_tokens), openapi.COUNT_TOKENS),
    }
    for path, (handler, extra) in handlers.items():
        app.add_api_route(path, _endpoint(service, handler), methods=["POST"], openapi_extra=extra, name=path)


def _answering(counter: Counter) -> Handler:
    async def handler(
        service: Service, writer: ResponseWriter, upload: Upload, caller: Caller, lease: ByteLease
    ) -> None:
        await writer.json(await counter(service, upload, caller, lease))

    return handler


def _endpoint(service: Service, handler: Handler) -> Callable[[], Awaitable[Response]]:
    async def endpoint() -> Response:
        return _Work(service, handler)

    return endpoint


class _Work(Response):
    """A whole exchange as one task, so that one place lets it in, counts it and cleans up after it."""

    def __init__(self, service: Service, handler: Handler) -> None:
        super().__init__()
        self._service = service
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = ResponseWriter(scope, receive, send)
        try:
            await self._run(scope, receive, writer)
        except (ClientGone, ClientDisconnect):
            self._service.metrics.failed("client_left")
        except Exception as error:
            await self._fail(writer, error, scope["caller"].request_id)

    async def _run(self, scope: Scope, receive: Receive, writer: ResponseWriter) -> None:
        service = self._service
        service.check_open()
        with service.gate.holding(scope["caller"].client) as lease:
            upload = await read_body(Request(scope, receive), service.server, lease, TextTally(service.max_chars))
            lease.enter()
            async with while_connected(receive):
                await self._handler(service, writer, upload, scope["caller"], lease)

    async def _fail(self, writer: ResponseWriter, error: Exception, request_id: str) -> None:
        answer = api_error(error)
        if answer.code == "internal_error":
            logger.exception("%s failed", request_id)
        metrics = self._service.metrics
        metrics.failed(answer.code or "invalid_request")
        if isinstance(error, RequestError) and (error.code or "").startswith(_IMAGE_CODES):
            metrics.media_refused(error.code or "")
        await writer.error(answer)


# --- routes that only read ----------------------------------------------------------------------------------------


def _add_reading_routes(app: FastAPI, service: Service) -> None:
    def add(path: str, endpoint: Callable[..., Any]) -> None:
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_class=Response)

    def health() -> Response:
        return _health(service)

    def ready() -> Response:
        return _ready(service)

    def models() -> Response:
        return json_response(model_list(service))

    def model(name: str) -> Response:
        return json_response(model_card(service, name))

    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    async def version() -> Response:
        return json_response({"version": __version__})

    async def home() -> Response:
        return page_file("index.html")

    async def static(name: str) -> Response:
        return page_file(name)

    async def engine() -> Response:
        return json_response(engine_view(service))

    add("/health", health)
    add("/ready", ready)
    add("/v1/models", models)
    add("/v1/models/{name:path}", model)
    add("/metrics", metrics)
    add("/version", version)
    add("/v1/engine", engine)
    add("/", home)
    add(STATIC + "{name}", static)


def _health(service: Service) -> Response:
    """200 while the engine steps, or is idle and says so."""
    status = service.engine.status()
    is_alive = status.state in ("ready", "draining") and status.heartbeat_age < _STALE_SECONDS
    body = {
        "status": "ok" if is_alive else "unavailable",
        "engine": status.state,
        "heartbeat_age_s": round(status.heartbeat_age, 3),
        "restarts": status.restarts,
    }
    return json_response(body, 200 if is_alive else 503)


def _ready(service: Service) -> Response:
    """200 when a request sent now would be taken."""
    status = service.engine.status()
    reason: str = "draining" if service.gate.is_draining else status.state
    if reason == "ready" and status.heartbeat_age > _SILENT_SECONDS:
        reason = "silent"
    if reason == "ready" and (service.gate.is_full or service.connections.is_full):
        reason = "overloaded"
    is_ready = reason == "ready"
    return json_response({"status": reason}, 200 if is_ready else 503, {} if is_ready else {"retry-after": "1"})


# --- errors outside the routes ------------------------------------------------------------------------------------


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Paths and methods that are not there."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:200]
    messages = {404: f"there is no route {path}", 405: f"{request.method} is not a method of {path}"}
    message = messages.get(error.status_code, "the request cannot be answered")
    codes = {404: "not_found", 405: "method_not_allowed"}
    answer = ApiError(error.status_code, message, code=codes.get(error.status_code))
    response = _answer(request, answer)
    response.headers.update(error.headers or {})
    return response


async def _on_error(request: Request, error: Exception) -> Response:
    return _answer(request, api_error(error))


def _answer(request: Request, error: ApiError) -> Response:
    return error.response(request.scope["path"], request.scope["caller"].request_id)
