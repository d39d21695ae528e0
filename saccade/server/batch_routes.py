"""The routes of files and batches. Those of the server's own requests are in `app.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope

from saccade.server.api import batches as api
from saccade.server.endpoint import EndpointBase
from saccade.server.http.response import ResponseWriter
from saccade.server.service import Service

_Handler = Callable[[Service, Request], Awaitable[Response]]


class UploadEndpoint(EndpointBase):
    """Admits an upload. Its body goes to the disk, so it takes nothing of the bytes in flight."""

    async def _run(self, scope: Scope, receive: Receive, writer: ResponseWriter) -> None:
        api.jobs_of(self._service)
        with self._admission(scope["caller"]) as lease:
            lease.enter()
            await writer.json(await api.create_file(self._service, Request(scope, receive)))


def batch_routes(service: Service) -> list[Route]:
    """All but POST /v1/batches, which has a JSON body like other routes."""
    plain: list[tuple[str, str, _Handler]] = [
        ("GET", "/v1/files", api.list_files),
        ("GET", "/v1/files/{id}", api.get_file),
        ("DELETE", "/v1/files/{id}", api.delete_file),
        ("GET", "/v1/files/{id}/content", api.file_content),
        ("GET", "/v1/batches", api.list_batches),
        ("GET", "/v1/batches/{id}", api.get_batch),
        ("POST", "/v1/batches/{id}/cancel", api.cancel_batch),
    ]
    routes = [Route(path, partial(handler, service), methods=[method]) for method, path, handler in plain]
    return [Route("/v1/files", UploadEndpoint(service), methods=["POST"], name="/v1/files"), *routes]
