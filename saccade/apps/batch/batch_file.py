"""The results of a batch: one JSON object a line, in the form of OpenAI. Sends nothing.

A result's id holds the line of its request, so a run can go on where an earlier one ended. An answer's bytes
are written as they came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from saccade.apps.batch.batch_lines import BatchRequest
from saccade.errors import ConfigError
from saccade.util.plain_files import open_plain

_ID = "batch_req_"
_START = f'{{"id": "{_ID}'.encode()  # of every result
_RESULT = re.compile(
    rb'\{"id": "batch_req_(\d{1,15})", "custom_id": ("(?:[^"\\]|\\.)*"|null), "response": .*\}\n', re.S
)
_NO_ERROR = b', "error": null}\n'


class _ErrorAnswer(msgspec.Struct):
    error: Any = None


class BatchResult(NamedTuple):
    request: BatchRequest
    status: int  # 0: it was not sent
    request_id: str
    body: bytes  # JSON in one line, as the server answered

    @property
    def is_error(self) -> bool:
        return not 200 <= self.status < 300

    def line(self) -> bytes:
        request = self.request
        head = _START + b'%d", "custom_id": %s, "response": ' % (request.line, request.custom_id)
        if not self.status:
            return head + b"null" + self._error()
        about = b'{"status_code": %d, "request_id": %s, "body": ' % (self.status, _json(self.request_id))
        return b"".join((head, about, self.body or b"null", b"}", self._error()))

    def _error(self) -> bytes:
        if not self.is_error:
            return _NO_ERROR
        code, message = "invalid_request", self.request.problem
        if message is None:
            error = _error_in(self.body)
            code = error.get("code", "request_failed")
            message = error.get("message", f"the server answered {self.status}")
        return b', "error": %s}\n' % _json({"code": code, "message": message})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _error_in(body: bytes) -> dict[str, Any]:
    """What a server says of an error: null and empty text say nothing."""
    try:
        error = msgspec.json.decode(body, type=_ErrorAnswer).error
    except ValueError:
        return {}
    return {name: value for name, value in error.items() if value} if isinstance(error, dict) else {}


def finished(path: Path, check: Callable[[int, str | None], None]) -> set[int]:
    """Lines that have a result already, each checked with its custom_id. A last result cut short is removed.

    ConfigError for any other content: nothing of a file that is not ours is removed.
    """
    lines: set[int] = set()
    if not path.exists():
        return lines
    with open_plain(path, "r+b") as stream:
        end = 0
        for line in stream:
            match = _RESULT.fullmatch(line)
            if match is None:
                break
            check(int(match[1]), json.loads(match[2]))
            lines.add(int(match[1]))
            end += len(line)
        else:
            return lines
        if line.endswith(b"\n") or line[: len(_START)] != _START[: len(line)]:
            position = f"line {line[:40]!r} of {path.name} is no result of a batch"
            raise ConfigError(f"{position}; choose another file, or remove that line")
        stream.truncate(end)
    return lines


def result_lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Each whole result, and whether it is an error."""
    with path.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                yield line, not line.endswith(_NO_ERROR)
