"""A trace: requests as they came to a service, one JSON object a line.

    {"at": 0.0, "words": 30, "output_tokens": 64}
    {"at": 0.4, "input_tokens": 200, "output_tokens": 16, "images": ["1280x720", "640x480"]}

at              seconds, on any clock; the earliest is the start of the load
words           of text, or `input_tokens`: as many words, each of which is a token for most tokenizers
output_tokens   of the answer
images          sizes; without them the request is text alone
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from saccade.apps.bench.workloads import WORKLOADS, ClientJob, RequestShape
from saccade.errors import ConfigError, is_int_within
from saccade.util.plain_files import read_text

FIELDS = ("at", "words", "input_tokens", "output_tokens", "images")
_MAX_BYTES = 1 << 30
_MAX_SIDE = 65_535  # of a JPEG


class TraceRequest(NamedTuple):
    at: float  # seconds after the start of the load
    words: int | None  # None: as many as the load's shape says
    tokens: int | None  # of the answer; None as above
    sizes: tuple[tuple[int, int], ...]  # of its images


def read_trace(path: Path) -> tuple[TraceRequest, ...]:
    """Requests in the order of arrival. ConfigError names the line and the field that cannot be used."""
    text = read_text(path, _MAX_BYTES, f"the trace {path}")
    requests = sorted(_requests(path, text), key=lambda request: request.at)
    if not requests:
        raise ConfigError(f"the trace {path} has no requests; it needs a JSON object a line")
    return tuple(request._replace(at=request.at - requests[0].at) for request in requests)


def job_of(request: TraceRequest, shape: RequestShape, rng: random.Random) -> ClientJob:
    values: dict[str, Any] = {"words": request.words, "tokens": request.tokens, "sizes": request.sizes}
    changes = {name: value for name, value in values.items() if value}
    shape = replace(shape, images=len(request.sizes), **changes)
    return WORKLOADS["image" if request.sizes else "text"](shape, 0, rng)


def _requests(path: Path, text: str) -> Iterator[TraceRequest]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield _request(json.loads(line))
            except json.JSONDecodeError as error:
                reason = f"is no JSON: {error.msg} at column {error.colno}"
                raise ConfigError(f"{path}, line {number} {reason}") from None
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None


def _request(fields: Any) -> TraceRequest:
    if not isinstance(fields, dict):
        raise ConfigError(f'{fields!r} is no object such as {{"at": 0.5, "words": 20}}')
    if unknown := [name for name in fields if name not in FIELDS]:
        raise ConfigError(f"the field {unknown[0]!r} is unknown; there are {', '.join(FIELDS)}")
    if {"words", "input_tokens"} <= fields.keys():
        raise ConfigError("words and input_tokens are two ways to say one thing; give one of them")
    words = _count(fields, "words") or _count(fields, "input_tokens")
    return TraceRequest(_at(fields), words, _count(fields, "output_tokens"), _sizes(fields))


def _at(fields: dict[str, Any]) -> float:
    if "at" not in fields:
        raise ConfigError("at is missing; give the time of arrival in seconds")
    at = fields["at"]
    if type(at) not in (int, float) or not math.isfinite(at):
        raise ConfigError(f"at is {at!r}; give the time of arrival in seconds")
    return float(at)


def _count(fields: dict[str, Any], name: str) -> int | None:
    if name not in fields:
        return None
    value = fields[name]
    if not is_int_within(value, 1):
        raise ConfigError(f"{name} is {value!r}; give a whole number of 1 or more")
    return value


def _sizes(fields: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    sizes = fields.get("images", [])
    if not isinstance(sizes, list):
        raise ConfigError(f'images is {sizes!r}; give a list of sizes such as ["1280x720"]')
    return tuple(_size(index, size) for index, size in enumerate(sizes))


def _size(index: int, size: Any) -> tuple[int, int]:
    if match := re.fullmatch(r"(\d{1,5})x(\d{1,5})", str(size)):
        sides = (int(match[1]), int(match[2]))
        if all(1 <= side <= _MAX_SIDE for side in sides):
            return sides
    raise ConfigError(f'images[{index}] is {size!r}; give a size such as "1280x720"')
