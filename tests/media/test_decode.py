from __future__ import annotations

import io
import struct
import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from saccade.errors import RequestError
from saccade.media import decode as decode_module
from saccade.media import png_rows
from saccade.media.decode import decode
from saccade.media.load import load_image
from saccade.options.engine import MediaPolicy, Options
from saccade.types.media import Geometry, Grid, Header, MediaItem, Size
from tests.helpers.media.images import make_photo

POLICY = MediaPolicy.of(Options(max_image_bytes=1 << 30, max_image_pixels=10**9))


def item(source: Any) -> MediaItem:
    loaded = load_image(source, POLICY)
    return MediaItem(b"k" * 32, "image", loaded.data, loaded.header, Geometry(Size(28, 28), Grid(1, 2, 2), 1, 1))


def saved(image: Image.Image, name: str, **how: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, name, **how)
    return stream.getvalue()


@pytest.mark.parametrize("name", ["PNG", "BMP", "TIFF", "GIF"])
def test_lossless_formats_give_the_pixels_that_were_saved(name: str) -> None:
    image = make_photo(30, 20).quantize(64).convert("RGB")
    assert np.array_equal(decode(item(saved(image, name))), np.asarray(image))


@pytest.mark.parametrize("name", ["JPEG", "WEBP"])
def test_lossy_formats_give_what_pillow_gives(name: str) -> None:
    data = saved(make_photo(30, 20), name)
    assert np.array_equal(decode(item(data)), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("size", [(1, 1), (33, 47), (130, 71)], ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True], ids=["in one go", "progressive"])
