"""Forms with a file: any chunks give the same result, and what is broken or too large is refused."""

from __future__ import annotations

import pytest

from saccade.server.errors import ApiError
from saccade.server.http.multipart import MultipartReader

TYPE = "multipart/form-data; boundary=xYz"
DATA = b"line 1\r\n--xY\r\n-\n\x00\xff\r\n"


def part(name: str, value: bytes, more: str = "") -> bytes:
    return (
        b'--xYz\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n' % (name.encode(), more.encode())
        + value
        + b"\r\n"
    )


FORM = part("purpose", b"batch") + part("file", DATA, '; filename="in.jsonl"') + b"--xYz--\r\n"


def read(form: bytes, size: int, kind: str = TYPE) -> tuple[MultipartReader, bytes]:
    reader = MultipartReader(kind)
    return reader, b"".join(reader.take(form[at : at + size]) for at in range(0, len(form), size))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_chunks_of_any_size_give_the_file_and_the_fields(size: int) -> None:
    reader, data = read(FORM, size)
    assert data == DATA and reader.filename == "in.jsonl" and reader.is_complete
    assert reader.fields == {"purpose": b"batch"}


def test_the_file_may_come_first_and_be_empty() -> None:
    form = part("file", b"", '; filename="a"') + part("purpose", b"batch") + b"--xYz--"
    reader, data = read(form, 5, 'multipart/form-data; boundary="xYz"')
    assert data == b"" and reader.is_complete and reader.fields == {"purpose": b"batch"}


def test_a_form_without_its_end_is_not_complete() -> None:
    assert not read(FORM[:-6], 10)[0].is_complete


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (part("purpose", b"x" * 9000), "more than 8192 bytes"),
        (b"--xYz\r\n" + b"a" * 9000, "headers of a part"),
        (b"--xYz\r\nX: y\r\n\r\n", "no name"),
        (b'--xYz\r\nX: Content-Disposition: form-data; name="a"\r\n\r\n', "no name"),  # or many tries in one line
        (part("a", b"") * 17, "more than 16 parts"),
        (part("file", b"") * 2, "two files"),
    ],
)
@pytest.mark.parametrize("size", [100, 100_000])
def test_what_is_broken_or_too_large_is_refused(form: bytes, why: str, size: int) -> None:
    with pytest.raises(ApiError, match=why) as error:
        read(form, size)
    assert error.value.status == 400


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "text/plain; boundary=x"])
def test_other_types_are_refused(kind: str) -> None:
    with pytest.raises(ApiError) as error:
        MultipartReader(kind)
    assert error.value.status == 415
