"""Admission: limits on open requests, bytes in flight, pixels that wait, body size and body rate.

Knows neither the fields of a request nor images.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from saccade.errors import quoted
from saccade.options.server import ServerOptions
from saccade.server.accounts import Account
from saccade.server.errors import ApiError, overloaded
from saccade.server.http.text_limit import TextTally

_JSON = re.compile(r"application/json|.*\+json")
_RETRY_AFTER_TIMEOUT = 1.0
_RETRY_AFTER_DRAIN = 10.0
_NEARLY_FULL = 15 / 16  # of the bytes in flight: a request with an image would hardly fit


class ByteLease:
    """What one request takes of the gate's and the tenant's limits: bytes, and open outputs, n per prompt."""

    def __init__(self, gate: AdmissionGate, client: str, account: Account) -> None:
        self.gate = gate
        self._client = client
        self._account = account
        self._account.num_leases += 1
        self._server_bytes = 0  # not yet handed to the engine
        self._client_bytes = 0  # counted for the client until the request ends
        self._num_outputs = 0
        self._pixels = 0

    def add(self, count: int) -> None:
        """ApiError 429 if the client's requests would hold too many bytes, 503 if all requests would."""
        gate = self.gate
        of_client = gate.bytes_by_client[self._client]
        if of_client + count > gate.max_client_bytes:
            gate.on_refusal("client_share")
            state = f"your open requests hold {of_client} bytes and those of one client may hold"
            limit = f"{gate.max_client_bytes} (--max-client-share of --max-inflight-mb)"
            raise overloaded(429, f"{state} {limit}; try again when some have ended")
        total = gate.total_bytes()
        if total + count > gate.max_bytes:
            gate.on_refusal("bytes")
            state = f"requests of {total} bytes are in flight"
            limit = f"at most {gate.max_bytes} may be (--max-inflight-mb)"
            raise overloaded(503, f"{state} and {limit}; try again soon")
        gate.bytes_held += count
        gate.bytes_by_client[self._client] += count
        self._server_bytes += count
        self._client_bytes += count

    def enter(self, answers: int = 1) -> None:
        """Hold so many outputs. ApiError 429 if they are not free now, 400 if they never can be."""
        gate = self.gate
        if answers > gate.max_open:
            request = f"the request asks for {answers} answers, n for each of its prompts"
            limit = f"at most {gate.max_open} may be open at once (--max-num-seqs plus --max-waiting)"
            raise ApiError(400, f"{request}, but {limit}; lower n or send fewer prompts", param="n")
        more = answers - self._num_outputs
        if more > 0:
            weight = self._account.settings.weight
            gate.check(self._client, weight, more)
            self._account.enter(answers, more)
            gate.num_open += more
            gate.open_by_client[self._client] += more
            gate.weights[self._client] = weight
            self._num_outputs = answers

    def hold_pixels(self, pixels: int) -> None:
        """Counts images that shall be encoded. ApiError 429 if too many of the client's wait already."""
        gate = self.gate
        ahead = gate.pixels_by_client[self._client]
        if pixels and ahead and ahead + pixels > gate.max_client_pixels:  # one request always fits
            gate.on_refusal("client_pixels")
            state = f"your open requests wait for {ahead / 1e6:.1f} megapixels of pictures to be encoded"
            limit = f"{gate.max_client_pixels / 1e6:g} may wait (--max-waiting-megapixels)"
            request = f"this one brings {pixels / 1e6:.1f}"
            raise overloaded(429, f"{state}, {request} and {limit}; try again when some are answered")
        gate.pixels_by_client[self._client] += pixels
        self._pixels += pixels

    def release_pixels(self) -> None:
        """They are encoded, or nothing needs them any more. May be called again."""
        pixels = self.gate.pixels_by_client
        pixels[self._client] -= self._pixels
        self._pixels = 0
        if not pixels[self._client]:
            del pixels[self._client]

    def release(self) -> None:
        """The engine counts the bytes from now on. They still count for the client."""
        self.gate.bytes_held -= self._server_bytes
        self._server_bytes = 0

    def close(self) -> None:
        self._account.num_leases -= 1
        self.release()
        self.release_pixels()
        gate = self.gate
        gate.num_open -= self._num_outputs
        self._account.leave(self._num_outputs)
        gate.open_by_client[self._client] -= self._num_outputs
        if not gate.open_by_client[self._client]:
            del gate.open_by_client[self._client]
            gate.weights.pop(self._client, None)
        gate.bytes_by_client[self._client] -= self._client_bytes
        if not gate.bytes_by_client[self._client]:
            del gate.bytes_by_client[self._client]


class HttpBody:
    """A body that can be taken once: a response that streams for minutes must not keep its images alive."""

    def __init__(self, data: bytes | bytearray, tally: TextTally) -> None:
        self._data = data
        self.tally = tally

    def take(self) -> bytes | bytearray:
        data = self._data
        self._data = b""
        return data


