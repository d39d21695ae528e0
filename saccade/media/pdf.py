"""PDF pages: their boxes and texts, asked of processes that may die. No PDF is parsed in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple, TypeVar

import msgspec

from saccade.errors import RequestError
from saccade.helpers.process import thread_seconds
from saccade.media.jobs import Job, PdfBoxes, PdfText
from saccade.media.media_workers import MEDIA, Fault, MediaWorkers, Task

MAX_TEXT_CHARS = 200_000  # of a page
MEMORY_MB = 1024
SECONDS = 5.0
"""CPU time to read the boxes of a document, and to render or read one page."""
REQUEST_SECONDS = 10.0
"""CPU time after which no more boxes and texts are read for one request."""

Result = TypeVar("Result")


class Box(NamedTuple):
    """A page's size in points, 1/72 inch, as a viewer shows it."""

    width: float
    height: float


@dataclass
class CpuTime:
    """What the documents of one request may still take. Used by one thread at a time."""

    seconds: float = REQUEST_SECONDS

    def check(self) -> None:
        if self.seconds <= 0:
            reason = f"the documents of the request took more than {REQUEST_SECONDS:g} s of CPU time"
            message = f"{reason} to be read; ask for fewer pages or leave text_layer out"
            raise RequestError(message, code="document_too_large")


class Boxes(NamedTuple):
    num_pages: int
    boxes: tuple[Box, ...]  # of the first of them


def check_available() -> None:
    """RequestError unless pypdfium2 is installed. Does not import it."""
    if find_spec("pypdfium2") is None:
        remedy = "the operator installs it with `pip install saccade[pdf]`"
        message = f"PDFs cannot be read here: pypdfium2 is not installed; {remedy}"
        raise RequestError(message, code="unsupported")


class Pdf:
    """A document, read by workers."""

    def __init__(self, data: bytes, time: CpuTime | None = None, workers: MediaWorkers = MEDIA) -> None:
        """`time`: of all documents of a request."""
        self.data = data
        self._time = time or CpuTime()
        self._workers = workers

    def boxes(self, limit: int) -> Boxes:
        """The number of pages, and the boxes of at most `limit` of them."""
        return self._ask(PdfBoxes(limit), Boxes, f"the PDF of {len(self.data)} bytes")

    def text(self, page: int) -> str:
        return self._ask(PdfText(page), str, f"page {page + 1} of the PDF of {len(self.data)} bytes")

    def _ask(self, job: Job, kind: type[Result] | Callable[..., Result], what: str) -> Result:
        check_available()
        self._time.check()
        fault = pdf_fault(what, SECONDS)
        task = Task(job, self.data, SECONDS, MEMORY_MB << 20, fault, keep=True)
        start = thread_seconds()
        try:
            body = self._workers.ask(task)
        finally:
            self._time.seconds -= thread_seconds() - start
        return msgspec.msgpack.decode(body, type=kind)


def pdf_fault(what: str, seconds: float) -> Fault:
    return Fault(
        what,
        "invalid_document",
        slow=f"takes more than {seconds:g} s of CPU time; send pictures of it instead",
        died=f"cannot be read: it is damaged or needs more than {MEMORY_MB} MiB",
    )
