"""What is refused before any work is done on it: too many requests, too many bytes or too slow ones, what is no JSON.

Counts and sizes only; knows neither the fields of a request nor pictures.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request

from saccade.errors import quoted
from saccade.options import ServerOptions
from saccade.server.errors import ApiError
from saccade.server.http.text_tally import TextTally

MAX_DEPTH = 128
"""Levels of nesting in a body: far more than any schema, far less than the interpreter's stack."""

_RETRY_AFTER_FULL = 1.0
_RETRY_AFTER_DRAIN = 10.0
_AS_GOOD_AS_FULL = 15 / 16  # of the bytes in flight: a request with a picture would hardly fit


class ByteLease:
    """What one request holds on to in the name of its client: bytes, and a place for each of its answers."""

    def __init__(self, gate: AdmissionGate, client: str) -> None:
        self.gate = gate
        self._client = client
        self._here = 0
        self._count = 0  # with what the engine has of it, until the request ends
        self._places = 0

    def add(self, count: int) -> None:
        """ApiError 429 when the client's requests, 503 when all requests together would hold too much."""
        gate = self.gate
        of_client = gate.bytes_of[self._client]
        if of_client + count > gate.max_client_bytes:
            gate.on_refusal("client_share")
            raise ApiError(
                429,
                f"your open requests hold {of_client} bytes and those of one client may hold {gate.max_client_bytes} "
                "(--max-client-share of --max-inflight-mb); try again when some have ended",
                code="overloaded",
                retry_after=_RETRY_AFTER_FULL,
            )
        others = gate.total_bytes()
        if others + count > gate.max_bytes:
            gate.on_refusal("bytes")
            raise ApiError(
                503,
                f"requests of {others} bytes are in flight and at most {gate.max_bytes} may be (--max-inflight-mb); "
                "try again soon",
                code="overloaded",
                retry_after=_RETRY_AFTER_FULL,
            )
        gate.bytes_held += count
        gate.bytes_of[self._client] += count
        self._here += count
        self._count += count

    def enter(self, answers: int = 1) -> None:
        """Take places until there is one for each answer. ApiError 429 when so many are not free, 400 when never."""
        gate, more = self.gate, answers - self._places
        if answers > gate.max_open:
            raise ApiError(
                400,
                f"the request asks for {answers} answers, n for each of its prompts, but at most {gate.max_open} may "
                "be open at once (--max-num-seqs plus --max-waiting); lower n or send fewer prompts",
                param="n",
            )
        if more > 0:
            gate.check(more)
            gate.num_open += more
            self._places = answers

    def release(self) -> None:
        """The engine has the bytes now and counts them itself. The client's share counts them, and answers are open."""
        self.gate.bytes_held -= self._here
        self._here = 0

    def leave(self) -> None:
        self.release()
        self.gate.num_open -= self._places
        self._places = 0
        bytes_of = self.gate.bytes_of
        bytes_of[self._client] -= self._count
        self._count = 0
        if not bytes_of[self._client]:
            del bytes_of[self._client]


