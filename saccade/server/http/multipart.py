"""Reads a form with one file, as multipart/form-data, chunk by chunk. Keeps no file in memory."""

from __future__ import annotations

import re

from saccade.server.errors import ApiError

_MAX_PARTS = 16
_MAX_HEADERS = 8192  # bytes of one part's
_MAX_FIELDS = 8192  # bytes of all fields that are no file
_BOUNDARY = re.compile(r"boundary=(?:\"([^\"]{1,70})\"|([^\s;\"]{1,70}))", re.IGNORECASE)
_LINE = rb"^content-disposition:[^\r\n]*?[;\s]"  # one try for each line: each reads it to its end
_NAME = re.compile(_LINE + rb"name=\"([^\"\r\n]*)\"", re.IGNORECASE | re.MULTILINE)
_FILENAME = re.compile(_LINE + rb"filename=\"([^\"\r\n]*)\"", re.IGNORECASE | re.MULTILINE)


class MultipartReader:
    """Fields by name, and the file's bytes as they come."""

    def __init__(self, content_type: str) -> None:
        kind = content_type.partition(";")[0].strip().lower()
        boundary = _BOUNDARY.search(content_type)
        if kind != "multipart/form-data" or boundary is None:
            message = "the body must be a form with a file; send it as multipart/form-data with a boundary"
            raise ApiError(415, message, code="unsupported_media_type")
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None  # None: no file has come
        self.is_complete = False
        self._delimiter = b"\r\n--" + (boundary[1] or boundary[2]).encode("latin-1", "replace")
        self._buffer = bytearray(b"\r\n")  # the first delimiter has no line before it
        self._in_headers = False
        self._part: str | None = None  # name of the field whose value comes; None: before the first
        self._num_parts = 0
        self._num_field_bytes = 0

    def take(self, chunk: bytes) -> bytes:
        """The bytes of the file in this chunk."""
        self._buffer += chunk
        pieces: list[bytes] = []
        has_more = True
        while has_more:
            has_more = self._read_headers() if self._in_headers else self._read_value(pieces)
        if self.is_complete:
            self._buffer.clear()
        return b"".join(pieces)

    def _read_headers(self) -> bool:
        """Whether there is more to read."""
        if self._buffer.startswith(b"--"):
            self.is_complete = True
            return False
        end = self._buffer.find(b"\r\n\r\n", 0, _MAX_HEADERS)
        if end < 0:
            if len(self._buffer) >= _MAX_HEADERS:
                raise _broken(f"the headers of a part have {_MAX_HEADERS} bytes or more")
            return False
        self._begin_part(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        self._in_headers = False
        return True

    def _begin_part(self, headers: bytes) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _broken(f"it has more than {_MAX_PARTS} parts")
        name = _NAME.search(headers)
        if name is None:
            raise _broken("a part has no name")
        self._part = name[1].decode("utf-8", "replace")
        if self._part == "file":
            if self.filename is not None:
                raise _broken("it has two files")
            filename = _FILENAME.search(headers)
            self.filename = filename[1].decode("utf-8", "replace") if filename else "file"
        else:
            self.fields[self._part] = b""

    def _read_value(self, pieces: list[bytes]) -> bool:
        """Whether there is more to read. What may be the start of a delimiter waits for the next chunk."""
        end = self._buffer.find(self._delimiter)
        length = end if end >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        piece = bytes(self._buffer[:length])
        del self._buffer[:length]
        self._in_headers = end >= 0
        if self._in_headers:
            del self._buffer[: len(self._delimiter)]
        if self._part == "file":
            pieces.append(piece)
        elif self._part is not None:
            self._num_field_bytes += len(piece)
            if self._num_field_bytes > _MAX_FIELDS:
                raise _broken(f"its fields have more than {_MAX_FIELDS} bytes")
            self.fields[self._part] += piece
        return end >= 0


def _broken(why: str) -> ApiError:
    return ApiError(400, f"the form cannot be read: {why}", code="invalid_form")
