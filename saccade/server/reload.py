"""Reads the files of tenants and the certificate again, on SIGHUP. A file with a mistake changes nothing."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from saccade.errors import ConfigError
from saccade.options.server import ServerOptions
from saccade.server.http.auth import Tenants
from saccade.server.http.tls import Certificate
from saccade.util.fair_pool import FairPool

logger = logging.getLogger("saccade.server")

_SECONDS = 10.0  # that a disk may take for a file

Result = TypeVar("Result")


class Reloader:
    """One reload at a time: the latest file wins. Its thread delays no exit, whatever the disk does."""

    def __init__(self, server: ServerOptions, tenants: Tenants, tls: ssl.SSLContext | None) -> None:
        self._server = server
        self._tenants = tenants
        self._tls = tls
        self._lock = asyncio.Lock()
        self._reloads: set[asyncio.Task[None]] = set()
        self._pool = FairPool(1, "saccade-reload")

    def begin(self) -> None:
        task = asyncio.create_task(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    def close(self) -> None:
        for task in self._reloads:
            task.cancel()
        self._pool.close()

    async def _reload(self) -> None:
        async with self._lock:
            if self._server.api_keys is not None:
                await self._reload_tenants()
            if self._tls is not None:
                await self._reload_certificate(self._tls)

    async def _reload_tenants(self) -> None:
        try:
            self._tenants.apply(await self._read(self._tenants.read))
        except ConfigError as error:
            logger.error("all tenants stay as they were: %s", error)
        else:
            logger.info("%s was read again: %d tenants", self._server.api_keys, len(self._tenants))

    async def _reload_certificate(self, tls: ssl.SSLContext) -> None:
        try:
            (await self._read(partial(Certificate, self._server))).load_into(tls)
        except ConfigError as error:
            logger.error("the certificate stays as it was: %s", error)
        else:
            logger.info("%s was read again", self._server.ssl_certfile)

    async def _read(self, read: Callable[[], Result]) -> Result:
        reading = asyncio.wrap_future(self._pool.submit("", read))
        try:
            return await asyncio.wait_for(reading, _SECONDS)
        except TimeoutError:
            reason = f"its file was not read within {_SECONDS:g} s"
            raise ConfigError(f"{reason}; see to its disk and send SIGHUP again") from None