class Upload:
    """A body, until somebody takes it: an answer that streams for minutes must not keep its pictures alive."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def take(self) -> bytes:
        data, self._data = self._data, b""
        return data


class AdmissionGate:
    """Lets requests in. `max_open` counts answers that are computed or wait, and requests as one before it is known how
    many they want; `max_bytes` what they hold, here and (`engine_bytes`) in the engine; `max_client_bytes` what one
    client's requests hold."""

    def __init__(
        self,
        max_open: int,
        max_bytes: int,
        max_client_bytes: int,
        engine_bytes: Callable[[], int],
        on_refusal: Callable[[str], None],
    ) -> None:
        self.max_open = max_open
        self.max_bytes = max_bytes
        self.max_client_bytes = max_client_bytes
        self.engine_bytes = engine_bytes
        self.bytes_held = 0
        self.bytes_of: Counter[str] = Counter()  # by client, here and in the engine
        self.num_open = 0
        self.is_draining = False
        self.on_refusal = on_refusal

    def total_bytes(self) -> int:
        return self.bytes_held + self.engine_bytes()

    @property
    def is_full(self) -> bool:
        return self.num_open >= self.max_open or self.total_bytes() > self.max_bytes * _AS_GOOD_AS_FULL

    def check(self, answers: int = 1) -> None:
        """ApiError when so many more answers would be refused now. Before a body is read it is one at least."""
        if self.is_draining:
            self.on_refusal("draining")
            raise ApiError(
                503,
                "the server is shutting down and takes no new requests; send it to another one",
                code="draining",
                retry_after=_RETRY_AFTER_DRAIN,
            )
        if self.num_open + answers > self.max_open:
            self.on_refusal("overloaded")
            raise ApiError(
                429,
                f"{self.num_open} answers are open, the request asks for {answers} more and {self.max_open} may be "
                "open (--max-num-seqs plus --max-waiting); try again soon",
                code="overloaded",
                retry_after=_RETRY_AFTER_FULL,
            )

    @contextmanager
    def holding(self, client: str) -> Iterator[ByteLease]:
        lease = ByteLease(self, client)
        try:
            yield lease
        finally:
            lease.leave()


async def read_body(request: Request, options: ServerOptions, lease: ByteLease, text_tally: TextTally) -> Upload:
    """The whole body, counted while it arrives: a header that lies about the length gains nothing.

    Bytes for `body_timeout` at the least rate must come before the deadline, which then moves on by as much: a client
    that sends fast and stops is found out as soon as one that is slow.
    """
    _check_type(request)
    limit, timeout = options.max_body_mb << 20, options.body_timeout
    _check_length(int(request.headers.get("content-length") or 0), limit)
    quota = max(1, int(options.min_body_rate * 1024 * timeout))
    body = bytearray()  # and no list of chunks: bytes that come one by one would cost forty each
    seen = 0
    try:
        async with asyncio.timeout(timeout) as deadline:
            async for chunk in request.stream():
                _check_length(len(body) + len(chunk), limit)
                lease.add(len(chunk))
                text_tally.take(chunk)
                body += chunk
                if len(body) - seen >= quota:
                    seen = len(body)
                    deadline.reschedule(asyncio.get_running_loop().time() + timeout)
    except TimeoutError:
        lease.gate.on_refusal("slow_body")
        raise ApiError(
            408,
            f"{len(body) - seen} bytes of the body came in {timeout:g} s and at least {quota}, or its end, must "
            "(--body-timeout, --min-body-rate); send it faster",
            code="request_timeout",
            retry_after=_RETRY_AFTER_FULL,
        ) from None
    return Upload(bytes(body))


def _check_type(request: Request) -> None:
    """Needed also because a browser sends any other type, or none, for any page without asking first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        given = f"this one is {quoted(kind)}" if kind else "this one says nothing"
        raise ApiError(
            415,
            f"the body must be JSON, but {given}; send the header Content-Type: application/json",
            code="unsupported_media_type",
        )


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise ApiError(
            413,
            f"the body has {length} bytes or more, and at most {limit} are allowed (--max-body-mb); send smaller "
            "pictures or fewer",
            code="request_too_large",
        )


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Of a key written twice the last one counts, as in every JSON library."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise ApiError(400, "the body is not valid JSON in UTF-8", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_name(value)}", code="invalid_json")
    if not _is_shallow(value, MAX_DEPTH):
        raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep", code="invalid_json")
    return value


def _name(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _is_shallow(value: Any, depth: int) -> bool:
    """Level by level, so that depth costs no stack."""
    level = [value]
    while level and depth:
        level = [inner for outer in level for inner in _inner(outer)]
        depth -= 1
    return not level


def _inner(value: Any) -> list[Any]:
    """What is nested in a value and may itself hold something."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in values if isinstance(inner, (dict, list))]
