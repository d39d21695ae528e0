"""Media fetching with SSRF protection: http(s) from hosts the operator allows, files from one folder.

URL ─► checked ─► resolved once ─► every address public ─► connected to one of them ─► bytes, or a redirect

Fetches share no state: no connections, no cookies, no proxy from the environment.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import socket
import stat
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from ssl import SSLContext, create_default_context
from urllib.parse import unquote, urljoin, urlsplit

from saccade.errors import RequestError
from saccade.media.connection_limits import Owners, Slot, SlotLimits, Slots
from saccade.media.http_client import BrokenResponse, HttpResponse, open_response
from saccade.media.urls import Target, is_public, is_public_or_private, read_domains, read_url, refused

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PLAIN = ("", "identity")
_ENCODINGS = frozenset({*_PLAIN, "gzip", "x-gzip", "deflate"})
_AUTO_ZLIB = 47  # wbits with which zlib detects gzip and deflate
_CHUNK_BYTES = 256 << 10  # decompressed at once: highly compressed zeros would block the event loop otherwise

_IMAGE = re.compile(r"^((?:the )?)picture")  # start of error messages, adapted for other media

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port to addresses, best first."""
OnBytes = Callable[[int], None]
"""Called before each chunk is stored, with its size; an exception ends the fetch."""


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """What the operator allows. By default nothing is fetched and no file is read."""

    allowed_domains: tuple[str, ...] = ()  # "example.com" includes its subdomains; "*" is every public host
    allowed_local_path: Path | None = None  # the folder for file: URLs and paths
    timeout_s: float = 10  # for one image, redirects included
    connect_timeout_s: float = 5
    max_redirects: int = 3
    max_bytes: int = 64 << 20  # of the image, after any decompression
    allow_private_addresses: bool = False  # allowed hosts may have addresses of a private network
    slots: SlotLimits = field(default_factory=SlotLimits)  # the wait for a connection is part of `timeout_s`


@dataclass(slots=True)
class _Fetch:
    """One fetch in progress."""

    on_bytes: OnBytes
    client: str
    request: object
    is_waiting: bool = False  # for a connection slot


class Fetcher:
    def __init__(
        self, policy: FetchPolicy, *, resolve: Resolve | None = None, ssl_context: SSLContext | None = None
    ) -> None:
        self._policy = policy
        self._what = "picture"
        self._domains = read_domains(policy.allowed_domains)
        self._headers = [
            ("User-Agent", f"saccade/{version('saccade')}"),
            ("Accept", "image/*"),
            ("Accept-Encoding", "identity"),
        ]
        self.slots = Slots(policy.slots)
        # As many threads as connections, so that a slow name server cannot delay other lookups.
        self._lookups = ThreadPoolExecutor(policy.slots.total, thread_name_prefix="saccade-lookup")
        self._resolve = resolve or self._system_resolve
        self._ssl_context = ssl_context or create_default_context()

    def for_kind(self, what: str, accept: str, max_bytes: int) -> Fetcher:
        """The same policy and slots for other media than images, with another size limit."""
        other = copy(self)
        other._policy = replace(self._policy, max_bytes=max_bytes)
        other._headers = [(name, accept if name == "Accept" else value) for name, value in self._headers]
        other._what = what
        return other

    async def fetch(
        self,
        url: str,
        *,
        param: str | None = None,
        on_bytes: OnBytes = lambda _: None,
        client: str = "",
        request: object = None,
    ) -> bytes:
        """The bytes at a URL or path. Every failure is a RequestError with `param` on it.

        `client` and `request` are the owners, each of which gets a share of the connections.
        """
        try:
            scheme = url.partition(":")[0].lower()
            if scheme in ("http", "https"):
                return await self._fetch_http(url, _Fetch(on_bytes, client, request))
            if scheme == "file" or url.startswith("/"):
                return await self._read_local(url, on_bytes)
            raise refused("the picture's URL must be a data:, http: or https: URL")
        except RequestError as error:
            message = _IMAGE.sub(lambda start: start[1] + self._what, error.message)
            raise RequestError(message, code=error.code, param=param) from None

    async def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _read_local(self, url: str, on_bytes: OnBytes) -> bytes:
        path, size = await asyncio.to_thread(_local_file, url, self._policy)
        on_bytes(size)
        return await asyncio.to_thread(_read_regular, path, size)

    async def _fetch_http(self, url: str, job: _Fetch) -> bytes:
        if not self._domains:
            remedy = "send a data: URL, or ask the operator to allow the host with --allowed-media-domains"
            raise refused(f"pictures are not fetched from URLs here; {remedy}")
        limit = self._policy.timeout_s
        try:
            async with asyncio.timeout(limit):
                return await self._follow(url, job)
        except TimeoutError:
            if job.is_waiting:
                reason = "as many fetches as may be at once are under way"
                message = f"the picture could not be fetched within {limit:g} s: {reason}; try again soon"
                raise RequestError(message, code="overloaded") from None
            raise _failed(f"did not arrive within {limit:g} s") from None

    async def _follow(self, url: str, job: _Fetch) -> bytes:
        for _ in range(self._policy.max_redirects + 1):
            target = read_url(url, self._domains)
            try:
                response = await self._get(target, job)
            except TimeoutError:
                reason = f"no connection to {target.host} within {self._policy.connect_timeout_s:g} s"
                raise _failed(f"could not be had: {reason}") from None
            except BrokenResponse:
                reason = f"the connection to {target.host} failed or broke off"
                raise _failed(f"could not be had: {reason}") from None
            if isinstance(response, bytes):
                return response
            url = _joined(target.url, response)
        raise _failed(f"is behind more than {self._policy.max_redirects} redirects")

    async def _get(self, target: Target, job: _Fetch) -> bytes | str:
        """One request: the body, or where it redirects to."""
        limit = self._policy.connect_timeout_s
        job.is_waiting = True
        async with self.slots.taken(Owners(job.client, job.request, target.host)) as slot:
            job.is_waiting = False
            async with asyncio.timeout(limit):
                addresses = await self._addresses(target, slot)
            async with open_response(target, addresses, self._headers, self._ssl_context, limit) as response:
                if response.status in _REDIRECTS and "location" in response.headers:
                    return response.headers["location"]
                if response.status != 200:
                    raise _failed(f"could not be had: {target.host} answered with status {response.status}")
                return await self._body(response, job.on_bytes)

    async def _body(self, response: HttpResponse, on_bytes: OnBytes) -> bytes:
        encoding = response.headers.get("content-encoding", "").strip().lower()
        if encoding not in _ENCODINGS:
            raise _failed("came in a compression that was not asked for")
        claimed = response.headers.get("content-length", "0")
        if claimed.isdecimal() and int(claimed) > self._policy.max_bytes:
            raise _over(self._policy)
        body = io.BytesIO()  # gives its bytes away without a copy
        async for piece in response.body() if encoding in _PLAIN else _decompressed(response.body()):
            if body.tell() + len(piece) > self._policy.max_bytes:
                raise _over(self._policy)
            on_bytes(len(piece))
            body.write(piece)
        return body.getvalue()

    async def _addresses(self, target: Target, slot: Slot) -> list[str]:
        """Resolve once, refuse unless all addresses are public, and connect to these (no DNS rebinding)."""
        slot.work = asyncio.ensure_future(self._lookup(target))
        addresses = await asyncio.shield(slot.work)  # a lookup cannot be cancelled and holds its thread
        if not addresses:
            raise _failed(f"could not be had: the host {target.host} is unknown")
        is_allowed = is_public_or_private if self._policy.allow_private_addresses else is_public
        if not all(map(is_allowed, addresses)):
            message = f"pictures may not be fetched from {target.host}: it is not on the public internet"
            raise refused(message)
        return addresses

    async def _lookup(self, target: Target) -> list[str]:
        try:
            return await self._resolve(target.host, target.port)
        except (OSError, UnicodeError):
            return []

    async def _system_resolve(self, host: str, port: int) -> list[str]:
        def look_up() -> list[str]:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(entry[4][0]) for entry in entries))

        return await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)


