"""What is refused before any work is done on it: too many requests, too many bytes, bodies that are no JSON object.

Counts and sizes only; knows neither the fields of a request nor pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request

from saccade.server.errors import ApiError
from saccade.server.tally import Tally
from saccade.types import quoted

MAX_DEPTH = 128
"""Levels of nesting in a body: far more than any schema, far less than the interpreter's stack."""

_RETRY_AFTER_FULL = 1.0
_RETRY_AFTER_DRAIN = 10.0


class Held:
    """What one request holds on to: bytes, and a place for each of its answers."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._count = 0
        self._places = 0

    def add(self, count: int) -> None:
        """ApiError 503 when all requests together would hold too much."""
        gate = self._gate
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
        self._count += count

    def enter(self, answers: int = 1) -> None:
        """Take places until there is one for each answer. ApiError 429 when so many are not free, 400 when never."""
        gate, more = self._gate, answers - self._places
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
        """The bytes only: the answers are still open."""
        self._gate.bytes_held -= self._count
        self._count = 0

    def leave(self) -> None:
        self.release()
        self._gate.num_open -= self._places
        self._places = 0


class Upload:
    """A body, until somebody takes it: an answer that streams for minutes must not keep its pictures alive."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def take(self) -> bytes:
        data, self._data = self._data, b""
        return data


class Gate:
    """Lets requests in. `max_open` counts answers that are computed or wait, and requests as one before it is known how
    many they want; `max_bytes` what they hold, here and (`engine_bytes`) in the engine."""

    def __init__(
        self, max_open: int, max_bytes: int, engine_bytes: Callable[[], int], on_refusal: Callable[[str], None]
    ) -> None:
        self.max_open = max_open
        self.max_bytes = max_bytes
        self.engine_bytes = engine_bytes
        self.bytes_held = 0
        self.num_open = 0
        self.is_draining = False
        self.on_refusal = on_refusal

    def total_bytes(self) -> int:
        return self.bytes_held + self.engine_bytes()

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
    def holding(self) -> Iterator[Held]:
        held = Held(self)
        try:
            yield held
        finally:
            held.leave()


async def read_body(request: Request, limit: int, held: Held, tally: Tally) -> Upload:
    """The whole body, counted while it arrives: a header that lies about the length gains nothing."""
    _check_type(request)
    _check_length(int(request.headers.get("content-length") or 0), limit)
    chunks, length = [], 0
    async for chunk in request.stream():
        length += len(chunk)
        _check_length(length, limit)
        held.add(len(chunk))
        tally.take(chunk)
        chunks.append(chunk)
    return Upload(b"".join(chunks))


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
