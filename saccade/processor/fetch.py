"""Fetches pictures: http(s) from hosts the operator allows, files from one folder. Knows neither prompts nor formats.

URL ─► checked ─► resolved once ─► every address public ─► connected to one of them ─► bytes, or a URL again

Nothing is kept between two fetches: no connections, no cookies, no proxy from the environment.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import stat
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import httpcore

from saccade.processor.urls import Target, is_public, is_public_or_private, read_domains, read_url
from saccade.types import RequestError

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_CONNECTIONS = 64
_ENCODINGS = frozenset({"identity", "gzip", "x-gzip", "deflate"})
_AUTO_ZLIB = 47  # window bits that make zlib recognise gzip and deflate by themselves

_PICTURE = re.compile(r"^((?:the )?)picture")  # how errors begin; one about a video says so

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port to addresses, best first."""


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """What the operator allows. By default nothing is fetched and no file is read."""

    allowed_domains: tuple[str, ...] = ()  # "example.com" stands for its subdomains too; "*" for every public host
    allowed_local_path: Path | None = None  # the folder whose files may be named by file: URLs and paths
    timeout_s: float = 10  # for one picture, redirects included
    connect_timeout_s: float = 5
    max_redirects: int = 3
    max_bytes: int = 64 << 20  # of the picture, after any decompression
    allow_private_addresses: bool = False  # those of a private network too, of hosts that are named one by one


class Fetcher:
    def __init__(
        self, policy: FetchPolicy, *, resolve: Resolve | None = None, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._policy = policy
        self._what = "picture"
        self._domains = read_domains(policy.allowed_domains)
        self._headers = [
            ("User-Agent", f"saccade/{version('saccade')}"),
            ("Accept", "image/*"),
            ("Accept-Encoding", "identity"),
        ]
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context or ssl.create_default_context(),
            max_connections=_MAX_CONNECTIONS,
            max_keepalive_connections=0,
            network_backend=_PinnedBackend(resolve or _system_resolve, policy.allow_private_addresses),
        )

    def for_videos(self, max_bytes: int) -> Fetcher:
        """The same hosts, connections and times, for larger things."""
        other = copy(self)
        other._policy = replace(self._policy, max_bytes=max_bytes)
        other._headers = [(name, "video/*" if name == "Accept" else value) for name, value in self._headers]
        other._what = "video"
        return other

    async def fetch(self, url: str, *, param: str | None = None) -> bytes:
        """The bytes behind a URL or path; RequestError, with `param` on it, for everything that can go wrong."""
        try:
            scheme = url.partition(":")[0].lower()
            if scheme in ("http", "https"):
                return await self._fetch_http(url)
            if scheme == "file" or url.startswith("/"):
                return await asyncio.to_thread(_read_local, url, self._policy)
            raise _refused("the picture's URL must be a data:, http: or https: URL")
        except RequestError as error:
            message = _PICTURE.sub(lambda start: start[1] + self._what, error.message)
            raise RequestError(message, code=error.code, param=param) from None

    async def close(self) -> None:
        await self._pool.aclose()

    async def _fetch_http(self, url: str) -> bytes:
        if not self._domains:
            raise _refused(
                "pictures are not fetched from URLs here; send a data: URL, or ask the operator to allow the host with "
                "--allowed-media-domains"
            )
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                return await self._follow(url)
        except TimeoutError:
            raise _failed(f"did not arrive within {self._policy.timeout_s:g} s") from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(self._policy.max_redirects + 1):
            target = read_url(url, self._domains)
            try:
                answer = await self._get(target)
            except httpcore.TimeoutException:
                limit = self._policy.connect_timeout_s
                raise _failed(f"could not be had: no connection to {target.host} within {limit:g} s") from None
            except (httpcore.NetworkError, httpcore.ProtocolError, OSError):
                raise _failed(f"could not be had: the connection to {target.host} failed or broke off") from None
            if isinstance(answer, bytes):
                return answer
            url = _joined(target.url, answer)
        raise _failed(f"is behind more than {self._policy.max_redirects} redirects")

    async def _get(self, target: Target) -> bytes | str:
        """One request: the body, or where it redirects to."""
        extensions = {"timeout": {"connect": self._policy.connect_timeout_s}}
        async with self._pool.stream("GET", target.url, headers=self._headers, extensions=extensions) as response:
            named = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in named:
                return named[b"location"]
            if response.status != 200:
                raise _failed(f"could not be had: {target.host} answered with status {response.status}")
            return await self._body(response, named)

    async def _body(self, response: httpcore.Response, headers: Mapping[bytes, str]) -> bytes:
        encoding = headers.get(b"content-encoding", "").strip().lower() or "identity"
        if encoding not in _ENCODINGS:
            raise _failed("came in a compression that was not asked for")
        claimed = headers.get(b"content-length", "0")
        if claimed.isdecimal() and int(claimed) > self._policy.max_bytes:
            raise _over(self._policy)
        body = bytearray()
        async for chunk in _decoded(response.aiter_stream(), encoding, self._policy.max_bytes):
            body += chunk
            if len(body) > self._policy.max_bytes:
                raise _over(self._policy)
        return bytes(body)