@dataclass(slots=True)
class AdmissionGate:
    """Admits requests while the limits allow it.

    `max_open` limits outputs that run or wait; a request counts as one until its n is known. Where all are
    taken, a client still gets its share of them, so that no other locks it out: at most twice `max_open`.
    `max_bytes` limits the bytes of all requests, here and in the engine, `max_client_bytes` those of one.
    `max_client_pixels` limits the source pixels of a client's requests that have no first token yet.
    """

    max_open: int
    max_bytes: int
    max_client_bytes: int
    engine_bytes: Callable[[], int]
    on_refusal: Callable[[str], None]
    max_client_pixels: float = math.inf
    bytes_held: int = 0  # in the server
    bytes_by_client: Counter[str] = field(default_factory=Counter)  # in the server and the engine
    pixels_by_client: Counter[str] = field(default_factory=Counter)
    num_open: int = 0
    open_by_client: Counter[str] = field(default_factory=Counter)  # outputs
    weights: dict[str, float] = field(default_factory=dict)  # of clients with open outputs
    is_draining: bool = False

    def total_bytes(self) -> int:
        return self.bytes_held + self.engine_bytes()

    @property
    def is_full(self) -> bool:
        return self.num_open >= self.max_open or self.total_bytes() > self.max_bytes * _NEARLY_FULL

    def check(self, client: str, weight: float, answers: int = 1) -> None:
        """ApiError if so many more outputs cannot be admitted now. Before a body is read, one is assumed."""
        if self.is_draining:
            self.on_refusal("draining")
            message = "the server is shutting down and takes no new requests; send it to another one"
            raise ApiError(503, message, code="draining", retry_after=_RETRY_AFTER_DRAIN)
        total = self.num_open + answers
        if total <= self.max_open:
            return
        client_open = self.open_by_client[client]
        is_crowded = total > 2 * self.max_open  # shares of clients that came one by one add up to more
        if is_crowded or client_open + answers > self._share(client, weight):
            self.on_refusal("overloaded")
            shared = f" ({client_open} of them yours)" if client_open < self.num_open else ""
            state = f"{self.num_open} answers are open{shared}, the request asks for {answers} more"
            limit = f"{self.max_open} may be open (--max-num-seqs plus --max-waiting)"
            raise overloaded(429, f"{state} and {limit}; try again soon")

    def _share(self, client: str, weight: float) -> float:
        """Open outputs that are a client's own, however many others have."""
        other_weights = sum(other for name, other in self.weights.items() if name != client)
        return self.max_open * weight / (weight + other_weights)

    def check_idle(self) -> None:
        """The conservation law: without open requests, nothing is counted."""
        counts = (self.open_by_client, self.bytes_by_client, self.pixels_by_client, self.weights)
        assert not any((*counts, self.num_open, self.bytes_held)), counts

    @contextmanager
    def lease(self, client: str, account: Account) -> Iterator[ByteLease]:
        lease = ByteLease(self, client, account)
        try:
            yield lease
        finally:
            lease.close()


async def read_body(request: Request, options: ServerOptions, lease: ByteLease, tally: TextTally) -> HttpBody:
    """The whole body."""
    _check_type(request)
    body = bytearray()  # not a list of chunks: a chunk of one byte would cost forty

    async def keep(chunk: bytes) -> None:
        lease.add(len(chunk))
        tally.take(chunk)
        body.extend(chunk)

    await receive_body(request, options, lease.gate, keep, "send smaller pictures or fewer")
    return HttpBody(body, tally)  # no copy: of 60 MB it would stop the loop for 30 ms


async def receive_body(
    request: Request,
    options: ServerOptions,
    gate: AdmissionGate,
    take: Callable[[bytes], Awaitable[None]],
    advice: str,
) -> None:
    """Gives the body to `take`, counted while it arrives, so that a wrong Content-Length gains nothing.

    In each `body_timeout` a quota of bytes must arrive. The deadline moves when the quota is reached, so a
    client that sends fast and then stops is refused as soon as a slow one. `advice`: where it is too large.
    """
    limit = options.max_body_mb << 20
    timeout = options.body_timeout
    _check_length(int(request.headers.get("content-length") or 0), limit, advice)
    quota = max(1, int(options.min_body_rate * 1024 * timeout))
    length = 0
    counted = 0  # bytes before the current deadline's quota
    try:
        async with asyncio.timeout(timeout) as deadline:
            async for chunk in request.stream():
                length += len(chunk)
                _check_length(length, limit, advice)
                await take(chunk)
                if length - counted >= quota:
                    counted = length
                    deadline.reschedule(asyncio.get_running_loop().time() + timeout)
    except TimeoutError:
        gate.on_refusal("slow_body")
        came = f"{length - counted} bytes of the body came in {timeout:g} s"
        expected = f"at least {quota}, or its end, must (--body-timeout, --min-body-rate)"
        message = f"{came} and {expected}; send it faster"
        raise ApiError(408, message, code="request_timeout", retry_after=_RETRY_AFTER_TIMEOUT) from None


def _check_type(request: Request) -> None:
    """Against cross-site requests: a browser sends other content types without a preflight."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not _JSON.fullmatch(kind):
        problem = f"this one is {quoted(kind)}" if kind else "this one says nothing"
        message = f"the body must be JSON, but {problem}; send the header Content-Type: application/json"
        raise ApiError(415, message, code="unsupported_media_type")


def _check_length(length: int, limit: int, advice: str) -> None:
    if length > limit:
        sizes = f"the body has {length} bytes or more, and at most {limit} are allowed (--max-body-mb)"
        raise ApiError(413, f"{sizes}; {advice}", code="request_too_large")
