"""Conversions to RGB, pixel by pixel."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.errors import RequestError
from saccade.media.rgb import to_rgb, upright


def only_pixel(image: Image.Image) -> tuple[int, ...]:
    converted = to_rgb(image)
    assert converted.mode == "RGB"
    return tuple(np.asarray(converted)[0, 0].tolist())


def reopened(image: Image.Image, **how: object) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "PNG", **how)
    return Image.open(stream)


def test_alpha_zero_over_red_becomes_white() -> None:
    assert only_pixel(Image.new("RGBA", (1, 1), (255, 0, 0, 0))) == (255, 255, 255)


def test_half_alpha_blends_with_white() -> None:
    assert only_pixel(Image.new("RGBA", (1, 1), (255, 0, 0, 128))) == (255, 127, 127)


def test_grey_with_alpha_is_composited_on_white() -> None:
    assert only_pixel(Image.new("LA", (1, 1), (0, 0))) == (255, 255, 255)
    assert only_pixel(Image.new("LA", (1, 1), (7, 255))) == (7, 7, 7)


def test_premultiplied_alpha_is_composited_on_white() -> None:
    assert only_pixel(Image.new("RGBA", (1, 1), (255, 0, 0, 0)).convert("RGBa")) == (255, 255, 255)


def test_a_palette_gives_its_colours() -> None:
    image = Image.new("P", (1, 1), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    assert only_pixel(image) == (10, 20, 30)


def test_a_transparent_palette_entry_becomes_white() -> None:
    image = Image.new("P", (1, 1), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    assert only_pixel(reopened(image, transparency=1)) == (255, 255, 255)


def test_a_palette_with_an_alpha_channel_becomes_white_where_clear() -> None:
    image = Image.new("PA", (1, 1), (1, 0))
    image.putpalette([0, 0, 0, 10, 20, 30])
    assert only_pixel(image) == (255, 255, 255)


@pytest.mark.parametrize(("mode", "colour"), [("RGB", (1, 2, 3)), ("L", 9), ("1", 0)])
def test_the_one_transparent_colour_of_a_png_becomes_white(mode: str, colour: Any) -> None:
    assert only_pixel(reopened(Image.new(mode, (1, 1), colour), transparency=colour)) == (255, 255, 255)


def test_a_transparent_colour_named_in_16_bits_becomes_white() -> None:
    image = Image.new("RGB", (1, 1), (1, 2, 3))
    image.info["transparency"] = (0x0101, 0x0202, 0x0303)
    assert only_pixel(image) == (255, 255, 255)
    assert image.info["transparency"] == (0x0101, 0x0202, 0x0303)


def test_one_bit_is_black_and_white() -> None:
    assert only_pixel(Image.new("1", (1, 1), 1)) == (255, 255, 255)
    assert only_pixel(Image.new("1", (1, 1), 0)) == (0, 0, 0)


def test_sixteen_bit_grey_keeps_the_upper_eight_bits() -> None:
    values = np.array([[0, 255, 256, 0x1234, 0x7FFF, 0xFFFF]], np.uint16)
    for image in (Image.fromarray(values), Image.fromarray(values.astype(np.int32), "I")):
        assert np.asarray(to_rgb(image))[0, :, 0].tolist() == [0, 0, 1, 0x12, 0x7F, 0xFF]


def test_a_sixteen_bit_png_file_keeps_the_upper_eight_bits() -> None:
    assert only_pixel(reopened(Image.fromarray(np.array([[0xABCD]], np.uint16)))) == (0xAB, 0xAB, 0xAB)


def test_big_endian_sixteen_bit_grey_is_read_as_such() -> None:
    image = Image.frombytes("I;16B", (1, 1), b"\xab\xcd")
    assert only_pixel(image) == (0xAB, 0xAB, 0xAB)


def test_floats_up_to_one_are_scaled() -> None:
    values = np.array([[0.0, 0.5, 1.0]], np.float32)
    assert np.asarray(to_rgb(Image.fromarray(values)))[0, :, 0].tolist() == [0, 128, 255]


def test_floats_above_one_are_clipped_to_bytes() -> None:
    values = np.array([[-3.0, 0.6, 200.2, 300.0]], np.float32)
    assert np.asarray(to_rgb(Image.fromarray(values)))[0, :, 0].tolist() == [0, 1, 200, 255]


def test_cmyk_without_ink_is_white() -> None:
    assert only_pixel(Image.new("CMYK", (1, 1), (0, 0, 0, 0))) == (255, 255, 255)
    assert only_pixel(Image.new("CMYK", (1, 1), (0, 255, 255, 0))) == (255, 0, 0)


def test_luma_and_hue_modes_are_converted() -> None:
    assert only_pixel(Image.new("YCbCr", (1, 1), (255, 128, 128))) == (255, 255, 255)
    assert only_pixel(Image.new("HSV", (1, 1), (0, 255, 255))) == (255, 0, 0)


def test_lab_lightness_becomes_grey() -> None:
    red, green, blue = only_pixel(Image.new("LAB", (1, 1), (137, 128, 128)))
    assert max(abs(red - 128), abs(green - 128), abs(blue - 128)) <= 2


def test_an_unknown_mode_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="BGR;15") as caught:
        to_rgb(_with_mode("BGR;15"))
    assert caught.value.code == "invalid_image_mode"


def _with_mode(mode: str) -> Image.Image:
    image = Image.new("RGB", (1, 1))
    image._mode = mode
    return image


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    stream = io.BytesIO()
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    assert only_pixel(Image.open(stream)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("orientation", "expected"),
    [
        (1, [[1, 2, 3], [4, 5, 6]]),
        (2, [[3, 2, 1], [6, 5, 4]]),
        (3, [[6, 5, 4], [3, 2, 1]]),
        (4, [[4, 5, 6], [1, 2, 3]]),
        (5, [[1, 4], [2, 5], [3, 6]]),
        (6, [[4, 1], [5, 2], [6, 3]]),
        (7, [[6, 3], [5, 2], [4, 1]]),
        (8, [[3, 6], [2, 5], [1, 4]]),
        (99, [[1, 2, 3], [4, 5, 6]]),
    ],
)
def test_a_image_is_turned_as_a_viewer_turns_it(orientation: int, expected: list[list[int]]) -> None:
    image = Image.fromarray(np.array([[1, 2, 3], [4, 5, 6]], np.uint8))
    assert np.asarray(upright(image, orientation)).tolist() == expected
