"""PDFs, read by PDFium: their boxes, pixels and text. Only `media_worker` imports this."""

from __future__ import annotations

import struct
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import numpy as np

from saccade.media.decode import Pixels
from saccade.media.pdf import MAX_TEXT_CHARS, Boxes

if TYPE_CHECKING:
    import pypdfium2  # type: ignore[import-untyped, import-not-found, unused-ignore]

_INVISIBLE = {ord(character): None for character in "\r\0\ufffe\uffff"}
_DAMAGED = "is damaged or cut short and cannot be read"


class UnreadablePdf(Exception):
    """Why a document or page cannot be read: the rest of a sentence about it."""


class PdfReader:
    """Keeps the document opened last: its pages are usually asked for one after the other."""

    def __init__(self) -> None:
        self._data: bytes | None = None
        self._document: pypdfium2.PdfDocument | None = None

    def boxes(self, data: bytes, limit: int) -> Boxes:
        try:
            document = self._opened(data)
            count = len(document)
            sizes = tuple(document.get_page_size(index) for index in range(min(count, limit)))
            return Boxes(count, sizes)
        except _faults() as error:
            raise UnreadablePdf(_DAMAGED) from error

    def text(self, data: bytes, index: int) -> str:
        try:
            with closing(self._opened(data)[index]) as page, closing(page.get_textpage()) as text:
                if text.count_chars() > MAX_TEXT_CHARS:
                    raise UnreadablePdf(
                        f"has more than {MAX_TEXT_CHARS} characters of text; leave text_layer out"
                    )
                content = str(text.get_text_range(errors="ignore"))
        except _faults() as error:
            raise UnreadablePdf(_DAMAGED) from error
        return content.translate(_INVISIBLE).strip().encode("utf-8", "replace").decode()

    def render(self, data: bytes, index: int, into: Pixels) -> Pixels:
        """A page as RGB of the size of `into`."""
        import pypdfium2
        import pypdfium2.raw as pdfium  # type: ignore[import-untyped, import-not-found, unused-ignore]

        height, width, _ = into.shape
        flags = pdfium.FPDF_ANNOT | pdfium.FPDF_REVERSE_BYTE_ORDER
        try:
            with closing(self._opened(data)[index]) as page:
                bitmap = pypdfium2.PdfBitmap.new_native(
                    width, height, pdfium.FPDFBitmap_BGR, rev_byteorder=True
                )
                bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
                where = (bitmap, page, 0, 0, width, height, 0, flags)
                pdfium.FPDF_RenderPageBitmap(*where)
                if page.formenv:
                    pdfium.FPDF_FFLDraw(page.formenv, *where)
        except _faults() as error:
            raise UnreadablePdf(_DAMAGED) from error
        rows = np.frombuffer(bitmap.buffer, np.uint8).reshape(height, bitmap.stride)
        np.copyto(into, rows[:, : width * 3].reshape(into.shape))
        return into

    def close(self) -> None:
        if self._document is not None:
            self._document.close()
        self._document = self._data = None

    def _opened(self, data: bytes) -> pypdfium2.PdfDocument:
        if self._data is not data:
            self.close()
            self._document = _opened(data)
            self._data = data
        return self._document


def _opened(data: bytes) -> pypdfium2.PdfDocument:
    import pypdfium2
    import pypdfium2.raw as pdfium

    # PDFium keeps its last error, and not every failure sets one: this is a fresh "bad format".
    pdfium.FPDF_LoadMemDocument(b"", 0, None)
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code in (pdfium.FPDF_ERR_PASSWORD, pdfium.FPDF_ERR_SECURITY):
            raise UnreadablePdf("is encrypted; send it without a password") from None
        raise
    with suppress(pypdfium2.PdfiumError):
        document.init_forms()  # so that filled-in fields are drawn
    return document


def _faults() -> tuple[type[Exception], ...]:
    import pypdfium2

    return (pypdfium2.PdfiumError, IndexError, ValueError, struct.error)