def _joined(base: str, location: str) -> str:
    try:
        return urljoin(base, location)
    except ValueError:
        raise _failed("is behind a redirect to something that is no URL") from None


async def _decoded(stream: AsyncIterator[bytes], encoding: str, most: int) -> AsyncIterator[bytes]:
    """Chunks as they were before compression, none much larger than the limit however well they were packed."""
    if encoding == "identity":
        async for chunk in stream:
            yield chunk
        return
    unpack = zlib.decompressobj(_AUTO_ZLIB)
    async for chunk in stream:
        try:
            yield unpack.decompress(chunk, most + 1)
        except zlib.error:
            raise _failed("is damaged: its compression cannot be undone") from None


# --- connecting ---------------------------------------------------------------------------------------------------


class _PinnedBackend(httpcore.AsyncNetworkBackend):
    """Resolves a name once, refuses it unless all its addresses are public, and connects to those very addresses.

    TLS is started by the caller with the name, so the certificate is checked against the name and not the address.
    """

    def __init__(self, resolve: Resolve, allow_private: bool) -> None:
        self._resolve = resolve
        self._allow_private = allow_private
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                return await self._connect(await self._addresses(host, port), port)
        except TimeoutError:
            raise httpcore.ConnectTimeout from None

    async def _connect(self, addresses: Sequence[str], port: int) -> httpcore.AsyncNetworkStream:
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port)
            except httpcore.ConnectError:
                continue  # the next may be reachable: many hosts have an IPv6 address, and many networks no way to it
        return await self._inner.connect_tcp(addresses[-1], port)

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = []
        if not addresses:
            raise _failed(f"could not be had: the host {host} is unknown")
        is_allowed = is_public_or_private if self._allow_private else is_public
        if not all(map(is_allowed, addresses)):
            raise _refused(f"pictures may not be fetched from {host}: it is not on the public internet")
        return addresses

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def _system_resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


# --- files --------------------------------------------------------------------------------------------------------


def _read_local(url: str, policy: FetchPolicy) -> bytes:
    """A file under the allowed folder, links followed first. Outside it, nobody learns whether a file exists."""
    if policy.allowed_local_path is None:
        raise _refused(
            "pictures are not read from files here; the operator allows a folder with --allowed-local-media-path"
        )
    path = _local_path(url)
    root = policy.allowed_local_path.resolve()
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, or a zero byte in the name
        raise _refused("the picture's path is not valid") from None
    if not resolved.is_relative_to(root):
        raise _refused("the picture's path is outside the folder that --allowed-local-media-path allows")
    try:
        return _read_regular(resolved, policy)
    except OSError:
        raise RequestError("the picture's file cannot be read", code="image_file_not_found") from None


def _local_path(url: str) -> Path:
    if url.startswith("/"):
        return Path(url)
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or parts.query or parts.fragment:
        raise _refused("a file: URL must name an absolute path on this machine, such as file:///pictures/a.png")
    return Path(path)


def _read_regular(path: Path, policy: FetchPolicy) -> bytes:
    """No pipes or devices, which may never end, and no link that was put there after the check."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("not a regular file")
        data = file.read(policy.max_bytes + 1)
    if len(data) > policy.max_bytes:
        raise RequestError(f"the picture has more than {policy.max_bytes} bytes", code="image_file_too_large")
    return data


# --- errors -------------------------------------------------------------------------------------------------------


def _refused(message: str) -> RequestError:
    return RequestError(message, code="invalid_image_url")


def _failed(what: str) -> RequestError:
    return RequestError(f"the picture {what}", code="failed_to_download_image")


def _over(policy: FetchPolicy) -> RequestError:
    return _failed(f"has more than {policy.max_bytes} bytes, which is the limit")
