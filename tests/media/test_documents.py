"""PDFs: boxes, pixels and text come from a process that may die, and what hurts it is one clear error."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from saccade.errors import RequestError
from saccade.media import decoding, pdf
from saccade.media.decoding import MediaDecoder
from saccade.media.documents import PdfPage, load_document, read_pages
from saccade.media.media_workers import MediaWorkers, Ticket
from saccade.media.pdf import REQUEST_SECONDS, Box, CpuTime, Pdf
from saccade.options.engine import MediaPolicy, Options
from saccade.types.media import Geometry, Grid, Header, MediaItem, Size
from tests.helpers.media import pdfs
from tests.helpers.media.pdfs import LETTER, make_pdf, pdf_url

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


def rendered(data: bytes, size: Size, decoder: MediaDecoder, page: int = 0) -> bytes:
    header = Header("pdf", size, 1, 1, "RGB")
    geometry = Geometry(size, Grid(1, 2, 2), 1, 1)
    item = MediaItem(b"page", "image", data, header, geometry, page=page)
    with decoder.pixels(item, Ticket()) as pixels:
        return pixels.tobytes()


def test_a_page_is_rendered_as_decoding_an_image() -> None:
    decoder = MediaDecoder(1, 1, isolated=False, max_seconds=30)
    pixels = np.frombuffer(rendered(PDF, Size(401, 200), decoder, page=1), np.uint8).reshape(200, 401, 3)
    decoder.close()
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
    decoder = MediaDecoder(1, 1, isolated=False, max_seconds=30)
    with pytest.raises(RequestError, match=r"needs more than 1024 MiB|takes more than 5 s"):
        rendered(pdfs.pdf_with_bomb(1200), Size(10, 10), decoder)
    assert len(rendered(PDF, Size(10, 10), decoder)) == 300
    decoder.close()


def test_a_slow_page_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "SECONDS", 0.05)
    slow = pdfs.one_page(b"0 0 m 600 700 l 3 4 l h f\n" * 200_000)
    decoder = MediaDecoder(1, 1, isolated=False, max_seconds=30)
    with pytest.raises(RequestError, match=r"page 1 .* more than 0\.05 s of CPU time"):
        rendered(slow, Size(1500, 1500), decoder)
    decoder.close()


def test_a_worker_that_died_between_two_files_hurts_none() -> None:
    workers = MediaWorkers(1)
    document = Pdf(PDF, workers=workers)
    assert document.boxes(9).num_pages == 2
    (pid,) = workers.pids
    os.kill(pid, signal.SIGSEGV)
    psutil.Process(pid).wait()
    assert document.boxes(9).num_pages == 2
    workers.close()


def test_the_time_that_reading_takes_is_counted() -> None:
    time = CpuTime()
    long = pdfs.one_page(b"0 0 m 600 700 l 3 4 l h f\n" * 40_000)
    load_document(long, POLICY, text_layer=True, time=time)
    assert 0 < time.seconds < REQUEST_SECONDS


def test_without_pdfium_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "find_spec", lambda name: None)
    assert "pip install saccade[pdf]" in refusal(PDF).message


def test_this_process_never_loads_pdfium() -> None:
    assert sizes(PDF) and not [name for name in sys.modules if name.startswith("pypdfium2")]


def test_one_file_has_one_digest_and_shares_its_bytes() -> None:
    first, second = load_document(PDF, POLICY).pages
    assert first.digest == second.digest and first.data is second.data
    policy = replace(POLICY, document=replace(POLICY.document, dpi=72))
    assert first.size(policy.document, 10**9) == LETTER
