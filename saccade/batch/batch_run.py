"""Runs a batch file: a bounded number of requests at a time, each result written as it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import httpcore

from saccade.batch.batch_file import BatchRequest, BatchResult, finished, read_requests
from saccade.errors import ConfigError

BUSY = (429, 503)
_MAX_TRIES = 200
_MAX_WAIT_SECONDS = 30.0

Send = Callable[[BatchRequest], Awaitable[BatchResult]]


class BatchCounts(NamedTuple):
    total: int  # lines of the input
    resumed: int  # had a result already
    failed: int  # of this run


async def run_batch(
    source: Path,
    results: Path,
    send: Send,
    concurrency: int,
    on_start: Callable[[int, int], None] = lambda total, resumed: None,
    on_result: Callable[[BatchResult], None] = lambda result: None,
) -> BatchCounts:
    """Sends what has no result yet. An error of one line does not stop the others.

    A server that is gone raises ConfigError; what was written stays, and another run goes on from there.
    """
    done = finished(results)
    total = _check(source, done, results)
    on_start(total, len(done))
    failed = 0
    waiting = (request for request in read_requests(source) if request.line not in done)
    with results.open("ab") as out:

        def write(result: BatchResult) -> None:
            nonlocal failed
            failed += result.is_error
            _append(out, result)
            on_result(result)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(max(1, min(concurrency, total - len(done)))):
                    group.create_task(_worker(waiting, send, write))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return BatchCounts(total, len(done), failed)


async def _worker(waiting: Iterator[BatchRequest], send: Send, write: Callable[[BatchResult], None]) -> None:
    for request in waiting:  # shared by all workers, which run in one thread
        write(BatchResult(request, 0, "", None) if request.problem else await send(request))


def _append(out: BinaryIO, result: BatchResult) -> None:
    out.write(result.line())
    out.flush()


def _check(source: Path, done: Mapping[int, str | None], results: Path) -> int:
    """The number of requests. ConfigError if the results are those of another file."""
    total = 0
    left = set(done)
    for request in read_requests(source):
        total += 1
        left.discard(request.line)
        if request.line in done and done[request.line] != request.custom_id:
            both = f"{done[request.line]!r} there and {request.custom_id!r} in {source}"
            raise ConfigError(f"{results} belongs to another input: line {request.line} is {both}")
    if left:
        raise ConfigError(f"{results} belongs to another input: {source} has no line {min(left)}")
    return total


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
        body = json.dumps(request.body).encode()
        for tried in range(_MAX_TRIES):
            response = await self._post(request.url, body)
            headers = {name.lower(): value for name, value in response.headers}
            if response.status not in BUSY or tried == _MAX_TRIES - 1:
                break
            await asyncio.sleep(retry_seconds(headers.get(b"retry-after"), tried))
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        return BatchResult(request, response.status, request_id, parsed(response.content))

    async def close(self) -> None:
        await self._pool.aclose()

    async def _post(self, path: str, body: bytes) -> httpcore.Response:
        timeout = {"timeout": self._timeout}
        try:
            return await self._pool.request(
                "POST", f"{self._url}{path}", headers=self._headers, content=body, extensions=timeout
            )
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            reason = str(error) or type(error).__name__
            again = "run the same command again to go on"
            raise ConfigError(f"no answer from {self._url}: {reason}; {again}") from None


def retry_seconds(retry_after: bytes | None, tried: int) -> float:
    """What the server asks for, or ever longer."""
    asked = float(retry_after) if retry_after is not None and retry_after.isdigit() else 0.1 * 2**tried
    return min(asked, _MAX_WAIT_SECONDS)


def parsed(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return content[:1000].decode("utf-8", "replace")