def test_jpegs_of_every_kind_give_what_pillow_gives(mode: str, progressive: bool, size: tuple[int, int]) -> None:
    for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
        for quality in (5, 75, 100):
            how = {"quality": quality, "subsampling": subsampling, "progressive": progressive}
            data = saved(make_photo(*size).convert(mode), "JPEG", **how)
            assert np.array_equal(decode(item(data)), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_a_plain_jpeg_is_decoded_into_the_memory_it_is_given() -> None:
    given = np.empty((20, 30, 3), np.uint8)
    data = saved(make_photo(30, 20), "JPEG")
    assert np.shares_memory(decode(item(data), lambda shape: given.reshape(shape)), given)
    assert np.array_equal(given, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_without_the_fast_library_jpegs_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(make_photo(61, 43), "JPEG")
    expected = decode(item(data))
    monkeypatch.setattr(decode_module, "simplejpeg", None)
    assert np.array_equal(decode(item(data)), expected)


@pytest.mark.parametrize("reduction", [2, 4, 8])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("library", [decode_module.simplejpeg, None], ids=["simplejpeg", "Pillow"])
def test_a_jpeg_at_a_lower_scale_is_pillows_draft(
    library: Any, mode: str, reduction: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_module, "simplejpeg", library)
    for size in ((8, 8), (64, 48), (131, 77), (33, 250)):
        data = saved(make_photo(*size).convert(mode), "JPEG")
        with Image.open(io.BytesIO(data)) as image:
            image.draft(image.mode, (size[0] // reduction, size[1] // reduction))
            expected = np.asarray(image.convert("RGB"))
        assert expected.shape[0] == -(-size[1] // reduction)
        assert np.array_equal(decode(replace(item(data), reduction=reduction)), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_image_is_turned_as_a_viewer_turns_it(name: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    how = {"lossless": True} if name == "WEBP" else {"quality": 100} if name == "JPEG" else {}
    data = saved(make_photo(30, 20), name, exif=exif, **how)
    made = item(data)
    pixels = decode(made)
    assert made.header.size == (pixels.shape[1], pixels.shape[0]) == ((30, 20) if orientation < 5 else (20, 30))
    upright = np.asarray(make_photo(30, 20), np.int16)
    expected = np.asarray(Image.fromarray(upright.astype(np.uint8)))
    turned = {
        1: expected, 2: expected[:, ::-1], 3: expected[::-1, ::-1], 4: expected[::-1], 5: expected.swapaxes(0, 1),
        6: expected.swapaxes(0, 1)[:, ::-1], 7: expected[::-1, ::-1].swapaxes(0, 1), 8: expected.swapaxes(0, 1)[::-1],
    }[orientation]  # fmt: skip
    tolerance = 40 if name == "JPEG" else 0
    assert np.abs(pixels.astype(np.int16) - turned).max() <= tolerance


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("how", [{}, {"subsampling": "4:4:4"}, {"progressive": True}, {"mode": "L"}], ids=str)
def test_a_jpeg_that_is_rotated_has_pillows_pixels(orientation: int, how: dict[str, Any]) -> None:
    """Of several bands of both axes, in the memory it is given, whole and at a lower scale."""
    mode, options = how.get("mode", "RGB"), {key: value for key, value in how.items() if key != "mode"}
    exif = Image.Exif()
    exif[0x0112] = orientation
    made = item(saved(make_photo(301, 277).convert(mode), "JPEG", exif=exif, **options))
    for reduction in (1, 2):
        with Image.open(io.BytesIO(made.data)) as image:
            image.draft(image.mode, (301 // reduction, 277 // reduction))
            expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        memory = np.empty_like(expected)
        pixels = decode(replace(made, reduction=reduction), lambda shape, memory=memory: memory.reshape(shape))
        assert np.shares_memory(pixels, memory) and np.array_equal(pixels, expected)


def test_the_first_frame_of_an_animation_is_the_image() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    stream = io.BytesIO()
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    assert decode(item(stream.getvalue()))[0, 0].tolist() == [255, 0, 0]


def test_transparent_pixels_show_white_and_never_what_hides_behind_them() -> None:
    hidden = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert decode(item(saved(hidden, "PNG")))[0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_file_cut_short_is_one_sentence_with_its_size(name: str) -> None:
    data = saved(make_photo(200, 100), name)
    whole = item(data)
    cut = MediaItem(whole.key, "image", data[: len(data) // 2], whole.header, whole.geometry)
    with pytest.raises(RequestError, match="200x100") as caught:
        decode(cut)
    assert caught.value.code == "image_parse_error"
    assert "0x" not in str(caught.value).replace("200x100", "")


def test_a_raster_larger_than_the_bill_is_never_allocated() -> None:
    data = saved(make_photo(200, 100), "PNG")
    lie = MediaItem(b"k" * 32, "image", data, Header("png", Size(10, 10), 1, 1, "RGB"), item(data).geometry)
    with pytest.raises(RequestError, match="10x10"):
        decode(lie)


def test_pillows_own_pixel_limit_does_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(make_photo(200, 100), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert decode(item(data)).shape == (100, 200, 3)


def test_bare_pixels_pass_through() -> None:
    image = make_photo(30, 20)
    assert np.array_equal(decode(item(np.asarray(image))), np.asarray(image))


def test_a_ycck_jpeg_is_turned_into_cmyk_before_it_is_shown() -> None:
    """Stored are 255 - (40, 80, 120, 10): as brightness and two colour differences they make another CMYK."""
    data = bytearray(saved(Image.new("CMYK", (16, 16), (40, 80, 120, 10)), "JPEG", quality=95))
    assert tuple(decode(item(bytes(data)))[3, 3]) == (207, 168, 130)
    data[data.index(b"Adobe") + 11] = 2  # the marker's way of saying YCCK
    assert tuple(decode(item(bytes(data)))[3, 3]) == (29, 59, 0)


def test_an_embedded_colour_profile_changes_no_pixel() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    plain, profiled = (saved(make_photo(), "JPEG", **how) for how in ({}, {"icc_profile": profile}))
    assert len(profiled) > len(plain)
    assert np.array_equal(decode(item(profiled)), decode(item(plain)))


# --- what is missing ----------------------------------------------------------------------------------------------


def png_of(ihdr: bytes, rows: bytes) -> bytes:
    parts = ((b"IHDR", ihdr), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def png_with_rows(rows: int, *, height: int = 64, value: int = 128) -> bytes:
    """A grey PNG whose zlib stream is whole and has so many rows."""
    data = saved(Image.new("L", (64, height), value), "PNG")
    raw = zlib.compress((b"\0" + bytes([value]) * 64) * rows)
    chunk = struct.pack(">I", len(raw)) + b"IDAT" + raw + struct.pack(">I", zlib.crc32(b"IDAT" + raw))
    return data[:33] + chunk + data[-12:]


@pytest.mark.parametrize("rows", [1, 10, 63])
def test_a_png_with_fewer_rows_than_its_header_says_is_damaged(rows: int) -> None:
    with pytest.raises(RequestError) as caught:
        decode(item(png_with_rows(rows)))
    assert caught.value.code == "image_parse_error"


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "I;16"])
def test_a_png_that_ends_black_is_whole(mode: str) -> None:
    image = Image.new("I", (65, 33)).convert("I;16") if mode == "I;16" else Image.new(mode, (65, 33))
    assert decode(item(saved(image, "PNG"))).shape == (33, 65, 3)
    assert not decode(item(png_with_rows(64, value=0))).any()


def test_rows_of_an_interlaced_png_are_counted_pass_by_pass() -> None:
    ihdr = struct.pack(">IIBBBBB", 5, 3, 8, 0, 0, 0, 1)
    sizes = [(1, 1), (1, 1), (2, 0), (1, 1), (3, 1), (2, 2), (5, 1)]  # of the seven passes over 5x3

    def interlaced(passes: int) -> bytes:
        raw = b"".join((b"\0" + b"\x80" * width) * rows for width, rows in sizes[:passes] if width and rows)
        return png_of(ihdr, raw)

    assert (decode(item(interlaced(7))) == 128).all()
    with pytest.raises(RequestError):
        decode(item(interlaced(6)))


def test_a_black_row_makes_no_png_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is inflated again. What zlib leaves of its input it copies, once for each piece of pixels."""
    copied = 0

    class Counting:
        def __init__(self) -> None:
            self._inflate = zlib.decompressobj()

        def __getattr__(self, name: str) -> Any:
            nonlocal copied
            value = getattr(self._inflate, name)
            copied += len(value) if name == "unconsumed_tail" else 0
            return value

    pixels = np.random.default_rng(0).integers(0, 256, (700, 700), np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    data = png_of(struct.pack(">IIBBBBB", 700, 700, 8, 0, 0, 0, 0), rows)
    monkeypatch.setattr(png_rows, "zlib", SimpleNamespace(decompressobj=Counting))
    assert png_rows.has_all_rows(data) and copied < len(data) / 4
