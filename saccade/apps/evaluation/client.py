"""A client of any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, NoReturn

import httpcore

from saccade.errors import ConfigError, member, reason_of

_CHAT = "/v1/chat/completions"
_MODELS = "/v1/models"
_JSON = "application/json"
_TIMEOUT = {"timeout": {"connect": 10.0, "pool": None, "read": 600.0, "write": 60.0}}
_BUSY = frozenset({429, 503})  # retried
_BROKEN = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, OSError)
_PATIENCE = 8  # attempts
_LONGEST_WAIT = 10.0  # seconds before each
_MAX_BREAKS = 3  # of the connection, for one question


class QuestionRefused(Exception):
    """The server refused this request; the message is its own."""


class _Unreachable(ConfigError):
    """The connection was refused or broke off."""


class ServerInfo(NamedTuple):
    """What /v1/models says about a model; None where it says nothing."""

    model: str
    is_saccade: bool = False
    max_pixels: int | None = None  # the limit of a request
    kv_blocks: int | None = None
    block_size: int | None = None


class ModelReply(NamedTuple):
    text: str
    error: str | None = None  # why there is no text
    prompt_tokens: int = 0
    answer_tokens: int = 0
    image_tokens: int | None = None  # None where the server does not say


class Client:
    """One server, with keep-alive connections."""

    def __init__(self, url: str, api_key: str | None = None, connections: int = 32) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url must begin with http:// or https://, but {url!r} was given")
        self._headers: dict[bytes | str, bytes | str] = dict.fromkeys(("content-type", "accept"), _JSON)
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._pool = httpcore.AsyncConnectionPool(max_connections=connections)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.aclose()

    async def info(self, model: str | None = None) -> ServerInfo:
        """What the server says about `model`, or about its first one."""
        status, _, content = await self._send("GET", _MODELS, None)
        if status != 200:
            self._fail(status, _MODELS, content)
        cards = _get(_decoded(content), "data", list)
        by_id = {str(card["id"]): card for card in cards if member(card, "id") is not None}
        name = next(iter(by_id), "") if model is None else model
        if name not in by_id:
            problem = "no model" if model is None else f"no model {model!r}"
            raise ConfigError(f"{self.url} serves {problem}; it names {', '.join(by_id) or 'none'}")
        return _server_info(name, by_id[name])

    async def ask(self, body: Mapping[str, Any]) -> ModelReply:
        """The whole reply. A refusal is a reply without text; one of all requests is a ConfigError."""
        status, content = await self._ask_until_taken(json.dumps(body).encode())
        if status in (401, 403, 404):
            self._fail(status, _CHAT, content)
        if status != 200:
            return ModelReply("", _message(status, content))
        return _reply(_decoded(content))

    async def first_token(self, body: Mapping[str, Any]) -> float:
        """Time to first token, in seconds."""
        content = json.dumps({**body, "stream": True, "max_tokens": 1}).encode()
        start = time.perf_counter()
        async with self._stream("POST", _CHAT, content) as response:
            if response.status != 200:
                raise QuestionRefused(_message(response.status, await response.aread()))
            async for line in _lines(response):
                if line.startswith("data: {") and _has_token(_decoded(line[6:].encode())):
                    return time.perf_counter() - start
        raise QuestionRefused("the stream ended without a token")

    async def _ask_until_taken(self, content: bytes) -> tuple[int, bytes]:
        """Retry while the server is busy, and a few times if the connection breaks."""
        breaks = 0
        for _ in range(_PATIENCE):
            try:
                status, headers, answer = await self._send("POST", _CHAT, content)
            except _Unreachable:
                breaks += 1
                if breaks == _MAX_BREAKS:
                    raise
                continue
            if status not in _BUSY:
                break
            await asyncio.sleep(min(_number(headers.get("retry-after")), _LONGEST_WAIT))
        return status, answer

    async def _send(self, verb: str, path: str, content: bytes | None) -> tuple[int, dict[str, str], bytes]:
        async with self._stream(verb, path, content) as response:
            headers = {name.decode().lower(): value.decode("latin-1") for name, value in response.headers}
            return response.status, headers, await response.aread()

    @asynccontextmanager
    async def _stream(self, verb: str, path: str, content: bytes | None) -> AsyncIterator[httpcore.Response]:
        url = self.url + path
        try:
            async with self._pool.stream(
                verb, url, headers=self._headers, content=content, extensions=_TIMEOUT
            ) as response:
                yield response
        except httpcore.TimeoutException:
            raise ConfigError(f"{self.url} did not answer in time; is the server overloaded?") from None
        except _BROKEN as error:
            problem = f"{self.url} cannot be reached: {reason_of(error)}"
            raise _Unreachable(f"{problem}; is the server running?") from None

    def _fail(self, status: int, path: str, content: bytes) -> NoReturn:
        hint = "; give the key with --api-key" if status in (401, 403) else ""
        raise ConfigError(f"{self.url}{path} answers {_message(status, content)}{hint}")


def _server_info(name: str, card: Mapping[str, Any]) -> ServerInfo:
    pixels = _get(card, "multimodal", dict).get("max_pixels")
    kv = _get(card, "kv_cache", dict)
    is_saccade = card.get("owned_by") == "saccade"
    return ServerInfo(name, is_saccade, pixels, kv.get("blocks"), kv.get("block_size"))


def _reply(answer: Mapping[str, Any]) -> ModelReply:
    match answer.get("choices"):
        case [dict() as choice, *_]:
            text = _said(_get(choice, "message", dict))
        case _:
            return ModelReply("", "the server's answer has no choices")
    usage = _get(answer, "usage", dict)
    return ModelReply(
        text,
        prompt_tokens=_get(usage, "prompt_tokens", int),
        answer_tokens=_get(usage, "completion_tokens", int),
        image_tokens=_get(usage, "prompt_tokens_details", dict).get("image_tokens"),
    )


def _said(message: Mapping[str, Any]) -> str:
    """The text of a reply; calls of tools follow in Hermes' form, whatever the model's own is."""
    text: str = _get(message, "content", str)
    for call in _get(message, "tool_calls", list):
        function = _get(call, "function", dict)
        arguments = function.get("arguments") or "{}"
        text += (
            f'<tool_call>{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments}}}</tool_call>'
        )
    return text


def _has_token(chunk: Mapping[str, Any]) -> bool:
    choices = _get(chunk, "choices", list)
    if not choices:
        return False
    return bool(_get(choices[0], "delta", dict).get("content")) or choices[0].get("finish_reason") is not None


def _message(status: int, content: bytes) -> str:
    """One line with the status and the server's message, in whatever format."""
    decoded = _decoded(content)
    error = decoded.get("error", decoded)
    text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return f"{status}: {' '.join(str(text or content[:200].decode('utf-8', 'replace')).split())}"


def _decoded(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _get(value: Any, name: str, kind: type) -> Any:
    """A member of a server's response, or an empty value if it is missing or of another type."""
    content = member(value, name)
    if isinstance(content, kind):
        return content
    return kind()


def _number(text: str | None) -> float:
    try:
        return max(0.1, float(text or 1))
    except ValueError:  # a date, which is unusual for a short wait
        return 1.0


async def _lines(response: httpcore.Response) -> AsyncIterator[str]:
    tail = b""
    async for chunk in response.aiter_stream():
        *whole, tail = (tail + chunk).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
