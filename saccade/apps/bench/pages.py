"""Pages of text for a load on readers of documents: as a JPEG, or in a PDF whose text the server draws.

A page is an A4 sheet: a heading, paragraphs in columns and a table. No two are the same.
"""

from __future__ import annotations

import io
import random
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

SHEET = (595, 842)  # A4, in points
_MARGIN = 48
_COLUMN_GAP = 18
_QUALITY = 90
_HEAD, _BODY = 18, 9  # sizes of text
_LEADING = 1.25
_WIDTH = 0.5  # of a character on average, of its size
_TABLE_ROWS = (5, 12)
_TABLE_COLUMNS = (3, 6)
_SYLLABLES = ("ta", "re", "mi", "no", "la", "ver", "con", "pro", "sen", "tion", "al", "in", "ment")


class Line(NamedTuple):
    """A line of text: its left end on its baseline, in points from the sheet's upper left."""

    x: float
    y: float
    size: int
    text: str


def page_jpeg(size: tuple[int, int], rng: random.Random) -> bytes:
    """A landscape size holds a page of as many words."""
    width, height = size
    scale = (width * height / (SHEET[0] * SHEET[1])) ** 0.5
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for line in _lines((width / scale, height / scale), rng):
        font = _font(max(1, round(line.size * scale)))
        draw.text((line.x * scale, line.y * scale), line.text, "black", font, anchor="ls")
    file = io.BytesIO()
    sheet.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def pages_pdf(pages: int, rng: random.Random) -> bytes:
    """A file of A4 pages."""
    kids = " ".join(f"{4 + 2 * page} 0 R" for page in range(pages))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {pages}/Kids[{kids}]/MediaBox[0 0 {SHEET[0]} {SHEET[1]}]>>".encode(),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for page in range(pages):
        words = "".join(
            f"BT /F {line.size} Tf {line.x:.1f} {SHEET[1] - line.y:.1f} Td ({line.text}) Tj ET\n"
            for line in _lines(SHEET, rng)
        )
        packed = zlib.compress(words.encode())
        head = f"<</Length {len(packed)}/Filter/FlateDecode>>stream\n".encode()
        resources = "/Resources<</Font<</F 3 0 R>>>>"
        objects.append(f"<</Type/Page/Parent 2 0 R/Contents {5 + 2 * page} 0 R{resources}>>".encode())
        objects.append(head + packed + b"\nendstream")
    return _file(objects)


def _file(objects: Sequence[bytes]) -> bytes:
    """A PDF of these objects, numbered from 1; the first is the catalog."""
    data = b"%PDF-1.7\n"
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    count = len(objects) + 1
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    end = f"trailer\n<</Root 1 0 R/Size {count}>>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + f"xref\n0 {count}\n0000000000 65535 f \n{table}{end}".encode()


def _lines(sheet: tuple[float, float], rng: random.Random) -> Iterator[Line]:
    width, height = sheet
    yield Line(_MARGIN, _MARGIN, _HEAD, _sentence(rng, int((width - 2 * _MARGIN) / (_HEAD * _WIDTH))))
    top = _MARGIN + 2 * _HEAD
    bottom = height - _MARGIN
    rows = rng.randint(*_TABLE_ROWS)
    table = bottom - rows * _BODY * _LEADING
    columns = max(1, round(width / 300))
    room = (width - 2 * _MARGIN - (columns - 1) * _COLUMN_GAP) / columns
    for column in range(columns):
        x = _MARGIN + column * (room + _COLUMN_GAP)
        y: float = top
        while y < table - 2 * _BODY:
            if rng.random() < 0.85:  # else a paragraph ends
                yield Line(x, y, _BODY, _sentence(rng, int(room / (_BODY * _WIDTH))))
            y += _BODY * _LEADING
    yield from _table(table, rows, width - 2 * _MARGIN, rng)


def _table(y: float, rows: int, width: float, rng: random.Random) -> Iterator[Line]:
    columns = rng.randint(*_TABLE_COLUMNS)
    for row in range(rows):
        for column in range(columns):
            text = f"{rng.uniform(0, 1e4):,.2f}" if row and column else _word(rng)
            yield Line(_MARGIN + column * width / columns, y + row * _BODY * _LEADING, _BODY, text)


def _sentence(rng: random.Random, characters: int) -> str:
    words = [_word(rng).capitalize()]
    while sum(map(len, words)) + len(words) < characters:
        words.append(_word(rng))
    return " ".join(words)[:characters]


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4)))


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
