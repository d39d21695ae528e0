"""The HTTP parser's edge: headers of bounded size, and an answer in our form to what is no HTTP at all."""

from __future__ import annotations

from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from saccade.server.errors import ApiError

MAX_HEADER_BYTES = 64 << 10


class BoundedHttp(HttpToolsProtocol):
    """Uvicorn's protocol without its two holes: it reads headers of any size, and answers garbage in plain text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_headers = True
        self._header_bytes = 0  # of the request whose headers are being read

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_headers:  # a header that has not ended yet is not reported, so it is counted here
            self._header_bytes += len(data)
            self._check_headers()

    def on_message_begin(self) -> None:
        self._is_in_headers, self._header_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._header_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._check_headers():
            super().on_headers_complete()

    def _check_headers(self) -> bool:
        if self._header_bytes <= MAX_HEADER_BYTES:
            return True
        message = f"the request's headers are longer than {MAX_HEADER_BYTES} bytes"
        self._refuse(ApiError(431, message, code="headers_too_large"), b"Request Header Fields Too Large")
        return False

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not an HTTP/1.1 request", code="invalid_http"), b"Bad Request")

    def _refuse(self, error: ApiError, reason: bytes) -> None:
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(error.body())
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (error.status, reason, len(body)) + body)
        self.transport.close()
