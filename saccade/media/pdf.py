"""PDF pages: their boxes, pixels and text, asked of processes that may die (`pdf_worker`).

No byte of a PDF is parsed in this process. A file that takes too long, too much memory or kills PDFium costs
a worker and its own request.

    request: command, CPU seconds, page, width, height, length, PDF
    reply:   outcome, CPU seconds taken, length, body
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import struct
import subprocess
import sys
import weakref
from dataclasses import dataclass
from enum import IntEnum
from queue import LifoQueue
from typing import NamedTuple

from saccade.errors import RequestError
from saccade.types import Size

REQUEST = struct.Struct(">BdIIII")
REPLY = struct.Struct(">BdI")
COUNT = struct.Struct(">I")
BOX = struct.Struct(">dd")
MAX_TEXT_CHARS = 200_000  # of a page
MEMORY_MB = 1024
SECONDS = 5.0
"""Of CPU time: to read the boxes of a document, and to render or read one page."""
REQUEST_SECONDS = 10.0
"""Of CPU time: after which no more boxes and texts are read for one request."""
_HUNG_SECONDS = 60.0  # of wall time; only a stopped process takes as long
_MAX_PROCESSES = 4
_NO_SIZE = Size(0, 0)
_MAX_REPLY = 1 << 30
_COMMAND = (sys.executable, "-m", "saccade.media.pdf_worker")


class Command(IntEnum):
    BOXES = 0  # reply: the number of pages, and the boxes of the first `page` pages
    RENDER = 1  # reply: RGB bytes of width x height pixels
    TEXT = 2  # reply: the text of a page, UTF-8


class Outcome(IntEnum):
    DONE = 0
    DAMAGED = 1
    ENCRYPTED = 2
    TOO_LONG = 3  # the text of a page
    SLOW = 4  # never sent: the parent's own, as is the next one
    DIED = 5


class Box(NamedTuple):
    """A page's size in points, 1/72 inch, as a viewer shows it."""

    width: float
    height: float


@dataclass
class CpuTime:
    """What the documents of one request may still take. Used by one thread at a time."""

    left: float = REQUEST_SECONDS

    def check(self) -> None:
        if self.left <= 0:
            taken = f"the documents of the request took more than {REQUEST_SECONDS:g} s of CPU time"
            message = f"{taken} to be read; ask for fewer pages or leave text_layer out"
            raise RequestError(message, code="document_too_large")


class Reply(NamedTuple):
    outcome: Outcome
    seconds: float  # of CPU time
    body: bytes


class Boxes(NamedTuple):
    num_pages: int
    boxes: tuple[Box, ...]  # of the first of them


def is_available() -> bool:
    """Whether pypdfium2 is installed. Does not import it."""
    return importlib.util.find_spec("pypdfium2") is not None


class PdfPool:
    """A few workers. They start on demand and end with this object or this process; any thread may ask."""

    def __init__(self, processes: int | None = None, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._free: LifoQueue[_Slot] = LifoQueue()  # the last used first, so that few are started
        for _ in range(processes or min(_MAX_PROCESSES, os.cpu_count() or 1)):
            self._free.put(_Slot())

    def boxes(self, data: bytes, limit: int, time: CpuTime | None = None) -> Boxes:
        """The number of pages, and the boxes of at most `limit` of them."""
        body = self._ask(Command.BOXES, data, limit, time=time)
        (num_pages,) = COUNT.unpack_from(body)
        return Boxes(num_pages, tuple(Box(*box) for box in BOX.iter_unpack(body[COUNT.size :])))

    def render(self, data: bytes, page: int, size: Size) -> bytes:
        """RGB bytes, row by row."""
        return self._ask(Command.RENDER, data, page, size)

    def text(self, data: bytes, page: int, time: CpuTime | None = None) -> str:
        return self._ask(Command.TEXT, data, page, time=time).decode()

    def _ask(
        self, command: Command, data: bytes, page: int, size: Size = _NO_SIZE, time: CpuTime | None = None
    ) -> bytes:
        if not is_available():
            remedy = "the operator installs it with `pip install saccade[pdf]`"
            message = f"PDFs cannot be read here: pypdfium2 is not installed; {remedy}"
            raise RequestError(message, code="unsupported")
        time = time or CpuTime()
        time.check()
        header = REQUEST.pack(command, self._seconds, page, *size, len(data))
        slot = self._free.get()
        try:
            reply = slot.ask(header, data)
        finally:
            self._free.put(slot)
        time.left -= reply.seconds
        if reply.outcome is Outcome.DONE:
            return reply.body
        raise self._error(reply.outcome, command, len(data), page)

    def _error(self, outcome: Outcome, command: Command, length: int, page: int) -> RequestError:
        what = f"the PDF of {length} bytes"
        if command is not Command.BOXES:
            what = f"page {page + 1} of {what}"
        reasons = {
            Outcome.ENCRYPTED: "is encrypted; send it without a password",
            Outcome.TOO_LONG: f"has more than {MAX_TEXT_CHARS} characters of text; leave text_layer out",
            Outcome.SLOW: f"takes more than {self._seconds:g} s of CPU time; send pictures of it instead",
            Outcome.DIED: f"cannot be read: it is damaged or needs more than {MEMORY_MB} MiB",
        }
        reason = reasons.get(outcome, "is damaged or cut short and cannot be read")
        return RequestError(f"{what} {reason}", code="invalid_document")


class _Slot:
    """A worker that is started on demand and again after it has ended. Used by one thread at a time."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None

    def ask(self, header: bytes, data: bytes) -> Reply:
        try:
            if self._worker is None or self._worker.has_ended:
                self._worker = _Worker()
            return self._worker.ask(header, data)
        except OSError:  # it has ended, says nothing, or cannot be started
            worker = self._worker
            self._worker = None
            is_slow = worker is not None and worker.end() == -signal.SIGPROF
            return Reply(Outcome.SLOW if is_slow else Outcome.DIED, 0.0, b"")
        except BaseException:  # the caller gave up: the next one must not read its reply
            self._worker = None
            raise


class _Worker:
    """A running pdf_worker and the socket to it. It ends when its socket closes or at its own limits."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                _COMMAND,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.settimeout(_HUNG_SECONDS)
        self._connection = ours
        self._end = weakref.finalize(self, _end, self._child, ours)  # at the latest with this object

    @property
    def has_ended(self) -> bool:
        """Such as by the kernel, for want of memory, while it waited for work."""
        return self._child.poll() is not None

    def ask(self, header: bytes, data: bytes) -> Reply:
        """Raises OSError if the process has ended."""
        self._connection.sendall(header)
        self._connection.sendall(data)
        outcome, seconds, length = REPLY.unpack(self._read(REPLY.size))
        if length > _MAX_REPLY:
            raise ConnectionError(f"the process that reads PDFs sends {length} bytes")
        return Reply(Outcome(outcome), seconds, self._read(length))

    def end(self) -> int | None:
        """The exit status: what ended it, if it had ended already."""
        self._connection.close()
        try:
            self._child.wait(1.0)
        except subprocess.TimeoutExpired:
            self._end()
        return self._child.returncode

    def _read(self, length: int) -> bytes:
        body = bytearray(length)
        view = memoryview(body)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise ConnectionError("the process that reads PDFs has ended")
            view = view[count:]
        return bytes(body)


def _end(child: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    child.kill()
    child.wait()


PDFS = PdfPool()
"""Of this process."""
