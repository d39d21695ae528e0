"""Everything a caller may pass as a picture."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from saccade.errors import RequestError
from saccade.media import load
from saccade.media.load import load_image
from saccade.options.engine import MediaPolicy, Options
from saccade.types.media import Size
from tests.helpers.media.images import make_photo, png

POLICY = MediaPolicy.of(Options(max_image_bytes=1 << 20, max_image_pixels=1_000_000))


def jpeg(image: Image.Image, **how: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", **how)
    return stream.getvalue()


def refusal(source: Any, **how: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        load_image(source, POLICY, **how)
    return caught.value


def data_url(data: bytes, head: str = "data:image/png;base64") -> str:
    return f"{head},{base64.b64encode(data).decode()}"


# --- bytes and files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_travel_as_they_are(kind: type) -> None:
    data = png(make_photo(20, 10))
    loaded = load_image(kind(data), POLICY)
    assert loaded.data == data and type(loaded.data) is bytes
    assert loaded.header.size == Size(20, 10)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_read(tmp_path: Path, kind: type) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(make_photo()))
    assert load_image(kind(file), POLICY).data == file.read_bytes()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    error = refusal(tmp_path / "none.png")
    assert error.code == "image_file_not_found" and "none.png" in error.message


def test_a_folder_is_not_a_image(tmp_path: Path) -> None:
    assert refusal(str(tmp_path)).code == "image_file_not_found"


def test_a_path_with_a_zero_byte_is_refused() -> None:
    assert refusal("a\x00b").code == "image_file_not_found"


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "large.png"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    assert refusal(file).code == "image_file_too_large"


def test_paths_from_a_client_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(make_photo()))
    assert refusal(str(file), allow_paths=False).code == "invalid_image_url"


@pytest.mark.parametrize("url", ["http://host/a.png", "https://host/a.png", "file:///etc/passwd", "ftp://host/a.png"])
def test_urls_are_not_fetched(url: str) -> None:
    assert refusal(url).code == "invalid_image_url"
    assert refusal(url, allow_paths=False).code == "invalid_image_url"


def test_the_error_says_where_in_the_request() -> None:
    assert refusal(b"", param="messages[2].content[1].image_url").param == "messages[2].content[1].image_url"


def test_other_objects_are_refused_by_type() -> None:
    error = refusal(17)
    assert error.code == "invalid_image" and "int" in error.message


# --- data URLs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head", ["data:image/png;base64", "data:;base64", "data:image/png;charset=utf-8;base64", "DATA:image/PNG;BASE64"]
)
def test_a_data_url_gives_its_bytes(head: str) -> None:
    data = png(make_photo())
    assert load_image(data_url(data, head), POLICY, allow_paths=False).data == data


@pytest.mark.parametrize("piece", range(1, 10))
@pytest.mark.parametrize("between", ["", "\n", " \r\n"])
def test_base64_is_the_same_in_pieces_of_any_size(piece: int, between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_PIECE_CHARS", piece)
    for data in (b"", b"a", b"ab", b"abc", bytes(range(40))):
        text = between.join(base64.b64encode(data).decode()) + between
        assert load.decode_data_url("data:;base64," + text, POLICY) == data
        for wrong in (text + "AAAA", text + " " * 12 + "AAAA", text[:-1], text + "=", "=" + text):
            assert _is_refused("data:;base64," + wrong) == (not _is_base64(wrong))


@given(text=st.lists(st.text("ABab09+/=-_ \n\u00e9", min_size=4, max_size=4), max_size=4).map("".join))
def test_what_is_base64_is_what_python_calls_so(text: str) -> None:
    def decoded(decode: Callable[..., bytes], **how: bool) -> bytes | None:
        try:
            return decode(text, **how)
        except ValueError:  # binascii.Error is one
            return None

    assert decoded(pybase64.b64decode, validate=True) == decoded(binascii.a2b_base64, strict_mode=True)


def _is_base64(text: str) -> bool:
    sign = "[A-Za-z0-9+/]"
    return bool(re.fullmatch(f"(?:{sign}{{4}})*(?:{sign}{{2}}==|{sign}{{3}}=)?", "".join(text.split())))


def _is_refused(url: str) -> bool:
    try:
        load.decode_data_url(url, POLICY)
    except RequestError as error:
        return error.code == "invalid_base64_image"
    return False


def test_white_space_inside_base64_is_accepted() -> None:
    data = png(make_photo())
    wrapped = "data:image/png;base64," + "\r\n ".join(data_url(data).partition(",")[2])
    assert load_image(wrapped, POLICY).data == data


def test_what_the_type_claims_does_not_matter() -> None:
    assert load_image(data_url(jpeg(make_photo())), POLICY).header.format == "jpeg"


def test_an_empty_data_url_is_an_empty_file() -> None:
    assert refusal("data:image/png;base64,").code == "empty_image_file"


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64",
        "data:image/png,abcd",
        "data:image/png;base64,????",
        "data:image/png;base64,abc",
        "data:image/png;base64,ab-_",
        "data:image/png;base64,äöü=",
    ],
)
def test_anything_but_standard_base64_is_refused(url: str) -> None:
    assert refusal(url).code == "invalid_base64_image"


def test_a_data_url_that_is_too_long_is_refused() -> None:
    assert refusal("data:;base64," + "A" * (2 << 20)).code == "image_file_too_large"


# --- PIL ----------------------------------------------------------------------------------------------------------


def test_an_untouched_image_gives_its_files_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(jpeg(make_photo()))
    assert load_image(Image.open(file), POLICY).data == file.read_bytes()


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_an_untouched_image_stays_usable(name: str) -> None:
    stream = io.BytesIO()
    make_photo().save(stream, name)
    image, twin = Image.open(io.BytesIO(stream.getvalue())), Image.open(io.BytesIO(stream.getvalue()))
    assert load_image(image, POLICY).data == stream.getvalue()
    assert image.tobytes() == twin.tobytes()


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_loaded_image_file_travels_as_pixels(name: str) -> None:
    stream = io.BytesIO()
    make_photo().save(stream, name)
    image = Image.open(stream)
    image.load()
    assert load_image(image, POLICY).data == image.convert("RGB").tobytes()


def test_a_loaded_image_travels_as_pixels() -> None:
    photo = make_photo(20, 10)
    loaded = load_image(photo, POLICY)
    assert (loaded.header.format, loaded.header.size) == ("rgb", Size(20, 10))
    assert loaded.data == photo.tobytes()


def test_a_changed_image_travels_as_pixels() -> None:
    image = Image.open(io.BytesIO(png(make_photo())))
    image.putpixel((0, 0), (1, 2, 3))
    assert load_image(image, POLICY).data[:3] == bytes([1, 2, 3])


def test_an_image_drafted_smaller_travels_as_its_own_pixels() -> None:
    image = Image.open(io.BytesIO(jpeg(make_photo(640, 480))))
    image.draft("RGB", (160, 120))
    assert load_image(image, POLICY).header.size == (160, 120)


def test_a_later_frame_travels_as_its_own_pixels() -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "lime")]
    stream = io.BytesIO()
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    image = Image.open(stream)
    image.seek(1)
    assert load_image(image, POLICY).data[:3] == bytes([0, 255, 0])


def test_exif_orientation_of_a_loaded_image_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(jpeg(make_photo(20, 10), exif=exif)))
    image.load()
    loaded = load_image(image, POLICY)
    assert loaded.header.size == (10, 20)
    assert loaded.data == image.transpose(Image.Transpose.ROTATE_270).tobytes()


def test_alpha_of_a_loaded_image_is_composited_on_white() -> None:
    assert load_image(Image.new("RGBA", (1, 1), (255, 0, 0, 0)), POLICY).data == b"\xff\xff\xff"


def test_a_format_that_only_pillow_reads_is_decoded_for_a_python_caller() -> None:
    stream = io.BytesIO()
    make_photo(20, 10).save(stream, "PPM")
    assert load_image(Image.open(stream), POLICY).data == make_photo(20, 10).tobytes()


def test_a_damaged_image_that_was_opened_is_refused_without_library_text() -> None:
    stream = io.BytesIO()
    make_photo(200, 100).save(stream, "PPM")
    error = refusal(Image.open(io.BytesIO(stream.getvalue()[:1000])))
    assert error.code == "image_parse_error" and "truncated" not in error.message


def test_a_image_with_too_many_pixels_is_refused_however_it_comes() -> None:
    large = Image.new("1", (2000, 1000))
    for source in (large, Image.open(io.BytesIO(png(large))), np.zeros((1000, 2000), np.uint8)):
        error = refusal(source)
        assert error.code == "image_too_large" and "2000x1000" in error.message


# --- arrays -------------------------------------------------------------------------------------------------------


def test_an_rgb_array_travels_as_its_bytes() -> None:
    array = np.asarray(make_photo(20, 10))
    loaded = load_image(array[:, ::-1], POLICY)
    assert loaded.header.size == (20, 10)
    assert loaded.data == np.ascontiguousarray(array[:, ::-1]).tobytes()


@pytest.mark.parametrize("shape", [(1, 2), (1, 2, 1)])
def test_a_grey_array_repeats_its_channel(shape: tuple[int, ...]) -> None:
    assert load_image(np.array([5, 9], np.uint8).reshape(shape), POLICY).data == bytes([5, 5, 5, 9, 9, 9])


def test_an_array_with_alpha_is_composited_on_white() -> None:
    assert load_image(np.array([[[255, 0, 0, 0]]], np.uint8), POLICY).data == b"\xff\xff\xff"


def test_floats_from_zero_to_one_are_scaled() -> None:
    assert load_image(np.array([[0.0, 0.5, 1.0]], np.float32), POLICY).data[::3] == bytes([0, 128, 255])


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_other_floats_are_refused_with_their_range(value: float) -> None:
    assert refusal(np.array([[0.0, value]], np.float32)).code == "invalid_image"


def test_sixteen_bit_arrays_keep_the_upper_eight_bits() -> None:
    assert load_image(np.array([[0x1234, 0xFFFF]], np.uint16), POLICY).data[::3] == bytes([0x12, 0xFF])


@pytest.mark.parametrize("shape", [(3, 20, 10), (2, 20, 10, 3), (7,), (20, 10, 2)])
def test_arrays_of_other_shapes_are_refused_with_their_shape(shape: tuple[int, ...]) -> None:
    error = refusal(np.zeros(shape, np.uint8))
    assert error.code == "invalid_image" and str(shape) in error.message


def test_arrays_of_other_types_are_refused_by_type() -> None:
    assert "int64" in refusal(np.zeros((2, 2), np.int64)).message


def test_an_array_without_pixels_is_too_small() -> None:
    assert refusal(np.zeros((0, 5, 3), np.uint8)).code == "image_too_small"
