"""Admission around a route with a body, and the report of its errors."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from saccade.errors import RequestError
from saccade.server.accounts import LimitExceeded
from saccade.server.errors import ClientGone, api_error
from saccade.server.http.limits import ByteLease, read_body
from saccade.server.http.request_context import Caller, Exchange
from saccade.server.http.response import ResponseWriter, while_connected
from saccade.server.http.text_limit import TextTally
from saccade.server.service import Service

logger = logging.getLogger("saccade.server")

Handler = Callable[[Service, Exchange], Awaitable[None]]

_IMAGE_CODES = ("invalid_image", "image_", "empty_image", "unsupported_image", "invalid_base64", "failed_to")


class EndpointBase(ABC):
    """Runs a request and reports its errors, in one task."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = ResponseWriter(scope, receive, send)
        try:
            await self._run(scope, receive, writer)
        except (ClientGone, ClientDisconnect):
            self._service.metrics.failed("client_left")
        except Exception as error:
            await self._fail(writer, error, scope["caller"])

    @contextmanager
    def _admission(self, caller: Caller) -> Iterator[ByteLease]:
        """Counts a new request. ApiError or EngineUnavailable if it is refused without reading its body."""
        service = self._service
        account = caller.account
        service.gate.check(caller.client, account.settings.weight)
        service.check_started()
        account.check_open()
        account.check_processor()
        account.take(requests=1)
        service.metrics.tenants.arrived(account.settings.label)
        with service.gate.lease(caller.client, account) as lease:
            yield lease

    @abstractmethod
    async def _run(self, scope: Scope, receive: Receive, writer: ResponseWriter) -> None: ...

    async def _fail(self, writer: ResponseWriter, error: Exception, caller: Caller) -> None:
        response = api_error(error)
        code = response.code or "invalid_request"
        caller.record.fail(code)
        if response.code == "internal_error":
            logger.exception("%s failed", caller.request_id)
        metrics = self._service.metrics
        metrics.failed(code)
        if isinstance(error, LimitExceeded):
            metrics.refused("tenant_limit")
            metrics.tenants.refused(caller.account.settings.label, error.limit)
        if isinstance(error, RequestError) and code.startswith(_IMAGE_CODES):
            metrics.media_refused(code)
        await writer.error(response)


class JsonEndpoint(EndpointBase):
    """Admits a request with a JSON body for its handler."""

    def __init__(self, service: Service, handler: Handler, inputs: Sequence[str] = ()) -> None:
        """`inputs`: fields with token ids or several prompts."""
        super().__init__(service)
        self._handler = handler
        self._inputs = inputs

    async def _run(self, scope: Scope, receive: Receive, writer: ResponseWriter) -> None:
        service = self._service
        caller = scope["caller"]
        with self._admission(caller) as lease:
            tally = TextTally(service.max_chars, self._inputs)
            body = await read_body(Request(scope, receive), service.server, lease, tally)
            lease.enter()
            async with while_connected(receive):
                await self._handler(service, Exchange(caller, body, lease, writer))
