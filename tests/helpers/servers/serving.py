"""What the server's tests share: a running `saccade serve`, and short ways to ask it something."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from tests.helpers.media.images import make_photo, png

MODEL = "tiny"
START_SECONDS = 240  # a start takes 4 to 14 s of a core; a full machine has less than that to give
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # made once: to make one takes longer than most requests here
FLAGS = ("--kv-cache-gb", "0.05", "--served-model-name", MODEL, "--limit-mm-per-prompt", "image=4")


@dataclass
class RunningServer:
    url: str
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)  # lines of stderr so far
    key: str | None = None

    def client(self, **headers: str) -> httpx.Client:
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        return self.stranger(**headers)

    def stranger(self, **headers: str) -> httpx.Client:
        """A client without the key."""
        return httpx.Client(base_url=self.url, timeout=120, headers=headers, verify=_NO_TLS, trust_env=False)

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def post(self, path: str, body: Any, **how: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **how)

    def chat(self, content: Any = "What is this?", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(content, **fields))

    def answers(self) -> bool:
        """A normal request works."""
        return self.chat(max_tokens=2).status_code == 200

    def stats(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0].split(" ")[0] == name)

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]


def chat_body(content: Any = "What is this?", **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "temperature": 0,
        **fields,
    }


def image_url(width: int = 112, height: int = 84, seed: int = 0) -> str:
    return as_url(png(make_photo(width, height, seed)))


def as_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()


def image_part(url: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def photo_part(width: int = 112, height: int = 84, seed: int = 0, **fields: Any) -> dict[str, Any]:
    return image_part(image_url(width, height, seed), **fields)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    return dict(body["error"])


def refused(response: httpx.Response, code: str | None, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["code"] == code, error
    if param is not None:
        assert error["param"] == param, error
    assert response.headers["x-should-retry"] == "false"
    assert not re.search(r"\b0x|PIL|Traceback|site-packages", error["message"])
    return error


def events_of(lines: Iterator[str] | list[str]) -> list[Any]:
    """The data of a stream's events; "[DONE]" stays a string."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def until(condition: Any, seconds: float = 120.0) -> bool:
    """Whether it becomes true in time; the limit only keeps a broken test from hanging."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def start_server(folder: Path, *flags: str, key: str | None = None, env: dict[str, str] | None = None) -> RunningServer:
    return _start([str(folder), *FLAGS, *flags], key, env)


def _start(arguments: list[str], key: str | None, env: dict[str, str] | None) -> RunningServer:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "saccade.cli", "serve", "--port", str(port), *arguments],
        stderr=subprocess.PIPE,
        text=True,
        # One thread: two on a busy machine of two cores wait for each other far longer than they compute.
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    server = RunningServer(f"http://127.0.0.1:{port}", process, key=key)
    threading.Thread(target=_collect, args=(process, server.log), daemon=True).start()
    return server


def _collect(process: subprocess.Popen[str], log: list[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        log.append(line)


def is_ready(server: RunningServer) -> bool:
    assert server.process.poll() is None, "".join(server.log)
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=5)  # quicker than httpx: it is asked often
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def running_server(
    folder: Path, *flags: str, key: str | None = None, env: dict[str, str] | None = None
) -> Iterator[RunningServer]:
    with _until_done(start_server(folder, *flags, key=key, env=env)) as server:
        yield server


@contextmanager
def running_builtin(*flags: str, key: str | None = None, env: dict[str, str] | None = None) -> Iterator[RunningServer]:
    """The model inside the package, as a newcomer serves it."""
    with _until_done(_start(["--kv-cache-gb", "0.05", *flags], key, env)) as server:
        yield server


@contextmanager
def _until_done(server: RunningServer) -> Iterator[RunningServer]:
    try:
        assert until(lambda: is_ready(server), START_SECONDS), "".join(server.log)
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


def jpeg(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG")
    return stream.getvalue()
