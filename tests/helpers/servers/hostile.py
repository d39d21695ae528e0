"""What hostile tests share: raw sockets, and a watch over memory and over how other clients fare meanwhile."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import psutil

from tests.helpers.servers.serving import RunningServer, chat_body

KEY = "a-long-secret-key"
ALICE, MALLORY = "the-key-of-alice", "the-key-of-mallory"
KEYS = ("--api-key", ALICE, "--api-key", MALLORY)
MAX_SCHEMA_CHECKS = 6
CHAT = "/v1/chat/completions"
_PAUSE_SECONDS = 0.05
_ENOUGH_FOR_A_FLOOD = 20 << 20


@dataclass
class Watch:
    """What was seen while an attack ran. Latencies are for the report; tests assert counts and memory."""

    latencies: list[float] = field(default_factory=list)  # of the neighbour's requests, in seconds
    failures: list[str] = field(default_factory=list)  # the neighbour's requests that were not answered with 200
    api_growth_mb: float = 0.0  # the highest resident memory seen, above what it was before
    engine_growth_mb: float = 0.0

    @property
    def num_answered(self) -> int:
        return len(self.latencies)

    @property
    def slowest(self) -> float:
        return max(self.latencies, default=0.0)


def resident_mb(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def engine_pid(server: RunningServer) -> int:
    """The engine is the child with the most memory: others check schemas or render templates."""
    return max(server.children(), key=resident_mb)


@contextmanager
def watching(server: RunningServer, ask: Callable[[], httpx.Response] | None = None) -> Iterator[Watch]:
    """Plays a neighbour, who sends `ask` (GET /health unless told) one after the other, while the body runs."""
    ask = ask or (lambda: server.get("/health"))
    watch, is_over = Watch(), threading.Event()
    pids = {"api_growth_mb": server.process.pid, "engine_growth_mb": engine_pid(server)}
    before = {name: resident_mb(pid) for name, pid in pids.items()}

    def look() -> None:
        for name, pid in pids.items():
            setattr(watch, name, max(getattr(watch, name), resident_mb(pid) - before[name]))

    def play() -> None:
        while not is_over.is_set():
            start = time.perf_counter()
            try:
                response = ask()
            except httpx.HTTPError as error:
                watch.failures.append(repr(error))
            else:
                if response.status_code == 200:
                    watch.latencies.append(time.perf_counter() - start)
                else:
                    watch.failures.append(f"{response.status_code} {response.text[:200]}")
            is_over.wait(_PAUSE_SECONDS)

    def sample() -> None:
        while not is_over.is_set():
            look()
            is_over.wait(_PAUSE_SECONDS)

    threads = [threading.Thread(target=work, daemon=True) for work in (play, sample)]
    for thread in threads:
        thread.start()
    try:
        yield watch
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        look()


@contextmanager
def raw_connection(server: RunningServer, timeout: float = 120.0) -> Iterator[socket.socket]:
    """A plain TCP connection: what is sent on it is up to the test."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=timeout) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    """All the server sends until it closes the connection."""
    parts = []
    while part := sock.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def message(path: str = CHAT, body: bytes = b"", *headers: str, method: str = "POST", key: str | None = KEY) -> bytes:
    """A whole request, unless its length is among the headers."""
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *headers]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    if not any(header.startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def sent(server: RunningServer, stack: ExitStack, path: str, body: bytes, *, key: str) -> socket.socket:
    """A request of this key that is on its way, until the stack closes its connection."""
    sock = stack.enter_context(raw_connection(server))
    sock.sendall(message(path, body, key=key))
    return sock


def chat_message(*headers: str, size: int = 0, **fields: Any) -> bytes:
    return message(CHAT, large_body(size, **fields), *headers)


def large_body(size: int, **fields: Any) -> bytes:
    """A good request of so many bytes: what is too much are spaces."""
    return msgspec.json.encode(chat_body(**fields)).ljust(size)


def flood(sock: socket.socket, what: bytes) -> bytes:
    """Send far too much of something, whatever the server says; then all it said."""
    block = what * (1 + (64 << 10) // len(what))
    try:
        for _ in range(_ENOUGH_FOR_A_FLOOD // len(block)):
            sock.sendall(block)
    except OSError:
        pass  # the server has had enough
    try:
        return read_all(sock)
    except ConnectionResetError:
        return b""
