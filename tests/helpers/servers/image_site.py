"""A site on this machine that serves images, for servers that fetch by URL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers.media.images import make_photo, png


class Site(ThreadingHTTPServer):
    """A small site on this machine that remembers which paths it was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.elsewhere = ""  # where /astray redirects to
        self.files: dict[str, bytes] = {}  # more things to fetch, by path
        self.is_over = threading.Event()  # lets slow answers go

    def handle_error(self, *_: Any) -> None:
        """Clients that leave are part of these tests."""

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        kind = self.path.split("?")[0]
        if kind in self.server.files:
            self._answer(200, self.server.files[kind])
        elif kind == "/photo.png":
            self._answer(200, png(make_photo(112, 84, seed=len(self.path))))
        elif kind == "/moved":
            self._answer(302, b"", location="/photo.png?moved")
        elif kind == "/astray":
            self._answer(302, b"", location=self.server.elsewhere)
        elif kind == "/slow":
            self.server.is_over.wait(120)
        else:
            self._answer(404, b"nothing here")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def running_site() -> Iterator[Site]:
    with Site() as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield site
        site.is_over.set()
        site.shutdown()
