"""Conversion of any Pillow image to upright 8-bit RGB, one rule per mode."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

from saccade.errors import RequestError

BAND = 128  # rows: two megabytes of a phone's photo, which fits the L2 cache
MIRRORED = (3, 4, 7, 8)  # orientations whose first row is stored last
MODE = "RGBX"  # Pillow's layout of RGB; as an array it needs no copy
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_CONVERTIBLE = frozenset({"1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV"})
_WIDE_GREY = frozenset({"I", "I;16", "I;16L", "I;16B", "I;16N"})
_WHITE = (255, 255, 255, 255)
_STRIP_PIXELS = 1 << 20


def to_rgb(image: Image.Image) -> Image.Image:
    """The current frame in mode RGB.

    | stored pixels                            | what comes out                                           |
    | ---------------------------------------- | -------------------------------------------------------- |
    | alpha channel (RGBA, LA, PA, RGBa, La)   | composited on white                                      |
    | one transparent colour or palette (tRNS) | composited on white; ignored for 16-bit grey             |
    | 1 bit, 8-bit grey, palette, RGB          | same colours                                             |
    | 16-bit grey (I;16, I)                    | the upper 8 of 16 bits, so the whole range is kept       |
    | float grey (F)                           | 0..1 scaled to 0..255 unless above 1; else clipped to it |
    | CMYK, YCCK, YCbCr, HSV                   | Pillow's formulas, no colour management                  |
    | LAB                                      | sRGB through LittleCMS                                   |
    | anything else                            | RequestError `invalid_image_mode`                        |

    Embedded ICC profiles are ignored, as the Hugging Face processors do.
    """
    if image.mode in _WIDE_GREY:
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if image.mode == "F":
        return _from_float(image)
    if image.mode == "LAB":
        return _from_lab(image)
    if image.has_transparency_data:
        return _on_white(image)
    if image.mode in _CONVERTIBLE:
        return image.convert("RGB")
    message = f"a picture of mode {image.mode} cannot be converted; send it as 8-bit RGB, grey or palette"
    raise RequestError(message, code="invalid_image_mode")


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """Apply an EXIF orientation of 1 to 8."""
    method = _TRANSPOSE.get(orientation)
    return image if method is None else image.transpose(method)


def upright_band(raw: npt.NDArray[np.uint8], start: int, end: int | None, orientation: int) -> Image.Image:
    """Some stored rows, or columns, of pixels [height, width, 4] as a viewer shows them."""
    part = raw[start:end] if orientation < 5 else raw[:, start:end]
    return upright(as_image(np.ascontiguousarray(part)), orientation)


def as_image(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    """[height, width, 4], not copied."""
    height, width, _ = pixels.shape
    return Image.frombuffer(MODE, (width, height), pixels, "raw", MODE, 0, 1)


def _on_white(image: Image.Image) -> Image.Image:
    colour = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(colour, tuple) and max(colour) > 255:
        # A 16-bit file has a 16-bit transparent colour, but Pillow keeps 8 bits of its pixels.
        image = image.copy()
        image.info["transparency"] = tuple(c >> 8 for c in colour)
    flat = Image.new("RGB", image.size)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):  # in strips: layers of a large image would take a gigabyte
        layer = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        composed = Image.alpha_composite(Image.new("RGBA", layer.size, _WHITE), layer)
        flat.paste(composed.convert("RGB"), (0, top))
    return flat


def _from_float(image: Image.Image) -> Image.Image:
    _, highest = image.getextrema()
    scale = 255.0 if isinstance(highest, float) and highest <= 1 else 1.0
    # Converting to L truncates, so half a step is added to round.
    return image.point(lambda value: value * scale + 0.5).convert("L").convert("RGB")


def _from_lab(image: Image.Image) -> Image.Image:
    converted = ImageCms.applyTransform(image, _lab_to_srgb())
    assert converted is not None, "only an in-place transform returns nothing"
    return converted


@lru_cache(maxsize=1)
def _lab_to_srgb() -> ImageCms.ImageCmsTransform:
    srgb = ImageCms.createProfile("sRGB")
    return ImageCms.buildTransform(ImageCms.createProfile("LAB"), srgb, "LAB", "RGB")
