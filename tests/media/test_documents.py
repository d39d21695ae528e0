"""PDFs: boxes, pixels and text come from a process that may die, and what hurts it is one clear error."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import RequestError
from saccade.media import pdf
from saccade.media.decode import decode
from saccade.media.documents import PdfPage, load_document, read_pages
from saccade.media.pdf import REQUEST_SECONDS, Box, CpuTime, PdfPool
from saccade.options import MediaPolicy, Options
from saccade.types import Geometry, Grid, Header, MediaItem, Size
from tests.helpers import pdfs
from tests.helpers.pdfs import LETTER, make_pdf, pdf_url

POLICY = MediaPolicy.of(Options(max_document_pages=50, max_document_bytes=1 << 20))
PDF = make_pdf([LETTER, (200, 100)])


def refusal(source: Any, **how: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        load_document(source, POLICY, **how)
    return caught.value


def sizes(source: Any, **how: Any) -> list[Box]:
    return [page.box for page in load_document(source, POLICY, **how).pages]


def test_every_form_of_a_pdf_gives_the_same_pages(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(PDF)
    forms = [PDF, bytearray(PDF), path, str(path), pdf_url(PDF)]
    assert [sizes(form) for form in forms] == [[LETTER, (200, 100)]] * 5
    assert sizes(pdf_url(PDF).partition(",")[2], allow_paths=False) == [LETTER, (200, 100)]


def test_a_box_is_as_a_viewer_shows_it() -> None:
    assert sizes(make_pdf(rotate=90)) == [(792, 612)]


def test_a_page_is_rendered_as_decoding_an_image() -> None:
    header = Header("pdf", Size(401, 200), 1, 1, "RGB")
    geometry = Geometry(Size(401, 200), Grid(1, 2, 2), 1, 1)
    pixels = decode(MediaItem(b"", "image", PDF, header, geometry, page=1))
    assert pixels.shape == (200, 401, 3)
    assert (pixels[:100] == [255, 0, 0]).all() and (pixels[150:] == 0).all(axis=2).any(), "red, with dark text"


def test_the_text_layer_comes_page_by_page() -> None:
    assert load_document(PDF, POLICY, pages="2,1", text_layer=True).texts == ("Page 2", "Page 1")


@pytest.mark.parametrize(
    ("given", "indices"),
    [("2", [1]), ("1-3,7", [0, 1, 2, 6]), (" 6- ", [5, 6, 7]), ("3,1-3", [2, 0, 1]), ("8-8", [7])],
)
def test_page_ranges(given: str, indices: list[int]) -> None:
    assert read_pages(given, 8) == indices


@pytest.mark.parametrize("given", ["", "a", "1,", "-3", "1--2", "1-2-3", 3, [1], "1," * 900, "٣"])
def test_other_page_ranges_are_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="pages must be a string"):
        read_pages(given, 8)


@pytest.mark.parametrize("given", ["0", "9", "3-2", "7-9", "9-"])
def test_pages_that_are_not_there_are_refused_with_the_count(given: str) -> None:
    with pytest.raises(RequestError, match="pages 1 to 8"):
        read_pages(given, 8)


@pytest.mark.parametrize(
    ("box", "max_pixels", "size"),
    [
        (LETTER, 10**8, (1224, 1584)),
        (LETTER, 250_000, (439, 568)),
        ((14400, 14400), 10**8, (2000, 2000)),
        ((1e6, 5), 10**8, (894427, 4)),
        ((0.1, 0.1), 10**8, (1, 1)),
    ],
)
def test_a_rendered_page_stays_within_the_pixels(box: Box, max_pixels: int, size: Size) -> None:
    found = PdfPage(b"", b"", 0, Box(*box)).size(POLICY.document, max_pixels)
    assert found == size and found.width * found.height <= min(max_pixels, 4_000_000)


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"", "unsupported_document_media_type", "empty (0 bytes)"),
        (b"\x1f\x8b junk", "unsupported_document_media_type", "gzip data"),
        (b"%PDF-1.7 junk", "invalid_document", "damaged or cut short"),
        (PDF[:-150], "invalid_document", "damaged or cut short"),
        (bytes(2 << 20), "document_too_large", "max_document_bytes"),
        (pdfs.encrypted_pdf(), "invalid_document", "is encrypted"),
        (pdfs.recursive_pdf(), "invalid_document", "damaged"),
        (pdfs.pdf_of_many_pages(100_000), "document_too_large", "100000 pages"),
        (make_pdf([(1e9, 1e9)]), "invalid_document", "1e+09x1e+09 points"),
        (pdfs.with_objects([b"<</Type/Catalog/Pages 2 0 R>>", b"<</Kids[]/Count 0>>"]), "invalid_document", "damaged"),
    ],
    ids=["empty", "gzip", "junk", "truncated", "large", "encrypted", "recursive", "many pages", "huge box", "no pages"],
)
def test_a_hostile_pdf_is_one_clear_error(data: bytes, code: str, words: str) -> None:
    error = refusal(data)
    assert error.code == code and words in error.message, error.message


@pytest.mark.parametrize("text", ["data:application/pdf,x", "not base64!", pdf_url(PDF)[:-1]])
def test_text_that_is_no_base64_is_refused(text: str) -> None:
    error = refusal(text, allow_paths=False)
    assert error.code == "invalid_document" and "the document's data: URL" in error.message


def test_more_pages_than_images_are_allowed_are_refused() -> None:
    assert "choose fewer with pages" in refusal(make_pdf([LETTER] * 3), max_images=2).message
    assert len(sizes(make_pdf([LETTER] * 3), max_images=2, pages="2-")) == 2


def test_a_bomb_ends_its_worker_and_the_next_page_is_rendered() -> None:
    bomb = pdfs.pdf_with_bomb(1200)
    pool = PdfPool(1)
    with pytest.raises(RequestError, match="needs more than 1024 MiB"):
        pool.render(bomb, 0, Size(10, 10))
    assert len(pool.render(PDF, 0, Size(10, 10))) == 300


def test_a_slow_page_is_ended() -> None:
    slow = pdfs.one_page(b"0 0 m 600 700 l 3 4 l h f\n" * 200_000)
    with pytest.raises(RequestError, match=r"page 1 .* more than 0\.05 s of CPU time"):
        PdfPool(1, seconds=0.05).render(slow, 0, Size(1500, 1500))


def test_a_worker_that_died_between_two_files_hurts_none() -> None:
    pool = PdfPool(1)
    assert pool.boxes(PDF, 9).num_pages == 2
    slot = pool._free.queue[0]
    assert slot._worker is not None
    os.kill(slot._worker._child.pid, signal.SIGSEGV)
    slot._worker._child.wait()
    assert pool.boxes(PDF, 9).num_pages == 2


def test_the_time_that_reading_takes_is_counted() -> None:
    time = CpuTime()
    long = pdfs.one_page(b"0 0 m 600 700 l 3 4 l h f\n" * 40_000)
    load_document(long, POLICY, text_layer=True, time=time)
    assert 0 < time.left < REQUEST_SECONDS


def test_without_pdfium_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "is_available", lambda: False)
    assert "pip install saccade[pdf]" in refusal(PDF).message


def test_this_process_never_loads_pdfium() -> None:
    assert sizes(PDF) and not [name for name in sys.modules if name.startswith("pypdfium2")]


def test_one_file_has_one_digest_and_shares_its_bytes() -> None:
    first, second = load_document(PDF, POLICY).pages
    assert first.digest == second.digest and first.data is second.data
    policy = replace(POLICY, document=replace(POLICY.document, dpi=72))
    assert first.size(policy.document, 10**9) == LETTER
