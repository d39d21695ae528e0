"""Batch files: requests in, results out, one JSON object a line, in the form of OpenAI. Sends nothing.

A result's id holds the line of its request, so a run can go on where an earlier one ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from saccade.errors import ConfigError

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/bill"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank"),
)
MAX_LINE_BYTES = 256 << 20
_ID = "batch_req_"
_START = f'{{"id": "{_ID}'.encode()  # of every result
_MAX_ID_CHARS = 512


class BatchRequest(NamedTuple):
    line: int  # from 1
    custom_id: str | None
    url: str
    body: Mapping[str, Any]
    problem: str | None = None  # why it cannot be sent


class BatchResult(NamedTuple):
    request: BatchRequest
    status: int  # 0: it was not sent
    request_id: str
    body: Any  # as the server answered

    @property
    def is_error(self) -> bool:
        return not 200 <= self.status < 300

    def line(self) -> bytes:
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        given = self.body.get("error") if isinstance(self.body, Mapping) else None
        told: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        code = told.get("code") or ("invalid_request" if self.request.problem else "request_failed")
        message = self.request.problem or told.get("message") or f"the server answered {self.status}"
        entry = {
            "id": f"{_ID}{self.request.line}",
            "custom_id": self.request.custom_id,
            "response": response if self.status else None,
            "error": {"code": code, "message": message} if self.is_error else None,
        }
        return json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Every line that is not blank. What is wrong with one is its `problem`."""
    with path.open("rb") as stream:
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(MAX_LINE_BYTES)
                yield _refused(number, None, f"it has more than {MAX_LINE_BYTES} bytes")
            elif line.strip():
                yield read_request(line, number)


def read_request(line: bytes, number: int) -> BatchRequest:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return _refused(number, None, "it is not JSON")
    if not isinstance(entry, dict):
        return _refused(number, None, "it is not an object")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        return _refused(number, None, f"custom_id must be a string of 1 to {_MAX_ID_CHARS} characters")
    url = entry.get("url")
    body = entry.get("body")
    if entry.get("method") != "POST":
        return _refused(number, custom_id, "method must be POST")
    if url not in URLS:
        return _refused(number, custom_id, f"url must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        return _refused(number, custom_id, "body must be an object")
    if body.get("stream"):
        return _refused(number, custom_id, "a batch streams nothing; leave stream out of the body")
    return BatchRequest(number, custom_id, url, body)


def _refused(number: int, custom_id: str | None, why: str) -> BatchRequest:
    return BatchRequest(number, custom_id, "", {}, f"line {number}: {why}")


def finished(path: Path) -> dict[int, str | None]:
    """Lines that have a result already, with their custom_id. A last result cut short is removed.

    ConfigError for any other content: nothing of a file that is not ours is removed.
    """
    done: dict[int, str | None] = {}
    if not path.exists():
        return done
    with path.open("r+b") as stream:
        end = 0
        for line in stream:
            found = _result(line)
            if found is None:
                break
            done[found[0]] = found[1]
            end += len(line)
        else:
            return done
        if line.endswith(b"\n") or line[: len(_START)] != _START[: len(line)]:
            position = f"line {line[:40]!r} of {path} is no result of a batch"
            raise ConfigError(f"{position}; choose another file, or remove that line")
        stream.truncate(end)
    return done


def _result(line: bytes) -> tuple[int, str | None] | None:
    """The line of the request and its custom_id; None if this is no whole result."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else {}
        number = entry["id"].removeprefix(_ID)
        return int(number), entry["custom_id"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