def _joined(base: str, location: str) -> str:
    try:
        return urljoin(base, location)
    except ValueError:
        raise _failed("is behind a redirect to something that is no URL") from None


async def _decompressed(packed: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Decompress in small chunks, yielding to the event loop between them."""
    unpack = zlib.decompressobj(_AUTO_ZLIB)
    async for chunk in packed:
        try:
            while piece := unpack.decompress(chunk, _CHUNK_BYTES):
                yield piece
                await asyncio.sleep(0)
                chunk = unpack.unconsumed_tail
        except zlib.error:
            raise _damaged() from None
        if unpack.eof:
            return
    raise _damaged()


def _local_file(url: str, policy: FetchPolicy) -> tuple[Path, int]:
    """A file under the allowed folder, and its size. Errors do not tell whether a file outside exists."""
    if policy.allowed_local_path is None:
        remedy = "the operator allows a folder with --allowed-local-media-path"
        raise refused(f"pictures are not read from files here; {remedy}")
    path = _local_path(url)
    root = policy.allowed_local_path.resolve()
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, or a zero byte in the name
        raise refused("the picture's path is not valid") from None
    if not resolved.is_relative_to(root):
        raise refused("the picture's path is outside the folder that --allowed-local-media-path allows")
    try:
        size = os.stat(resolved, follow_symlinks=False).st_size
    except OSError:
        raise _unreadable() from None
    if size > policy.max_bytes:
        raise RequestError(f"the picture has more than {policy.max_bytes} bytes", code="image_file_too_large")
    return resolved, size


def _local_path(url: str) -> Path:
    if url.startswith("/"):
        return Path(url)
    parts = urlsplit(url)
    path = unquote(parts.path)
    is_here = parts.netloc in ("", "localhost")
    if (is_here, path[:1], parts.query, parts.fragment) != (True, "/", "", ""):
        message = "a file: URL must name an absolute path on this machine, such as file:///pictures/a.png"
        raise refused(message)
    return Path(path)


def _read_regular(path: Path, size: int) -> bytes:
    """Refuses pipes and devices, which may never end, and a link that was put there after the check."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read(size)  # not more than was accounted for
    except OSError:
        pass
    raise _unreadable()


def _failed(what: str) -> RequestError:
    return RequestError(f"the picture {what}", code="failed_to_download_image")


def _damaged() -> RequestError:
    return _failed("is damaged: its compression cannot be undone")


def _unreadable() -> RequestError:
    return RequestError("the picture's file cannot be read", code="image_file_not_found")


def _over(policy: FetchPolicy) -> RequestError:
    return _failed(f"has more than {policy.max_bytes} bytes, which is the limit")
