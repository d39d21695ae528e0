"""An OpenAI-compatible server that says what a test tells it to, for testing those who ask."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Say = Callable[[Body], str | tuple[int, Body] | None]  # an answer's text, a status with a body, or a broken connection


@dataclass
class FakeApi:
    say: Say
    card: Body = field(default_factory=lambda: {"id": "fake"})
    bodies: list[Body] = field(default_factory=list)  # every chat request, in the order they came
    keys: list[str | None] = field(default_factory=list)
    url: str = ""

    @property
    def streamed(self) -> list[Body]:
        return [body for body in self.bodies if body.get("stream")]


def question_of(body: Body) -> str:
    return str(body["messages"][0]["content"][-1]["text"])


def error(status: int, message: str) -> tuple[int, Body]:
    return status, {"error": {"message": message, "type": "", "param": None, "code": None}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the default of five resets clients that come together

    def handle_error(self, *_: object) -> None:
        """Clients that give up are no news, and the tests read what is printed."""


@contextmanager
def fake_api(say: Say, **card: Any) -> Iterator[FakeApi]:
    api = FakeApi(say, {"id": "fake", **card})
    server = _Server(("127.0.0.1", 0), _handler(api))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()


def _handler(api: FakeApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [api.card]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            api.bodies.append(body)
            api.keys.append(self.headers["authorization"])
            said = api.say(body)
            if said is None:
                self.close_connection = True
            elif not isinstance(said, str):
                self._send(*said)
            elif body.get("stream"):
                self._stream(said)
            else:
                self._send(200, _answer(said, body))

        def _send(self, status: int, body: Body) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, said: str) -> None:
            deltas: list[Body] = [{"role": "assistant", "content": ""}, {"content": said}]
            events = [json.dumps({"choices": [{"delta": delta, "finish_reason": None}]}) for delta in deltas]
            data = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _answer(said: str, body: Body) -> Body:
    images = sum(part["type"] == "image_url" for part in body["messages"][0]["content"])
    pixels = body.get("mm_processor_kwargs", {}).get("max_pixels", 0)
    usage = {
        "prompt_tokens": 10 + images * pixels // 100,
        "completion_tokens": 6,
        "prompt_tokens_details": {"image_tokens": images * pixels // 100},
    }
    return {"choices": [{"message": {"role": "assistant", "content": said}}], "usage": usage}
