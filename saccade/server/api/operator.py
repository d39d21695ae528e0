"""Routes that change the engine of a running server, with --operator-routes and for operators alone.

They have vLLM's names: /reset_prefix_cache, /sleep, /wake_up, /is_sleeping, /start_profile, /stop_profile.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from saccade.errors import ConfigError, quoted
from saccade.server.errors import ApiError, json_response
from saccade.server.service import Service

logger = logging.getLogger("saccade.server")

Action = Callable[[Service, Request], Awaitable[dict[str, Any]]]


def operator_routes(service: Service) -> list[Route]:
    posts: dict[str, Action] = {
        "/reset_prefix_cache": _reset_prefix_cache,
        "/sleep": _sleep,
        "/wake_up": _wake_up,
        "/start_profile": _start_profile,
        "/stop_profile": _stop_profile,
    }
    routes = [Route(path, _guarded(service, act), methods=["POST"]) for path, act in posts.items()]
    return [*routes, Route("/is_sleeping", _guarded(service, _is_sleeping))]


def _guarded(service: Service, act: Action) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        caller = request.scope["caller"]
        if not caller.account.settings.is_operator:
            raise ApiError(403, f"{request.url.path} is for operators", code="not_an_operator")
        if request.method == "POST":
            logger.info("%s %s", caller.request_id, request.url.path)
        try:
            return json_response(await act(service, request))
        except ConfigError as error:
            raise ApiError(400, str(error)) from None

    return handle


async def _reset_prefix_cache(service: Service, request: Request) -> dict[str, Any]:
    if not await service.engine.control("reset_prefix_cache"):
        message = "requests are running, and their KV blocks are in use; try again when none is open"
        raise ApiError(409, message, code="requests_open", retry_after=1.0)
    return {"reset": True}


async def _sleep(service: Service, request: Request) -> dict[str, Any]:
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise ApiError(400, f"level must be 1 or 2, not {quoted(level)}", param="level")
    server = service.server
    if server.encoders or len(set(server.replica_range)) > 1:
        raise ApiError(
            400, "an engine with encoder workers or autoscaling cannot sleep; stop the server instead"
        )
    await service.engine.sleep()
    return {"is_sleeping": True}


async def _wake_up(service: Service, request: Request) -> dict[str, Any]:
    await service.engine.wake_up()
    return {"is_sleeping": False}


async def _is_sleeping(service: Service, request: Request) -> dict[str, Any]:
    return {"is_sleeping": service.engine.status().state == "sleeping"}


async def _start_profile(service: Service, request: Request) -> dict[str, Any]:
    await service.engine.control("start_profile", request.query_params.get("prefix"))
    return {"profiling": True}


async def _stop_profile(service: Service, request: Request) -> dict[str, Any]:
    return {"profiling": False, "file": await service.engine.control("stop_profile")}
