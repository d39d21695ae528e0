"""Document loading: any object that a caller may pass becomes pages with their boxes. Renders nothing."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from saccade.errors import RequestError, quoted
from saccade.media.load import decode_data_url, read_file
from saccade.media.media_workers import MEDIA, MediaWorkers
from saccade.media.pdf import Box, CpuTime, Pdf
from saccade.media.probe import guess_format
from saccade.options.engine import DocumentPolicy, MediaPolicy
from saccade.types.media import Size

_POINTS_PER_INCH = 72
_MAX_BOX = 1e6  # points
_START_BYTES = 1024  # in which `%PDF-` may stand, as viewers allow
_MAX_RANGE_CHARS = 1000
_RANGE = re.compile(r"([0-9]{1,9})(?:(-)([0-9]{1,9})?)?")


@dataclass(frozen=True, slots=True, eq=False)
class PdfPage:
    """One page, not rendered yet."""

    data: bytes  # of the whole PDF, shared by its pages
    digest: bytes  # SHA-256 of it
    index: int  # from 0
    box: Box

    def size(self, policy: DocumentPolicy, max_pixels: int) -> Size:
        """The size in pixels: at the deployment's resolution, or smaller to stay within `max_pixels`."""
        scale = policy.dpi / _POINTS_PER_INCH
        area = self.box.width * self.box.height * scale**2
        scale *= min(1.0, math.sqrt(min(policy.max_page_pixels, max_pixels) / area))
        return Size(max(1, int(self.box.width * scale)), max(1, int(self.box.height * scale)))


class Document(NamedTuple):
    pages: tuple[PdfPage, ...]  # those asked for, in the order asked for
    texts: tuple[str, ...]  # of each page, if the text layer was asked for


def load_document(
    source: Any,
    policy: MediaPolicy,
    *,
    pages: Any = None,
    text_layer: bool = False,
    allow_paths: bool = True,
    max_images: float = math.inf,
    num_before: int = 0,
    time: CpuTime | None = None,
    workers: MediaWorkers = MEDIA,
) -> Document:
    """A PDF as a path, bytes, a data: URL or bare base64. `pages` is a string such as "1-3,7"; None: all.

    `allow_paths=False` is for strings of clients. `num_before` pages of other documents count for
    `max_images` too, and `time` is that of all documents of a request.
    """
    data = _bytes(source, policy, allow_paths)
    pdf = Pdf(data, time, workers)
    limit = policy.document.max_pages
    count, boxes = pdf.boxes(limit)
    if count > limit:
        limit_text = f"at most {limit} are allowed (max_document_pages)"
        raise RequestError(f"the PDF has {count} pages, and {limit_text}", code="document_too_large")
    indices = range(count) if pages is None else read_pages(pages, count)
    if num_before + len(indices) > max_images:
        before = f" after {num_before} of other documents" if num_before else ""
        limit_text = f"at most {max_images} images per prompt are allowed"
        remedy = f"(limit_mm_per_prompt image={max_images}); choose fewer with pages"
        message = f"{len(indices)} pages of the PDF are asked for{before} and {limit_text} {remedy}"
        raise RequestError(message, code="document_too_large")
    digest = hashlib.sha256(data).digest()
    pdf_pages = tuple(PdfPage(data, digest, index, _checked(boxes[index], index)) for index in indices)
    texts = tuple(pdf.text(index) for index in indices) if text_layer else ()
    return Document(pdf_pages, texts)


def read_pages(pages: Any, count: int) -> list[int]:
    """Indices from 0, of pages counted from 1: "2", "1-3,7" or "5-"."""
    parts = pages.split(",") if isinstance(pages, str) and len(pages) <= _MAX_RANGE_CHARS else []
    indices: dict[int, None] = {}  # in order, each page once
    for part in parts:
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            parts = []
            break
        first = int(match[1])
        last = first if match[2] is None else int(match[3] or count)
        if not 1 <= first <= last <= count:
            message = f"pages asks for {quoted(part.strip())}, but the PDF has the pages 1 to {count}"
            raise RequestError(message, code="invalid_document")
        indices |= dict.fromkeys(range(first - 1, last))
    if not parts:
        message = f'pages must be a string such as "2", "1-3,7" or "5-", not {quoted(pages)}'
        raise RequestError(message, code="invalid_document")
    return list(indices)


def check_document_bytes(count: int, policy: MediaPolicy) -> None:
    if count > policy.document.max_bytes:
        limit = f"at most {policy.document.max_bytes} are allowed (max_document_bytes)"
        raise RequestError(f"the document has {count} bytes, and {limit}", code="document_too_large")


def decode_document(text: str, policy: MediaPolicy) -> bytes:
    """The bytes of a data: URL or of bare base64."""
    check_document_bytes(len(text) // 4 * 3, policy)
    url = text if text[:5].lower() == "data:" else f"data:;base64,{text}"
    try:
        return decode_data_url(url, replace(policy, max_image_bytes=policy.document.max_bytes))
    except RequestError as error:
        message = error.message.replace("the picture's", "the document's", 1)
        raise RequestError(message, code="invalid_document") from None


def is_pdf(data: bytes) -> bool:
    return b"%PDF-" in data[:_START_BYTES]


def _bytes(source: Any, policy: MediaPolicy, allow_paths: bool) -> bytes:
    if isinstance(source, (str, Path)) and allow_paths and str(source)[:5].lower() != "data:":
        what = ("document", "invalid_document")
        data = read_file(source, lambda size: check_document_bytes(size, policy), *what)
    elif isinstance(source, str):
        data = decode_document(source, policy)
    elif isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
    else:
        message = f"a document is a path, bytes or a data: URL, not {type(source).__name__}"
        raise RequestError(message, code="invalid_document")
    check_document_bytes(len(data), policy)
    if not is_pdf(data):
        content = "empty (0 bytes)" if not data else guess_format(data)
        remedy = "send PDFs here, pictures and text as parts of their own"
        raise RequestError(f"the document is {content}; {remedy}", code="unsupported_document_media_type")
    return data


def _checked(box: Box, index: int) -> Box:
    if not all(0 < side <= _MAX_BOX for side in box):  # also false for NaN
        size = f"{box.width:g}x{box.height:g} points"
        message = f"page {index + 1} of the PDF has a box of {size}, which is no page"
        raise RequestError(message, code="invalid_document")
    return box
