"""The process that reads PDFs: `python -m saccade.media.pdf_worker`, with a socket as its stdin.

PDFium is a C++ parser of hostile bytes, so it runs here alone. The process limits its own CPU time and
memory; a file that needs more, or that PDFium fails on, ends it, and the parent starts another one.
"""

from __future__ import annotations

import resource
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import BinaryIO, NamedTuple

import pypdfium2  # type: ignore[import-untyped, import-not-found, unused-ignore]
import pypdfium2.raw as pdfium  # type: ignore[import-untyped, import-not-found, unused-ignore]

from saccade.media.pdf import BOX, COUNT, MAX_TEXT_CHARS, MEMORY_MB, REPLY, REQUEST, Command, Outcome

_INVISIBLE = {ord(character): None for character in "\r\0\ufffe\uffff"}


class Request(NamedTuple):
    command: int
    seconds: float
    page: int
    width: int
    height: int
    data: bytes


class _Refused(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.name)
        self.outcome = outcome


class _Documents:
    """The document opened last: its pages are usually asked for one after the other."""

    def __init__(self) -> None:
        self._data: bytes | None = None
        self._document: pypdfium2.PdfDocument | None = None

    def opened(self, data: bytes) -> pypdfium2.PdfDocument:
        if self._data != data:
            self.close()
            self._document = _opened(data)
            self._data = data
        return self._document

    def close(self) -> None:
        if self._document is not None:
            self._document.close()
        self._document = self._data = None


def _opened(data: bytes) -> pypdfium2.PdfDocument:
    # PDFium keeps its last error, and not every failure sets one: this is a fresh "bad format".
    pdfium.FPDF_LoadMemDocument(b"", 0, None)
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        is_encrypted = error.err_code in (pdfium.FPDF_ERR_PASSWORD, pdfium.FPDF_ERR_SECURITY)
        raise _Refused(Outcome.ENCRYPTED if is_encrypted else Outcome.DAMAGED) from None
    with suppress(pypdfium2.PdfiumError):
        document.init_forms()  # so that filled-in fields are drawn
    return document


def _boxes(document: pypdfium2.PdfDocument, limit: int) -> bytes:
    count = len(document)
    sizes = (document.get_page_size(index) for index in range(min(count, limit)))
    return COUNT.pack(count) + b"".join(BOX.pack(*size) for size in sizes)


def _rendered(document: pypdfium2.PdfDocument, request: Request) -> bytes:
    size = (request.width, request.height)
    flags = pdfium.FPDF_ANNOT | pdfium.FPDF_REVERSE_BYTE_ORDER
    with closing(document[request.page]) as page:
        bitmap = pypdfium2.PdfBitmap.new_native(*size, pdfium.FPDFBitmap_BGR, rev_byteorder=True)
        bitmap.fill_rect((255, 255, 255, 255), 0, 0, *size)
        where = (bitmap, page, 0, 0, *size, 0, flags)
        pdfium.FPDF_RenderPageBitmap(*where)
        if page.formenv:
            pdfium.FPDF_FFLDraw(page.formenv, *where)
    pixels = memoryview(bitmap.buffer).cast("B")
    row = request.width * 3
    if bitmap.stride == row:
        return bytes(pixels)
    starts = range(0, bitmap.stride * request.height, bitmap.stride)
    return b"".join(pixels[start : start + row] for start in starts)


def _text(document: pypdfium2.PdfDocument, index: int) -> bytes:
    with closing(document[index]) as page, closing(page.get_textpage()) as text:
        if text.count_chars() > MAX_TEXT_CHARS:
            raise _Refused(Outcome.TOO_LONG)
        found = str(text.get_text_range(errors="ignore"))
    return found.translate(_INVISIBLE).strip().encode("utf-8", "replace")


def _answer(documents: _Documents, request: Request) -> tuple[Outcome, bytes]:
    try:
        document = documents.opened(request.data)
        if request.command == Command.BOXES:
            return Outcome.DONE, _boxes(document, request.page)
        if request.command == Command.RENDER:
            return Outcome.DONE, _rendered(document, request)
        return Outcome.DONE, _text(document, request.page)
    except _Refused as refused:
        return refused.outcome, b""
    except (pypdfium2.PdfiumError, IndexError, ValueError, struct.error):
        return Outcome.DAMAGED, b""


def _requests(stream: BinaryIO) -> Iterator[Request]:
    while len(header := stream.read(REQUEST.size)) == REQUEST.size:
        command, seconds, page, width, height, length = REQUEST.unpack(header)
        yield Request(command, seconds, page, width, height, stream.read(length))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB << 20, MEMORY_MB << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    documents = _Documents()
    with (
        socket.socket(fileno=0) as connection,
        connection.makefile("rb") as stream,
        suppress(ConnectionError),
    ):
        for request in _requests(stream):
            before = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, request.seconds)  # of CPU time; its signal ends the process
            outcome, body = _answer(documents, request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(REPLY.pack(outcome, time.process_time() - before, len(body)) + body)


if __name__ == "__main__":
    main()
