"""An HTTP server that answers chat completions with streams of set delays, in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODELS = {"object": "list", "data": [{"id": "fake", "object": "model"}]}


@dataclass
class FakeChatServer:
    first_s: float = 0.0  # until the first token
    gap_s: float = 0.0  # between two
    status: int = 200
    max_images: int | None = None  # in a request; more are refused with 400
    breaks_at: int | None = None  # so many images: 500
    fails_midway: bool = False  # an error event after the first token
    hangs_up: bool = False  # after the first token
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    num_connections: int = 0
    most_open: int = 0  # requests at a time
    _open: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
                self.keys.append(headers.get("Authorization", headers.get("authorization", "")))
                body = await reader.readexactly(int(headers.get("Content-Length", 0)))
                await (self._models(writer) if head.startswith(b"GET") else self._chat(json.loads(body), writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _models(self, writer: asyncio.StreamWriter) -> None:
        text = json.dumps(MODELS).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))

    async def _chat(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            if refusal := self._refusal(json.dumps(body).count('"type": "image_url"')):
                status, text = refusal
                writer.write(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text))
                return
            if self.status != 200:
                writer.write(b"HTTP/1.1 %d No\r\nContent-Length: 9\r\n\r\ntoo large" % self.status)
                return
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            await self._stream(body["max_tokens"], writer)
        finally:
            self._open -= 1

    def _refusal(self, images: int) -> tuple[int, bytes] | None:
        if self.breaks_at is not None and images >= self.breaks_at:
            return 500, b"out of memory"
        if self.max_images is None or images <= self.max_images:
            return None
        message = f"{images} images were sent; {self.max_images} are allowed"
        return 400, json.dumps({"error": {"message": message, "code": None}}).encode()

    async def _stream(self, tokens: int, writer: asyncio.StreamWriter) -> None:
        await self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(tokens):
            await asyncio.sleep(self.gap_s if number else self.first_s)
            await self._event(writer, {"choices": [{"delta": {"content": "x"}}]})
            if self.hangs_up:
                raise ConnectionError
            if self.fails_midway:
                await self._event(writer, {"error": {"message": "the engine died"}})
        usage = {"prompt_tokens": 7, "completion_tokens": tokens}
        await self._event(writer, {"choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    async def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        text = f"data: {json.dumps(event)}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(text), text))
        await writer.drain()


@contextmanager
def fake_chat_server(**how: Any) -> Iterator[FakeChatServer]:
    fake = FakeChatServer(**how)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.serve, "127.0.0.1", 0, limit=1 << 26))
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
