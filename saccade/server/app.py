"""The routes of the ASGI app, and the health checks."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from saccade import __version__
from saccade.engine.ipc.client import EngineUnavailable
from saccade.errors import RequestError
from saccade.server.accounts import LIMIT_HEADERS
from saccade.server.api import openapi
from saccade.server.api import tokenize as tokenize_api
from saccade.server.api.batches import create_batch
from saccade.server.api.chat import create_chat_completion
from saccade.server.api.completions import create_completion
from saccade.server.api.messages import create_message
from saccade.server.api.models import model_card, model_list
from saccade.server.api.operator import operator_routes
from saccade.server.api.plan import measured, plan, plan_options
from saccade.server.api.pooling import create_embedding, create_pooling, create_score, rerank
from saccade.server.api.responses import create_response
from saccade.server.batch_routes import batch_routes
from saccade.server.endpoint import Handler, JsonEndpoint
from saccade.server.errors import ApiError, api_error, json_response
from saccade.server.http.middleware import RequestMiddleware
from saccade.server.http.origins import BrowserRules
from saccade.server.http.request_context import Exchange
from saccade.server.http.root_path import RootPath
from saccade.server.metrics import CONTENT_TYPE
from saccade.server.service import Service
from saccade.server.turns import Work
from saccade.server.web_ui import STATIC, page_file
from saccade.server.worker_rows import worker_rows

logger = logging.getLogger("saccade.server")

JsonHandler = Callable[[Service, Exchange], Awaitable[dict[str, Any]]]

_UNHEALTHY_SECONDS = 30.0  # without a heartbeat: /health fails before the engine is restarted
_NOT_READY_SECONDS = 5.0  # without a heartbeat: /ready fails. The engine sends one every half second or step


def create_app(service: Service) -> Starlette:
    operators = operator_routes(service) if service.server.operator_routes else []
    app = Starlette(
        routes=[*_post_routes(service), *batch_routes(service), *_get_routes(service), *operators]
    )
    if service.batches is not None:
        service.batches.connect(app.router)
    app.router.redirect_slashes = False
    app.add_exception_handler(HTTPException, _on_http_error)
    for kind in (ApiError, RequestError, EngineUnavailable, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(
        RequestMiddleware,
        tenants=service.tenants,
        rules=BrowserRules(service.server),
        on_refusal=service.metrics.refused,
        logs=service.server.enable_access_log,
        traces=service.traces,
        routes=app.routes,
    )
    if service.server.allowed_origins:  # outermost: a preflight request has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.server.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id", "x-api-key", "anthropic-version"],
            expose_headers=["retry-after", "x-request-id", *LIMIT_HEADERS],
        )
    if service.server.root_path:
        app.add_middleware(RootPath, root=service.server.root_path)
    return app


# --- routes with a body -------------------------------------------------------------------------------------


def _post_routes(service: Service) -> list[Route]:
    """Those of `openapi.BODIES`, each with its handler."""
    handlers: dict[str, Handler] = {
        "/v1/chat/completions": create_chat_completion,
        "/v1/completions": create_completion,
        "/v1/bill": _json_handler(tokenize_api.bill),
        "/v1/plan": _json_handler(plan),
        "/tokenize": _json_handler(tokenize_api.tokenize),
        "/detokenize": _json_handler(tokenize_api.detokenize),
        "/v1/responses": create_response,
        "/v1/responses/input_tokens": _json_handler(tokenize_api.input_tokens),
        "/v1/messages": create_message,
        "/v1/messages/count_tokens": _json_handler(tokenize_api.message_tokens),
        "/v1/embeddings": _json_handler(create_embedding),
        "/pooling": _json_handler(create_pooling),
        **dict.fromkeys(openapi.SCORE_ROUTES, _json_handler(create_score)),
        **dict.fromkeys(openapi.RERANK_ROUTES, _json_handler(rerank)),
        "/v1/batches": _json_handler(create_batch),
    }
    return [
        Route(path, JsonEndpoint(service, handlers[path], _INPUTS.get(path, ())), methods=["POST"], name=path)
        for path in openapi.BODIES
    ]


_POOLED = ("input", "documents", "text_1", "text_2", "data_1", "data_2", "queries", "items", "query")
_INPUTS: dict[str, tuple[str, ...]] = {
    "/v1/completions": ("prompt",),
    "/detokenize": ("tokens",),
    "/v1/embeddings": _POOLED,
    "/pooling": _POOLED,
    **dict.fromkeys((*openapi.SCORE_ROUTES, *openapi.RERANK_ROUTES), _POOLED),
}
"""Fields with token ids or several prompts, which are limited one by one when they are built."""


def _json_handler(handler: JsonHandler) -> Handler:
    async def write(service: Service, exchange: Exchange) -> None:
        await exchange.writer.json(await handler(service, exchange))

    return write


# --- routes without a body ----------------------------------------------------------------------------------


def _get_routes(service: Service) -> list[Route]:
    views: dict[str, Callable[[Request], Response]] = {
        "/live": lambda _: json_response(
            {"status": "alive"}
        ),  # the event loop works, whatever the engine does
        "/health": lambda _: _health(service),
        "/ready": lambda _: _ready(service),
        "/v1/models": lambda _: json_response(model_list(service)),
        "/v1/models/{name:path}": lambda request: json_response(
            model_card(service, request.path_params["name"])
        ),
        "/v1/plan/options": lambda _: json_response(
            plan_options(service)
        ),  # for the page at `/`, as the next
        "/v1/plan/measured": lambda _: json_response(measured(service)),
        "/metrics": lambda request: _metrics(service, request),
        "/version": lambda _: json_response({"version": __version__}),
        "/v1/engine": lambda request: json_response(_engine_view(service, request)),
        "/openapi.json": lambda _: _openapi(service),
        "/": lambda _: page_file("index.html"),
        STATIC + "{name}": lambda request: page_file(request.path_params["name"]),
    }
    return [Route(path, _on_loop(view)) for path, view in views.items()]


def _on_loop(view: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
    """Not in a thread: none of them waits."""

    async def answer(request: Request) -> Response:
        return view(request)

    return answer


def _sees_all(request: Request) -> bool:
    return bool(request.scope["caller"].account.settings.is_operator)


def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.text(_sees_all(request)), media_type=CONTENT_TYPE)


def _openapi(service: Service) -> Response:
    servers = {"servers": [{"url": service.server.root_path or "/"}]}
    return json_response({**openapi.document(__version__), **servers})


def _health(service: Service) -> Response:
    """200 while the engine steps or sends heartbeats."""
    status = service.engine.status()
    is_alive = status.state == "sleeping"  # an operator asked for it
    if status.state in ("ready", "draining"):
        is_alive = status.heartbeat_age < _UNHEALTHY_SECONDS
    word, code = ("ok", 200) if is_alive else ("unavailable", 503)
    body = {
        "status": word,
        "engine": status.state,
        "heartbeat_age_s": round(status.heartbeat_age, 3),
        "restarts": status.restarts,
        **_worker_views(service),
    }
    return json_response(body, code)


def _worker_views(service: Service) -> dict[str, Any]:
    """Nothing where there is one engine and no encoder worker."""
    views = [
        {
            "state": view.status.state,
            "heartbeat_age_s": round(view.status.heartbeat_age, 3),
            "restarts": view.status.restarts,
            "running": view.stats.get("running", 0),
            "waiting": view.stats.get("waiting", 0),
            "queued_work": view.queued_work,
        }
        for view in service.engine.replicas()
    ]
    encoders = [
        {
            "state": view.status.state,
            "restarts": view.status.restarts,
            "queue": view.queue,
            "encoded": view.encoded,
        }
        for view in service.encoders()
    ]
    workers = {"replicas": views, "encoders": encoders}
    return {name: rows for name, rows in workers.items() if rows}


def _ready(service: Service) -> Response:
    """200 if a new request would be admitted."""
    reason = service.state
    if reason == "ready":
        if service.engine.status().heartbeat_age > _NOT_READY_SECONDS:
            reason = "silent"
        elif service.gate.is_full or service.connections.is_full:
            reason = "overloaded"
    if reason == "ready":
        return json_response({"status": reason})
    return json_response({"status": reason}, 503, {"retry-after": "1"})


def _engine_view(service: Service, request: Request) -> dict[str, Any]:
    """State and counters for the page at `/`, nothing of any request or tenant; workers for operators."""
    status = service.engine.status()
    limits = service.engine.info and service.engine.info.limits
    stats = dict(service.engine.stats())
    for of_tenants in ("tenants", "encoder_cache_tenants"):  # every key may ask
        stats.pop(of_tenants, None)
    return {
        "object": "engine",
        "model": service.names[0],
        "version": __version__,
        "uptime_s": int(time.monotonic() - service.began),
        "state": service.state,
        "heartbeat_age_s": round(status.heartbeat_age, 3),
        "restarts": status.restarts,
        **_worker_views(service),
        "open_requests": service.gate.num_open,
        "schema_checks_waiting": service.turns.num_waiting(Work.SCHEMA),
        **{name: getattr(limits, name, None) for name in ("max_model_len", "block_size")},
        "requests": service.metrics.request_counts(),
        "tokens": {"prompt": service.metrics.tokens_in, "answer": service.metrics.tokens_out},
        "recent_steps": stats.pop("recent_steps", []),
        "stats": stats,
        **({"workers": worker_rows(service)} if _sees_all(request) else {}),
    }


# --- errors outside the routes ------------------------------------------------------------------------------


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:200]
    message = "the request cannot be answered"
    code = None
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is no route {path}"
        code = "not_found"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.method} is not a method of {path}"
        code = "method_not_allowed"
    response = await _on_error(request, ApiError(error.status_code, message, code=code))
    response.headers.update(error.headers or {})
    return response


async def _on_error(request: Request, error: Exception) -> Response:
    return api_error(error).response(request.scope["path"], request.scope["caller"].request_id)
