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
from saccade.media.image_headers import MAX_SCANS, PARSERS, Outline, exif_orientation, rotated_size
from saccade.options.engine import MediaPolicy
from saccade.types.media import Header, Size

_MAGIC = {
    "jpeg": (b"\xff\xd8\xff",),
    "png": (b"\x89PNG\r\n\x1a\n",),
    "gif": (b"GIF87a", b"GIF89a"),
    "bmp": (b"BM",),
    "tiff": (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+"),
}
_OTHERS = {  # unsupported formats, recognised for the error message; the first that fits
    "PDF": (b"%PDF",),
    "EPS or PostScript": (b"%!PS",),
    "PSD": (b"8BPS",),
    "ICO": (b"\x00\x00\x01\x00",),
    "JPEG 2000": (b"\x00\x00\x00\x0cjP", b"\xff\x4f\xff\x51"),
    "WMF": (b"\xd7\xcd\xc6\x9a",),
    "a ZIP archive": (b"PK\x03\x04",),
    "gzip data": (b"\x1f\x8b",),
    "SVG": (b"<svg",),
    "XML or SVG": (b"<?xml",),
    "HTML or XML": (b"<",),
}
_BRANDS = {"AVIF": (b"avif", b"avis"), "HEIC": (b"heic", b"heix"), "HEIF": (b"mif1", b"msf1")}
FORMATS = "JPEG, PNG, WebP, GIF, BMP and TIFF"

# These readers stop before the pixels. `Image.open` would add a size limit and a warning.
_READERS: Mapping[str, Callable[[io.BytesIO], Image.Image]] = {
    "png": PngImageFile,
    "bmp": BmpImageFile,
    "tiff": TiffImageFile,
}
_BROKEN = (ValueError, struct.error, SyntaxError, OSError, EOFError, LookupError, TypeError, OverflowError)
_MAX_PASSES = 32  # over as many pixels as the largest image has: three of a large progressive JPEG
_MAX_SIDE = 2**31 - 1  # a larger value is a negative one read as unsigned


def probe(data: bytes, policy: MediaPolicy) -> Header:
    """Read the header, or raise a RequestError that says why the image is refused."""
    if not data:
        raise RequestError("the picture is empty (0 bytes)", code="empty_image_file")
    check_bytes(len(data), policy)
    name = _sniff(data)
    header = _header(name, data)
    check_pixels(header.size, policy)
    _check_passes(header, policy)
    return header


def check_bytes(count: int, policy: MediaPolicy) -> None:
    if count > policy.max_image_bytes:
        limit = f"at most {policy.max_image_bytes} are allowed (max_image_bytes)"
        raise RequestError(f"the picture has {count} bytes, and {limit}", code="image_file_too_large")


def check_pixels(size: Size, policy: MediaPolicy) -> None:
    pixels = size.width * size.height
    if pixels > policy.max_image_pixels:
        image = f"the picture is {size.width}x{size.height} = {pixels} pixels"
        limit = f"at most {policy.max_image_pixels} are allowed (max_image_pixels)"
        raise RequestError(f"{image}, and {limit}", code="image_too_large")


def _check_passes(header: Header, policy: MediaPolicy) -> None:
    """What decoding costs, beside the pixels that come out."""
    is_jpeg = header.format == "jpeg"
    pixels = header.size.width * header.size.height
    limit = _MAX_PASSES * policy.max_image_pixels
    max_passes = min(limit // pixels, MAX_SCANS) if is_jpeg else limit // pixels
    if header.passes <= max_passes:
        return
    image = f"the {header.format.upper()} picture of {header.size.width}x{header.size.height} pixels"
    if is_jpeg:
        scans = f"{MAX_SCANS} or more" if header.passes > MAX_SCANS else str(header.passes)
        image += f" has {scans} scans, each of which is decoded"
        limit_text = f"at most {max_passes} are allowed at its size"
        remedy = "save it as a plain JPEG"
    else:
        image += f" takes as long to decode as {pixels * header.passes} pixels of a plain JPEG"
        limit_text = f"at most {limit} are allowed"
        remedy = "send it as PNG or JPEG"
    message = f"{image}, and {limit_text} ({_MAX_PASSES} times max_image_pixels); {remedy}"
    raise RequestError(message, code="image_too_large")


def _sniff(data: bytes) -> str:
    if data[:4] + data[8:12] == b"RIFFWEBP":
        return "webp"
    for name, starts in _MAGIC.items():
        if data.startswith(starts):
            return name
    message = f"the picture is {guess_format(data)}; the formats that can be read are {FORMATS}"
    raise RequestError(message, code="unsupported_image_media_type")


def guess_format(data: bytes) -> str:
    """What bytes that cannot be read seem to be, for errors."""
    if data[4:8] == b"ftyp":
        names = (name for name, brands in _BRANDS.items() if data[8:12] in brands)
        return next(names, "MP4 or a relative of it")
    start = data[:512].lstrip()
    names = (name for name, starts in _OTHERS.items() if start.startswith(starts))
    return next(names, "of an unknown format")


def _header(name: str, data: bytes) -> Header:
    try:
        outline = PARSERS[name](data)
        size, mode = _size_and_mode(name, data, outline)
    except _BROKEN as error:
        raise _refusal(name, data, error) from None
    if not all(0 < side <= _MAX_SIDE for side in size):
        message = f"the {name.upper()} header says {size.width}x{size.height} pixels, which is no picture"
        raise RequestError(message, code="image_parse_error")
    orientation = exif_orientation(outline.exif) if outline.exif else 1
    return Header(name, rotated_size(size, orientation), orientation, outline.frames, mode, outline.passes)


def _size_and_mode(name: str, data: bytes, outline: Outline) -> tuple[Size, str]:
    if outline.size is not None and outline.mode is not None:
        return outline.size, outline.mode
    with _READERS[name](io.BytesIO(data)) as image:
        return Size(*image.size), image.mode


def _refusal(name: str, data: bytes, error: Exception) -> RequestError:
    # Pillow raises a plain ValueError when text inside a PNG unpacks to more than a megabyte.
    if name == "png" and isinstance(error, ValueError) and "MAX_TEXT" in str(error):
        text = "compressed text that unpacks to more than its limit; remove its text chunks"
        return RequestError(f"the PNG picture of {len(data)} bytes carries {text}", code="image_too_large")
    what = f"the {name.upper()} picture of {len(data)} bytes"
    message = f"{what} is damaged or cut short: its header cannot be read"
    return RequestError(message, code="image_parse_error")
