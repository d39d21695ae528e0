"""Image loading: any object that a caller may pass becomes bytes and a header. Nothing compressed is decoded.

Reads local files for Python callers; never uses the network.
"""

from __future__ import annotations

import binascii
import errno
import io
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64
from PIL import Image, ImageFile

from saccade.errors import RequestError
from saccade.media.image_headers import rotated_size
from saccade.media.probe import check_bytes, check_pixels, probe
from saccade.media.rgb import to_rgb, upright
from saccade.options.engine import MediaPolicy
from saccade.types.media import Header, Size

_ORIENTATION_TAG = 0x0112
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]{1,20}):")
_WHITE_SPACE = " \t\r\n"
_WITHOUT_WHITE_SPACE = str.maketrans("", "", _WHITE_SPACE)
_PIECE_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """An image: compressed bytes as they arrived, or raw RGB pixels if the header's format is "rgb"."""

    data: bytes
    header: Header


def load_image(
    source: Any, policy: MediaPolicy, *, param: str | None = None, allow_paths: bool = True
) -> Loaded:
    """A PIL image, path, bytes, NumPy array or data: URL. `allow_paths=False` is for strings of clients."""
    try:
        return _load(source, policy, allow_paths)
    except RequestError as error:
        raise error.about(param) from None


def _load(source: Any, policy: MediaPolicy, allow_paths: bool) -> Loaded:
    match source:
        case Image.Image():
            return _still_compressed(source, policy) or _decoded(source, policy)
        case bytes() | bytearray() | memoryview():
            return _from_bytes(bytes(source), policy)
        case np.ndarray():
            return _from_array(source, policy)
        case str():
            return _from_string(source, policy, allow_paths)
        case Path() if allow_paths:
            return _from_file(source, policy)
    kinds = "a PIL image, a path, bytes, a NumPy array or a data: URL"
    raise RequestError(f"a picture is {kinds}, not {type(source).__name__}", code="invalid_image")


def _from_bytes(data: bytes, policy: MediaPolicy) -> Loaded:
    return Loaded(data, probe(data, policy))


def _from_string(text: str, policy: MediaPolicy, allow_paths: bool) -> Loaded:
    if scheme := _SCHEME.match(text):
        name = scheme[1].lower()
        if name == "data":
            return _from_bytes(decode_data_url(text, policy), policy)
        if text.startswith("//", scheme.end()) or not allow_paths:
            message = f"a picture cannot be fetched from a {name}: URL here; send it as a data: URL"
            raise RequestError(message, code="invalid_image_url")
    if not allow_paths:
        raise RequestError("the picture's URL must be a data: URL with base64 data", code="invalid_image_url")
    return _from_file(text, policy)


def decode_data_url(url: str, policy: MediaPolicy) -> bytes:
    """The bytes of `data:[type][;parameters];base64,...`. The type is ignored: bytes are sniffed."""
    start = url.find(",") + 1
    if not start:
        raise _bad_base64("has no comma before its data")
    if "base64" not in [part.strip().lower() for part in url[: start - 1].split(";")[1:]]:
        raise _bad_base64("is not marked ;base64")
    length = len(url) - start
    check_bytes(length // 4 * 3 - 2, policy)  # before it is copied
    try:
        return _base64(url, start)
    except (binascii.Error, ValueError):
        raise _bad_base64(f"holds {length} characters that are not standard, padded base64") from None


def _base64(url: str, start: int) -> bytes:
    """Decode in chunks: no copy of the whole text, and other threads can run between two calls."""
    decoded = io.BytesIO()
    tail = ""
    is_over = False
    for position in range(start, len(url), _PIECE_CHARS):
        text = tail + url[position : position + _PIECE_CHARS]
        if any(noise in text for noise in _WHITE_SPACE):
            text = text.translate(_WITHOUT_WHITE_SPACE)
        if is_over and text:
            raise binascii.Error("data after the padding")
        whole = len(text) // 4 * 4
        decoded.write(pybase64.b64decode(text[:whole], validate=True))
        is_over |= text.endswith("=", 0, whole)
        tail = text[whole:]
    if tail:
        raise binascii.Error("incomplete")
    return decoded.getvalue()


def _bad_base64(what: str) -> RequestError:
    return RequestError(f"the picture's data: URL {what}", code="invalid_base64_image")


def read_file(path: str | Path, check_size: Callable[[int], None], what: str, code: str) -> bytes:
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):  # a device or a pipe may never end
            raise OSError(errno.EINVAL, "not a regular file")
        check_size(info.st_size)
        return Path(path).read_bytes()
    except RequestError:
        raise
    except OSError as error:
        reason = error.strerror
    except ValueError:
        reason = "not a valid path"
    raise RequestError(f"the {what} file {os.fspath(path)!r} cannot be read: {reason}", code=code)


