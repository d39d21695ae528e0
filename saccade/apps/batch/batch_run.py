"""Runs a batch file: a bounded number of requests at a time, each result written as it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpcore
import msgspec

from saccade.apps.batch.batch_file import BatchResult, finished
from saccade.apps.batch.batch_lines import BatchLines, BatchRequest
from saccade.errors import ConfigError, reason_of

BUSY = (429, 503)
_MAX_TRIES = 200
_MAX_WAIT_SECONDS = 30.0
_MAX_DOUBLINGS = 9  # until the longest wait

Send = Callable[[BatchRequest], Awaitable[BatchResult]]


class BatchCounts(NamedTuple):
    total: int  # lines of the input
    resumed: int  # had a result already
    failed: int  # of this run


async def run_batch(
    lines: BatchLines,
    results: Path,
    send: Send,
    concurrency: int,
    on_start: Callable[[int, int], None] = lambda total, resumed: None,
    on_result: Callable[[BatchResult], None] = lambda result: None,
) -> BatchCounts:
    """Sends what has no result yet. An error of one line does not stop the others.

    A server that is gone raises ConfigError; what was written stays, and another run goes on from there.
    """
    result_lines = finished(results, partial(_check, lines, results))
    on_start(len(lines), len(result_lines))
    failed = 0
    requests = lines.requests(result_lines)
    with results.open("ab") as out:

        def write(result: BatchResult) -> None:
            nonlocal failed
            failed += result.is_error
            out.write(result.line())
            out.flush()
            on_result(result)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(max(1, min(concurrency, len(lines) - len(result_lines)))):
                    group.create_task(_worker(requests, send, write))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return BatchCounts(len(lines), len(result_lines), failed)


async def _worker(requests: Iterator[BatchRequest], send: Send, write: Callable[[BatchResult], None]) -> None:
    for request in requests:  # shared by all workers, which run in one thread
        if request.problem:
            write(BatchResult(request, 0, "", b""))
        else:
            write(await send(request))


def _check(lines: BatchLines, results: Path, line: int, custom_id: str | None) -> None:
    """ConfigError if a result is that of another file."""
    try:
        expected = lines.custom_id(line)
    except ConfigError as error:
        raise ConfigError(f"{results.name} belongs to another input: {error}") from None
    if custom_id != expected:
        both = f"{custom_id!r} there and {expected!r} in the input"
        raise ConfigError(f"{results.name} belongs to another input: line {line} is {both}")


class HttpSender:
    """Sends requests to a running server. Where it is busy they wait for their turn."""

    def __init__(self, url: str, api_key: str | None, concurrency: int, timeout: float) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._pool = httpcore.AsyncConnectionPool(max_connections=concurrency)
        self._headers = [("content-type", "application/json")]
        if api_key:
            self._headers.append(("authorization", f"Bearer {api_key}"))
        self._timeout = {"connect": 10.0, "read": timeout, "write": timeout, "pool": timeout}

    async def __call__(self, request: BatchRequest) -> BatchResult:
        for attempt in range(_MAX_TRIES):
            response = await self._post(request.url, request.body)
            headers = {name.lower(): value for name, value in response.headers}
            if response.status not in BUSY or attempt == _MAX_TRIES - 1:
                break
            await asyncio.sleep(retry_seconds(headers.get(b"retry-after", b""), attempt))
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        return BatchResult(request, response.status, request_id, in_one_line(response.content))

    async def close(self) -> None:
        await self._pool.aclose()

    async def _post(self, path: str, body: bytes) -> httpcore.Response:
        timeout = {"timeout": self._timeout}
        try:
            return await self._pool.request(
                "POST", f"{self._url}{path}", headers=self._headers, content=body, extensions=timeout
            )
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            again = "run the same command again to go on"
            raise ConfigError(f"no answer from {self._url}: {reason_of(error)}; {again}") from None


def retry_seconds(retry_after: bytes, attempt: int) -> float:
    """What the server asks for, or ever longer."""
    if retry_after.isdigit():
        return min(float(retry_after), _MAX_WAIT_SECONDS)
    return min(0.1 * (1 << min(attempt, _MAX_DOUBLINGS)), _MAX_WAIT_SECONDS)


def in_one_line(content: bytes) -> bytes:
    """An answer as JSON, whatever a proxy has made of it."""
    try:
        msgspec.json.decode(content, type=msgspec.Raw)
        return msgspec.json.format(content, indent=-1) if b"\n" in content else content
    except (ValueError, RecursionError):
        return json.dumps(content[:1000].decode("utf-8", "replace")).encode()
