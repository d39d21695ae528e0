"""The requests of a batch file, read once, in a helper process. Bodies stay in the file, undecoded."""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from saccade.apps.batch.line_helper import URLS, Piece, PieceStart, Place
from saccade.errors import ConfigError
from saccade.helpers.process import HelperProcess, Outcome, Reply
from saccade.util.plain_files import open_plain

_SECONDS = 10.0  # of CPU time for a piece; the longest line takes one or two
_REASONS = {
    Outcome.SLOW: f"they take more than {_SECONDS:.0f} s of processor time",
    Outcome.MEMORY: "one takes more memory than it may",
}
_NUMBERS = len(Place._fields) - 1  # of a place; its problem is kept apart

InTurn = Callable[[Callable[[], Reply]], Reply]
"""Runs the work when it is this batch's turn."""


class BatchRequest(NamedTuple):
    line: int  # from 1
    custom_id: bytes  # as JSON
    url: str
    body: bytes  # JSON
    problem: str | None = None  # why it cannot be sent


class BatchLines:
    """Where the requests of an open file are: 48 bytes for each."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._places = tuple(array("Q") for _ in range(_NUMBERS))
        self._problems: dict[int, str] = {}  # by line
        self._texts: dict[str, str] = {}  # of problems, which are few

    def __len__(self) -> int:
        return len(self._places[0])

    def add(self, piece: Piece) -> None:
        for place in piece.places:
            *numbers, problem = place
            for column, number in zip(self._places, numbers, strict=True):
                column.append(number)
            if problem:
                self._problems[place.line] = self._texts.setdefault(problem, problem)

    def requests(self, skip: Collection[int]) -> Iterator[BatchRequest]:
        """Those without the lines that are done."""
        for row in range(len(self)):
            place = self._place(row)
            if place.line not in skip:
                yield self._request(place)

    def custom_id(self, line: int) -> str | None:
        """ConfigError if the file has no such request."""
        row = bisect_left(self._places[0], line)
        if row == len(self) or self._places[0][row] != line:
            raise ConfigError(f"the input has no request in line {line}")
        custom_id: str | None = json.loads(self._custom_id(self._place(row)))
        return custom_id

    def _place(self, row: int) -> Place:
        numbers = [column[row] for column in self._places]
        return Place._make((*numbers, self._problems.get(numbers[0], "")))

    def _request(self, place: Place) -> BatchRequest:
        custom_id = self._custom_id(place)
        if place.problem:
            return BatchRequest(place.line, custom_id, "", b"", f"line {place.line}: {place.problem}")
        body = os.pread(self._fd, place.body_length, place.body_offset)
        return BatchRequest(place.line, custom_id, URLS[place.url], body)

    def _custom_id(self, place: Place) -> bytes:
        return os.pread(self._fd, place.id_length, place.id_offset) or b"null"


def line_helper() -> HelperProcess:
    """One that leaves the size of a body to the server."""
    return HelperProcess("saccade.apps.batch.line_helper")


@contextmanager
def batch_lines(
    path: Path, helper: HelperProcess, max_lines: float = math.inf, in_turn: InTurn = lambda work: work()
) -> Iterator[BatchLines]:
    """ConfigError if the file cannot be read, or has too many lines."""
    try:
        stream = open_plain(path)
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from None
    with stream:
        lines = BatchLines(stream.fileno())
        start = PieceStart(1, 0)
        is_last = False
        while not is_last:
            body = msgspec.msgpack.encode(start)
            reply = in_turn(partial(helper.ask, [body], _SECONDS, [stream.fileno()]))
            if reply.outcome is not Outcome.DONE:
                reason = _REASONS.get(reply.outcome, "the process that reads them has ended")
                raise ConfigError(f"the lines from {start.line} on cannot be read: {reason}")
            piece = msgspec.msgpack.decode(reply.body, type=Piece)
            lines.add(piece)
            start = piece.end
            is_last = piece.is_last
            if start.line - 1 > max_lines:
                raise ConfigError(f"the file has more than {max_lines} lines; split it")
        yield lines
