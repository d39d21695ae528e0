"""A server on this machine that answers whatever a test wants, and names that lead to it."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from saccade.media.fetch import Resolve

HOST = "pictures.test"
HANG_GUARD = 60.0
BODY = b"\x89PNG not really, but bytes are bytes here"
TRUST = ssl.create_default_context()  # reading the system's certificates takes a while
Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Site:
    """A server that remembers the requests it saw."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.requests: list[bytes] = []
        self.port = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            await self.handler(self.requests[-1], writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):  # the last when a test is over
            pass
        finally:
            writer.close()


@asynccontextmanager
async def running(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    site = Site(handler)
    server = await asyncio.start_server(site, "127.0.0.1", 0, ssl=tls)
    site.port = server.sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.close()


def answer(*pieces: bytes) -> Handler:
    async def handle(_: bytes, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return handle


def response(body: bytes = BODY, status: str = "200 OK", **headers: str) -> bytes:
    named = {"content-length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items() if value)
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


def resolving(*answers: str) -> tuple[Resolve, list[str]]:
    """A resolver that gives these answers in turn, the last one for ever, and the names it was asked for."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return [answers[min(len(asked), len(answers)) - 1]]

    return resolve, asked


def certificate(folder: Path, name: str) -> ssl.SSLContext:
    """A server's context with a fresh certificate for `name`."""
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files, *subject]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


async def silent(_: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(HANG_GUARD)


def forever(start: bytes, again: bytes) -> Handler:
    async def handle(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        while not writer.transport.is_closing():
            writer.write(again * max(1, 65536 // len(again)))
            await writer.drain()
            await asyncio.sleep(0)  # a loop may find no reason to wait for a client that has just left

    return handle


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS_BODY = forever(b"HTTP/1.1 200 OK\r\n\r\n", b"x")
ENDLESS: dict[str, Handler] = {
    "interim answers": forever(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "interim answers with headers": forever(b"", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"),
    "headers": forever(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
    "one header": forever(b"HTTP/1.1 200 OK\r\na: ", b"b"),
    "a reason": forever(b"HTTP/1.1 200 ", b"OK "),
    "a chunk extension": forever(CHUNKED + b"5;", b"a=b;"),
    "chunk extensions": forever(CHUNKED, b"1;" + b"a" * 500 + b"\r\nx\r\n"),
    "chunks of one byte": forever(CHUNKED, b"1\r\nx\r\n"),
    "trailers": forever(CHUNKED + b"3\r\nabc\r\n0\r\n", b"a: b\r\n"),
}
