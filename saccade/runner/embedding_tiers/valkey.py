"""Embeddings in a Valkey or Redis server, which bounds its memory itself. Entries expire when not used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from saccade.errors import ConfigError
from saccade.runner.embedding_tiers.entry import Buffer
from saccade.runner.embedding_tiers.store import BadEntry, StoreError

_PREFIX = "saccade:embedding:"
_SCHEMES = {"valkey": "redis", "valkeys": "rediss"}  # as Valkey writes them -> as the client reads them


class ValkeyStore:
    label = "valkey"
    seconds = 1.0  # to connect, and for each piece of a response
    evictions = 0  # the server's own business
    used_bytes = 0

    def __init__(self, url: str, max_age: float) -> None:
        parts = urlsplit(url)
        self.where = f"{parts.scheme}://{parts.hostname or parts.path}"
        scheme = _SCHEMES.get(parts.scheme, parts.scheme)
        self._max_age = max(1, int(max_age))
        try:
            self._client: Any = redis.Redis.from_url(
                f"{scheme}{url[len(parts.scheme) :]}",
                socket_timeout=self.seconds,
                socket_connect_timeout=self.seconds,
                retry=Retry(NoBackoff(), 0),  # a lookup that fails is not worth a second one
                decode_responses=False,
            )
        except (ValueError, TypeError):  # their text may hold the password
            message = f"embedding_store {self.where} has an option or a part that the client cannot read"
            raise ConfigError(f"{message}; write valkey://[user:password@]host[:port][/db]") from None

    def read(self, name: str, header: bytearray, buffers: Sequence[Buffer]) -> bool:
        size = len(header) + sum(buffer.nbytes for buffer in buffers)
        with self._failing():
            pipe = self._client.pipeline(transaction=False)
            pipe.getrange(_PREFIX + name, 0, size)  # a byte more than it should have, and never much more
            pipe.expire(_PREFIX + name, self._max_age)
            reply, _ = pipe.execute(raise_on_error=False)
        if isinstance(reply, redis.ResponseError) and str(reply).startswith("WRONGTYPE"):
            raise BadEntry
        if isinstance(reply, Exception):
            raise StoreError(f"{self.where} failed: {type(reply).__name__}")
        if len(reply or b"") not in (0, size):
            raise BadEntry
        if reply:
            _spread(memoryview(reply), (memoryview(header), *buffers))
        return bool(reply)

    def write(self, name: str, header: bytes, buffers: Sequence[Buffer]) -> None:
        data = b"".join([header, *buffers])
        with self._failing():
            self._client.set(_PREFIX + name, data, ex=self._max_age)

    def remove(self, name: str) -> None:
        with self._failing():
            self._client.unlink(_PREFIX + name)

    def tidy(self) -> None:
        pass

    def make_cold(self, name: str) -> None:
        pass

    def close(self) -> None:
        self._client.close()

    def advice(self) -> str | None:
        """What the operator should know: a server without a limit of memory is bounded by age alone."""
        with self._failing():
            about = self._client.info("memory")
        if not about.get("maxmemory"):
            return f"{self.where} has no maxmemory, so entries leave it by age alone"
        if about.get("maxmemory_policy") == "noeviction":
            return f"{self.where} has maxmemory-policy noeviction: when full, it keeps no new embeddings"
        return None

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (
            redis.RedisError,
            OSError,
        ) as error:  # only the kind: the text may name more than an operator wants
            raise StoreError(f"{self.where} failed: {type(error).__name__}") from None


def _spread(data: memoryview, targets: Sequence[Buffer]) -> None:
    start = 0
    for target in targets:
        target[:] = data[start : start + len(target)]
        start += len(target)
