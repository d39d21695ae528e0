"""Image probing: format, size, orientation, frames and mode from the header. Never allocates a raster.

Formats are recognised by magic bytes; MIME types, file names and bytes after the image are ignored.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping

from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from saccade.errors import RequestError
from saccade.media.image_headers import PARSERS, Outline, exif_orientation
from saccade.options import MediaPolicy
from saccade.types import Header, Size

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"BM", "bmp"),
    (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
    (b"II+\x00", "tiff"),
    (b"MM\x00+", "tiff"),
)
# Unsupported formats, recognised for the error message.
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"%PDF", "PDF"),
    (b"%!PS", "EPS or PostScript"),
    (b"8BPS", "PSD"),
    (b"\x00\x00\x01\x00", "ICO"),
    (b"\x00\x00\x00\x0cjP", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\xd7\xcd\xc6\x9a", "WMF"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"<svg", "SVG"),
    (b"<?xml", "XML or SVG"),
    (b"<", "HTML or XML"),
)
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF", b"msf1": "HEIF"}
FORMATS = "JPEG, PNG, WebP, GIF, BMP and TIFF"

# These readers stop before the pixels. `Image.open` would add a size limit and a warning.
_READERS: Mapping[str, Callable[[io.BytesIO], Image.Image]] = {
    "png": PngImageFile,
    "bmp": BmpImageFile,
    "tiff": TiffImageFile,
}
_MAX_SIDE = 2**31 - 1  # a larger value is a negative one read as unsigned


def probe(data: bytes, policy: MediaPolicy) -> Header:
    """Read the header, or raise a RequestError that says why the image is refused."""
    if not data:
        raise RequestError("the picture is empty (0 bytes)", code="empty_image_file")
    check_bytes(len(data), policy)
    name = _sniff(data)
    header = _header(name, data)
    check_pixels(header.size, policy)
    return header


def check_bytes(count: int, policy: MediaPolicy) -> None:
    if count > policy.max_image_bytes:
        raise RequestError(
            f"the picture has {count} bytes, and at most {policy.max_image_bytes} are allowed (max_image_bytes)",
            code="image_file_too_large",
        )


def check_pixels(size: Size, policy: MediaPolicy) -> None:
    pixels = size.width * size.height
    if pixels > policy.max_image_pixels:
        raise RequestError(
            f"the picture is {size.width}x{size.height} = {pixels} pixels, and at most {policy.max_image_pixels} are "
            "allowed (max_image_pixels)",
            code="image_too_large",
        )


def _sniff(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    raise RequestError(
        f"the picture is {_guess(data)}; the formats that can be read are {FORMATS}",
        code="unsupported_image_media_type",
    )


def _guess(data: bytes) -> str:
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "MP4 or a relative of it")
    start = data[:512].lstrip()
    return next((name for magic, name in _OTHERS if start.startswith(magic)), "of an unknown format")


def _header(name: str, data: bytes) -> Header:
    try:
        outline = PARSERS[name](data)
        size, mode = _size_and_mode(name, data, outline)
    except (ValueError, struct.error, SyntaxError, OSError, EOFError, LookupError, TypeError, OverflowError) as error:
        raise _refusal(name, data, error) from None
    if not (0 < size.width <= _MAX_SIDE and 0 < size.height <= _MAX_SIDE):
        raise RequestError(
            f"the {name.upper()} header says {size.width}x{size.height} pixels, which is no picture",
            code="image_parse_error",
        )
    orientation = exif_orientation(outline.exif) if outline.exif else 1
    upright = Size(size.height, size.width) if orientation >= 5 else size
    return Header(name, upright, orientation, outline.frames, mode)


def _size_and_mode(name: str, data: bytes, outline: Outline) -> tuple[Size, str]:
    if outline.size is not None and outline.mode is not None:
        return outline.size, outline.mode
    with _READERS[name](io.BytesIO(data)) as image:
        return Size(*image.size), image.mode


def _refusal(name: str, data: bytes, error: Exception) -> RequestError:
    # Pillow raises a plain ValueError when text inside a PNG unpacks to more than a megabyte.
    if name == "png" and isinstance(error, ValueError) and "MAX_TEXT" in str(error):
        return RequestError(
            f"the PNG picture of {len(data)} bytes carries compressed text that unpacks to more than its limit; "
            "remove its text chunks",
            code="image_too_large",
        )
    return RequestError(
        f"the {name.upper()} picture of {len(data)} bytes is damaged or cut short: its header cannot be read",
        code="image_parse_error",
    )
