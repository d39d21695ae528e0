"""Headers: what is read from them, what is refused, and that nothing else is done."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from saccade.errors import RequestError
from saccade.media import image_headers
from saccade.media.image_headers import MAX_SCANS
from saccade.media.probe import probe
from saccade.options.engine import MediaPolicy, Options
from saccade.types.media import Size
from tests.helpers.media.images import jpeg_of_scans, make_photo

POLICY = MediaPolicy.of(Options(max_image_bytes=4 << 20, max_image_pixels=100_000_000))
FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]


def saved(image: Image.Image, name: str, **how: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, name, **how)
    return stream.getvalue()


def refusal(data: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        probe(data, POLICY)
    return caught.value


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_header(width: int, height: int, *more: bytes) -> bytes:
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = png_chunk(b"IDAT", zlib.compress(b""))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + pixels + png_chunk(b"IEND", b"")


def passes(data: bytes) -> int:
    return probe(data, POLICY).passes


# --- what is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_format_size_and_frames_are_read(name: str) -> None:
    header = probe(saved(make_photo(40, 30), name), POLICY)
    assert (header.format, header.size, header.orientation, header.frames) == (name.lower(), Size(40, 30), 1, 1)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *[(name, "RGB") for name in ("JPEG", "PNG", "WEBP", "BMP", "TIFF")],
        *[(name, "L") for name in ("JPEG", "PNG", "TIFF")],
        *[(name, "RGBA") for name in ("PNG", "WEBP", "TIFF")],
        *[(name, "CMYK") for name in ("JPEG", "TIFF")],
        ("PNG", "I;16"),
        ("PNG", "1"),
        ("PNG", "P"),
        ("GIF", "P"),
    ],
)
def test_the_mode_is_the_one_pillow_would_decode(name: str, mode: str) -> None:
    grey = Image.fromarray(np.zeros((5, 7), np.uint16))
    image = grey if mode == "I;16" else make_photo(7, 5).convert(mode)
    if mode == "RGBA":
        image.putalpha(128)  # an opaque alpha channel is not stored by every format
    data = saved(image, name)
    header = probe(data, POLICY)
    assert header.mode == mode
    assert header.size == Image.open(io.BytesIO(data)).size


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 70), st.integers(1, 70), st.booleans())
def test_any_size_is_read_as_pillow_reads_it(name: str, width: int, height: int, lossless: bool) -> None:
    how = {"lossless": lossless} if name == "WEBP" else {"progressive": lossless} if name == "JPEG" else {}
    data = saved(Image.new("RGB", (width, height), "teal"), name, **how)
    assert probe(data, POLICY).size == Image.open(io.BytesIO(data)).size == (width, height)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_gives_the_upright_size(name: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    header = probe(saved(make_photo(40, 30), name, exif=exif), POLICY)
    assert header.orientation == orientation
    assert header.size == ((30, 40) if orientation >= 5 else (40, 30))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_is_already_upright_when_pillow_decodes_it(orientation: int) -> None:
    data = saved(make_photo(40, 30), "TIFF", tiffinfo={0x0112: orientation})
    header = probe(data, POLICY)
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert (header.size, header.orientation) == (image.size, 1)


def test_an_impossible_orientation_counts_as_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 99
    assert probe(saved(make_photo(40, 30), "JPEG", exif=exif), POLICY).orientation == 1


def test_broken_exif_counts_as_upright() -> None:
    data = saved(make_photo(40, 30), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff broken")
    header = probe(data, POLICY)
    assert (header.orientation, header.size) == (1, Size(40, 30))


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG", "TIFF"])
def test_frames_of_an_animation_are_counted(name: str) -> None:
    frames = [make_photo(20, 10, seed) for seed in range(5)]
    header = probe(saved(frames[0], name, save_all=True, append_images=frames[1:]), POLICY)
    assert (header.frames, header.size) == (5, Size(20, 10))


def test_a_gif_with_a_hundred_thousand_frames_takes_few_steps() -> None:
    one = saved(Image.new("P", (1, 1)), "GIF")
    start = one.index(b"\x2c")
    data = one[:start] + one[start:-1] * 100_000 + b";"
    assert 2 <= probe(data, POLICY).frames <= image_headers.MAX_STEPS


def test_a_tiff_whose_pages_go_in_a_circle_is_counted_once() -> None:
    data = bytearray(saved(make_photo(4, 4), "TIFF"))
    first = struct.unpack_from("<I", data, 4)[0]
    entries = struct.unpack_from("<H", data, first)[0]
    struct.pack_into("<I", data, first + 2 + 12 * entries, first)
    assert probe(bytes(data), POLICY).frames == 1


def test_a_gif_frame_larger_than_its_screen_enlarges_it_as_in_pillow() -> None:
    data = bytearray(saved(make_photo(30, 20).convert("P"), "GIF"))
    struct.pack_into("<HH", data, 6, 5, 5)
    assert probe(bytes(data), POLICY).size == Image.open(io.BytesIO(bytes(data))).size == (30, 20)


def test_the_scans_of_a_jpeg_are_counted_as_a_decoder_meets_them() -> None:
    photo = make_photo(64, 48)
    assert passes(saved(photo, "JPEG")) == 1
    usual = passes(saved(photo, "JPEG", progressive=True))
    assert usual == 10
    assert passes(jpeg_of_scans(64, 48, 50)) == usual + 50
    comment = b"\xff\xfe\x00\x06\xff\xd9\xff\xda"  # holds an end and a scan that are none
    data = jpeg_of_scans(64, 48, 5)
    last = data.rfind(b"\xff\xda")
    assert passes(data[:last] + comment + data[last:]) == usual + 5
    assert passes(data + data) == usual + 5, "what follows the end is another file"


def test_scans_of_a_thumbnail_and_of_a_second_image_are_not_the_jpegs_own() -> None:
    plain = saved(make_photo(64, 48), "JPEG")
    thumbnail = jpeg_of_scans(16, 16, 40)
    segment = b"\xff\xe2" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    assert passes(plain[:2] + segment + plain[2:]) == 1
    assert passes(plain + thumbnail) == 1


def test_slow_codecs_have_a_higher_price() -> None:
    prices = {name: passes(saved(make_photo(40, 30), name)) for name in FORMATS}
    assert prices["JPEG"] == prices["BMP"] == 1 < prices["PNG"] == prices["GIF"] == prices["WEBP"] < prices["TIFF"]


def test_bytes_after_the_image_are_ignored() -> None:
    for name in FORMATS:
        assert probe(saved(make_photo(8, 8), name) + b"<html>" * 100, POLICY).size == (8, 8)


def test_padding_between_jpeg_segments_is_skipped() -> None:
    data = saved(make_photo(8, 8), "JPEG")
    assert probe(data[:2] + b"\xff" * 1_000_000 + data[2:], POLICY).size == (8, 8)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_no_bytes_are_an_empty_file() -> None:
    assert refusal(b"").code == "empty_image_file"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"\x00\x00\x00\x20ftypisom", "MP4"),
        (b"\x00\x00\x00\x20ftypavif", "AVIF"),
        (b"\x00\x00\x00\x20ftypheic", "HEIC"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "EPS"),
        (b"8BPS\x00\x01", "PSD"),
        (b"\x00\x00\x01\x00\x01\x00", "ICO"),
        (b"\xd7\xcd\xc6\x9a\x00", "WMF"),
        (b"\x00\x00\x00\x0cjP  \r\n", "JPEG 2000"),
        (b"hello", "unknown"),
    ],
)
def test_other_kinds_of_bytes_are_refused_by_name(data: bytes, name: str) -> None:
    error = refusal(data)
    assert error.code == "unsupported_image_media_type"
    assert name in error.message and "JPEG" in error.message


def test_too_many_bytes_are_refused_with_the_option_to_change() -> None:
    error = refusal(bytes((4 << 20) + 1))
    assert error.code == "image_file_too_large"
    assert "4194305" in error.message and "max_image_bytes" in error.message


def test_a_header_bomb_is_refused_without_allocating_its_raster() -> None:
    tracemalloc.start()
    error = refusal(png_header(60_000, 60_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.code == "image_too_large"
    assert "3600000000" in error.message and "max_image_pixels" in error.message
    assert peak < 5 << 20


@pytest.mark.parametrize("name", ["webp", "gif", "bmp", "jpeg", "tiff"])
def test_every_format_is_refused_by_its_pixels(name: str) -> None:
    policy = replace(POLICY, max_image_pixels=99)
    with pytest.raises(RequestError, match="10x10 = 100 pixels, and at most 99") as caught:
        probe(saved(make_photo(10, 10), name), policy)
    assert caught.value.code == "image_too_large"


def test_a_jpeg_of_thousands_of_scans_is_refused_before_it_is_decoded() -> None:
    error = refusal(jpeg_of_scans(64, 48, 2_000))
    assert error.code == "image_too_large" and "64x48" in error.message and "at most 500" in error.message


def with_segments(count: int) -> bytes:
    data = saved(make_photo(64, 48), "JPEG")
    first = data.find(b"\xff\xda")
    return data[:first] + b"\xff\xfe\x00\x02" * count + data[first:]


def with_chunks(count: int) -> bytes:
    data = saved(make_photo(64, 48), "PNG")
    return data[:-12] + png_chunk(b"prVt", b"") * count + data[-12:]


def with_tiles(count: int) -> bytes:
    data = bytearray(saved(make_photo(64, 48), "TIFF"))
    at = struct.unpack_from("<I", data, 4)[0]
    for entry in range(struct.unpack_from("<H", data, at)[0]):
        start = at + 2 + 12 * entry
        if struct.unpack_from("<H", data, start)[0] == 273:
            struct.pack_into("<I", data, start + 4, count)
    return bytes(data) + bytes(8 * count)


def with_markers(count: int) -> bytes:
    """After the first scan, where scans are counted."""
    data = saved(make_photo(64, 48), "JPEG", progressive=True)
    second = data.find(b"\xff\xc4", data.find(b"\xff\xda"))
    return data[:second] + b"\xff\x01" * count + data[second:]


def with_profiles(count: int) -> bytes:
    """Each unpacks to a megabyte."""
    profile = png_chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1 << 20), 9))
    data = saved(make_photo(64, 48), "PNG")
    return data[:33] + profile * min(count, 2) + data[33:]


@pytest.mark.parametrize("make", [with_segments, with_markers, with_chunks, with_profiles, with_tiles])
def test_parts_that_cost_more_than_their_pixels_are_bounded(make: Callable[[int], bytes]) -> None:
    assert probe(make(1), POLICY).size == Size(64, 48)
    assert refusal(make(100_000)).code == "image_parse_error"


def test_a_large_jpeg_may_have_fewer_scans_than_a_small_one() -> None:
    small = MediaPolicy.of(Options(max_image_pixels=100_000))
    data = jpeg_of_scans(400, 250, 40)
    assert probe(data, POLICY).passes == 50
    with pytest.raises(RequestError, match=r"has 50 scans, .* at most 32 are allowed at its size"):
        probe(data, small)


def test_a_bitmap_whose_runs_are_unpacked_in_python_is_refused_when_it_is_large() -> None:
    def packed(side: int) -> bytes:
        body = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 2, 0, 0, 256, 0) + bytes(1024) + b"\x00\x01"
        return b"BM" + struct.pack("<IHHI", 14 + len(body), 0, 0, 14 + 40 + 1024) + body

    assert probe(packed(8), POLICY).passes > MAX_SCANS, "the limit of scans is one of JPEGs"
    assert "takes as long to decode as" in refusal(packed(9_999)).message
    many = MediaPolicy.of(Options())
    with pytest.raises(RequestError, match="takes as long"):
        probe(packed(50) + bytes(60_000_000), many)


def test_pillows_own_limit_does_not_show(recwarn: pytest.WarningsRecorder) -> None:
    policy = replace(POLICY, max_image_pixels=10**12)
    assert probe(png_header(60_000, 60_000), policy).size == (60_000, 60_000)
    assert not [warning for warning in recwarn.list if issubclass(warning.category, Image.DecompressionBombWarning)]


def test_a_text_bomb_in_a_png_is_too_large() -> None:
    bomb = png_chunk(b"zTXt", b"Comment\x00\x00" + zlib.compress(bytes(80_000_000)))
    error = refusal(png_header(8, 8, bomb))
    assert error.code == "image_too_large"
    assert "MAX_TEXT" not in error.message


def test_many_texts_in_a_png_that_add_up_are_too_large() -> None:
    packed = png_chunk(b"zTXt", b"Comment\x00\x00" + zlib.compress(bytes(PngImagePlugin.MAX_TEXT_CHUNK - 1)))
    assert refusal(png_header(8, 8, *[packed] * 70)).code == "image_too_large"


def test_a_png_of_endless_empty_chunks_is_damaged() -> None:
    assert refusal(png_header(8, 8, png_chunk(b"prVt", b"") * 50_000)).code == "image_parse_error"


@pytest.mark.parametrize("name", FORMATS)
def test_a_header_cut_short_is_damaged(name: str) -> None:
    error = refusal(saved(make_photo(40, 30), name)[:20])
    assert error.code == "image_parse_error"
    assert "0x" not in error.message and "20 bytes" in error.message


def test_a_bad_checksum_in_a_png_header_is_damaged() -> None:
    data = bytearray(png_header(8, 8))
    data[29] ^= 0xFF
    assert refusal(bytes(data)).code == "image_parse_error"


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_a_header_without_pixels_is_damaged(size: tuple[int, int]) -> None:
    assert refusal(png_header(*size)).code == "image_parse_error"


def test_a_negative_width_is_damaged() -> None:
    data = bytearray(saved(make_photo(8, 8), "BMP"))
    struct.pack_into("<i", data, 18, -8)
    assert refusal(bytes(data)).code == "image_parse_error"


def test_a_jpeg_with_two_channels_is_damaged() -> None:
    frame = struct.pack(">BBHBHHB", 0xFF, 0xC0, 14, 8, 5, 5, 2) + bytes(8)
    assert refusal(b"\xff\xd8" + frame).code == "image_parse_error"


def test_tiff_entries_that_claim_more_than_the_file_are_damaged() -> None:
    entries = [struct.pack("<HHII", 60_000 + i, 1, 1 << 20, 0) for i in range(50)]
    data = b"II*\x00" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + bytes(1 << 20)
    assert refusal(data).code == "image_parse_error"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_bytes_are_read_or_refused_but_never_crash(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FORMATS))
    raw = bytearray(saved(make_photo(9, 6), name))
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, min(len(raw), 200) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(raw)))
    try:
        probe(bytes(raw[:cut]), POLICY)
    except RequestError as error:
        assert error.code is not None
