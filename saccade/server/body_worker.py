"""The process that checks heavy bodies: what is wrong with one, or nothing. It keeps nothing of them.

length of the limits, limits ─ body ─► nothing, or a `Problem`
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from saccade.errors import RequestError
from saccade.helpers.main import AnswerRefused, limit_memory, serve
from saccade.server.http.body_check import BodyLimits, check, decoded

SECONDS = 5.0
"""Of CPU time for one body: ten times what any within the limits took."""

_LENGTH = struct.Struct(">I")


class Problem(NamedTuple):
    message: str
    code: str | None
    param: str | None


def packed(limits: BodyLimits) -> bytes:
    """What goes before the body."""
    data = msgspec.json.encode(limits)
    return _LENGTH.pack(len(data)) + data


def answer(body: bytes, fds: Sequence[int]) -> bytes:
    start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    view = memoryview(body)
    limits = msgspec.json.decode(view[_LENGTH.size : start], type=BodyLimits)
    try:
        check(decoded(view[start:]), limits)
    except RequestError as error:
        raise AnswerRefused(msgspec.json.encode(Problem(error.message, error.code, error.param))) from None
    return b""


if __name__ == "__main__":
    limit_memory(int(sys.argv[1]))
    serve(answer)
