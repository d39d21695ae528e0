"""Which JPEGs a GPU's decoder may get."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from saccade.media.jpeg_layout import is_plain_jpeg, plain_length
from saccade.media.probe import probe
from saccade.options.engine import MediaPolicy, Options
from tests.helpers.media.images import make_photo

POLICY = MediaPolicy.of(Options())


def jpeg(mode: str = "RGB", orientation: int = 1, **how: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    make_photo(120, 90).convert(mode).save(stream, "JPEG", exif=exif, **how)
    return stream.getvalue()


def is_plain(data: bytes) -> bool:
    return is_plain_jpeg(data, probe(data, POLICY))


@pytest.mark.parametrize("subsampling", ["4:2:0", "4:2:2", "4:4:4"])
def test_cameras_write_plain_jpegs(subsampling: str) -> None:
    assert is_plain(jpeg(subsampling=subsampling))
    assert is_plain(jpeg(subsampling=subsampling, orientation=6) + b"what a phone adds: a film")


def test_further_images_of_a_phone_are_left_out() -> None:
    plain = jpeg()
    assert plain_length(plain + b"a film") == len(plain)
    named = plain[:2] + b"\xff\xe2\x00\x08MPF\0\0\0" + plain[2:]
    assert is_plain(named + jpeg(orientation=6)) and plain_length(named + jpeg(orientation=6)) == len(named)


def test_grey_cmyk_progressive_or_mirrored_is_not_plain() -> None:
    assert is_plain(jpeg(restart_marker_rows=1))
    assert not is_plain(jpeg("L"))
    assert not is_plain(jpeg("CMYK"))
    assert not is_plain(jpeg(progressive=True))
    assert not is_plain(jpeg(orientation=2))
    assert not is_plain(jpeg(keep_rgb=True))


def test_a_jpeg_that_is_cut_short_is_not_plain() -> None:
    data = jpeg()
    assert not is_plain(data[: len(data) // 2])
    assert not is_plain(data[: data.index(b"\xff\xda") + 4])


def test_other_frames_samplings_and_segments_are_not_plain() -> None:
    data = jpeg(subsampling="4:4:4")
    frame = data.index(b"\xff\xc0")
    first = frame + 11  # sampling of Y
    assert data[first] == 0x11
    assert not is_plain(data[:first] + b"\x12" + data[first + 1 :])
    assert not is_plain(data[: frame + 1] + b"\xc1" + data[frame + 2 :])  # extended
    assert not is_plain(data[: frame + 4] + b"\x0c" + data[frame + 5 :])  # 12 bits
    assert not is_plain(data[:frame] + b"\xff\xdc\x00\x04\x00\x5a" + data[frame:])  # lines are told later
    scan = data.index(b"\xff\xda")
    assert not is_plain(data[:scan] + data[frame : frame + 19] + data[scan:])  # a second frame
    assert not is_plain(data[: scan + 4] + b"\x01" + data[scan + 5 :])  # the first scan of several


def test_colours_that_adobe_names_count() -> None:
    data = jpeg()
    adobe = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"
    assert is_plain(data[:2] + adobe + b"\x01" + data[2:])
    assert not is_plain(data[:2] + adobe + b"\x00" + data[2:])
    assert is_plain(data[:2] + b"\xff\xee\x00\x07other" + data[2:])