def _from_file(path: str | Path, policy: MediaPolicy) -> Loaded:
    data = read_file(path, lambda count: check_bytes(count, policy), "picture", "image_file_not_found")
    return _from_bytes(data, policy)


def _still_compressed(image: Image.Image, policy: MediaPolicy) -> Loaded | None:
    """The file of a PIL image that was opened but not decoded: it gets the same key as the file."""
    if not isinstance(image, ImageFile.ImageFile) or image.fp is None or image.tell() != 0:
        return None
    if not image.tile and image.format != "WEBP":  # decoded already; a WebP never has tiles
        return None
    try:
        position = image.fp.tell()
        image.fp.seek(0)
        data = image.fp.read()
        image.fp.seek(position)
        loaded = _from_bytes(data, policy)
    except RequestError as error:
        if error.code in ("image_too_large", "image_file_too_large"):
            raise
        return None  # a format that only Pillow reads
    except (OSError, ValueError):
        return None
    header = loaded.header
    if (rotated_size(header.size, header.orientation), header.mode) != (image.size, image.mode):
        return None
    return loaded


def _decoded(image: Image.Image, policy: MediaPolicy) -> Loaded:
    check_pixels(Size(*image.size), policy)
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
        pixels = upright(to_rgb(image), orientation)
    except RequestError:
        raise
    except Exception:  # a lazily opened file may be damaged
        what = f"the {image.format or 'PIL'} picture of {image.width}x{image.height} pixels"
        raise RequestError(f"{what} cannot be decoded", code="image_parse_error") from None
    return _bare(pixels.tobytes(), Size(*pixels.size))


def _bare(data: bytes, size: Size) -> Loaded:
    return Loaded(data, Header("rgb", size, 1, 1, "RGB"))


def _from_array(array: npt.NDArray[Any], policy: MediaPolicy) -> Loaded:
    """[height, width] or [height, width, 1, 3 or 4]: uint8, uint16 (upper 8 bits), or floats from 0 to 1."""
    match array.shape:
        case (height, width, 1 | 3 | 4 as channels):
            size = Size(width, height)
        case (height, width):
            size = Size(width, height)
            channels = 1
        case shape:
            shapes = "(height, width) or (height, width, 1, 3 or 4)"
            raise RequestError(f"a picture array has the shape {shapes}, not {shape}", code="invalid_image")
    if min(size) < 1:
        message = f"a picture array of the shape {array.shape} has no pixels"
        raise RequestError(message, code="image_too_small")
    check_pixels(size, policy)
    pixels = np.ascontiguousarray(_to_bytes(array).reshape(size.height, size.width, channels))  # [H, W, C]
    return _bare(_rgb(pixels), size)


def _to_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if array.dtype == np.uint8:
        return array.view(np.uint8)
    if array.dtype == np.uint16:
        high_bits: npt.NDArray[np.uint8] = (array >> 8).astype(np.uint8)
        return high_bits
    if np.issubdtype(array.dtype, np.floating):
        low = float(array.min())
        high = float(array.max())
        if not 0 <= low <= high <= 1:  # also false for NaN
            values = f"a float picture array holds values from 0 to 1, but these go from {low:g} to {high:g}"
            raise RequestError(f"{values}; divide by 255 or pass uint8", code="invalid_image")
        rounded: npt.NDArray[np.uint8] = np.rint(array * 255).astype(np.uint8)
        return rounded
    message = f"a picture array holds uint8, uint16 or float values, not {array.dtype}"
    raise RequestError(message, code="invalid_image_mode")


def _rgb(pixels: npt.NDArray[np.uint8]) -> bytes:
    """The pixels of [height, width, 1, 3 or 4]."""
    match pixels.shape[2]:
        case 1:
            return np.repeat(pixels, 3, axis=2).tobytes()
        case 4:
            return to_rgb(Image.fromarray(pixels, "RGBA")).tobytes()
    return pixels.tobytes()
