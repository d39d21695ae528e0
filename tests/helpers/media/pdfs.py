"""PDFs for tests, written by hand: pages of a colour with a line of text, and files that are meant to hurt."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

Box = tuple[float, float]
LETTER = (612, 792)


def make_pdf(boxes: Sequence[Box] = (LETTER,), *, color: str = "1 0 0", rotate: int = 0, trailer: str = "") -> bytes:
    """Page n says "Page n" at its lower left, over the colour."""
    count = len(boxes)
    kids = " ".join(f"{4 + 2 * index} 0 R" for index in range(count))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {count}/Kids[{kids}]>>".encode(),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for index, (width, height) in enumerate(boxes):
        words = f"{color} rg 0 0 {width} {height} re f BT /F 12 Tf 0 g 10 10 Td (Page {index + 1}) Tj ET".encode()
        page = f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 {width} {height}]/Rotate {rotate}/Contents {5 + 2 * index} 0 R"
        objects += [f"{page}/Resources<</Font<</F 3 0 R>>>>>>".encode(), stream_object(words)]
    return with_objects(objects, trailer)


def with_objects(objects: Sequence[bytes], trailer: str = "") -> bytes:
    """A file of these objects, numbered from 1; the first is the catalog."""
    data = b"%PDF-1.7\n"
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n".encode() + body + b"\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    size = f"trailer\n<</Root 1 0 R/Size {len(objects) + 1}{trailer}>>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + end.encode() + size.encode()


def stream_object(body: bytes, entries: str = "") -> bytes:
    return f"<</Length {len(body)}{entries}>>stream\n".encode() + body + b"\nendstream"


def one_page(content: bytes, entries: str = "") -> bytes:
    """One page with this content stream."""
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<<>>>>"
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Count 1/Kids[3 0 R]>>", page]
    return with_objects([*objects, stream_object(content, entries)])


def encrypted_pdf() -> bytes:
    """Needs a password that nobody has."""
    blank = "00" * 32
    handler = f"/Encrypt<</Filter/Standard/V 1/R 2/P -4/O<{blank}>/U<{blank}>>>/ID[<00><00>]"
    return make_pdf(trailer=handler)


def pdf_with_bomb(megabytes: int) -> bytes:
    """A content stream that unpacks to so much, from a thousandth of it."""
    packer = zlib.compressobj(wbits=-15)
    block = packer.compress(b" " * (16 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return one_page(b"\x78\x9c" + block * (megabytes // 16), "/Filter/FlateDecode")


def pdf_of_many_pages(count: int) -> bytes:
    """All pages are one object."""
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 10 10]>>"
    pages = f"<</Type/Pages/Count {count}/Kids[{'3 0 R ' * count}]>>".encode()
    return with_objects([b"<</Type/Catalog/Pages 2 0 R>>", pages, page])


def recursive_pdf() -> bytes:
    """An object stream that is stored in itself, and a page tree that is its own child."""
    stream = stream_object(b"2 0 <</Type/Pages/Kids[2 0 R]/Count 1>>", "/Type/ObjStm/N 1/First 4/Extends 3 0 R")
    return with_objects([b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Count 2/Kids[2 0 R 2 0 R]>>", stream])


def pdf_url(data: bytes) -> str:
    return f"data:application/pdf;base64,{base64.b64encode(data).decode()}"
