"""Image header parsers: frame count, EXIF, what decoding costs and, where Pillow would decode, size and mode.

Each parser takes a bounded number of steps, so that a million empty chunks cost no more than a photo.
Invalid bytes raise ValueError.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from saccade.types.media import Size

MAX_STEPS = 20_000
"""Segments read of one file. A longer animation reports the frames counted so far."""


class Outline(NamedTuple):
    """A parsed header. `size` and `mode` are None where Pillow's own header reader is safe to use."""

    frames: int = 1
    exif: bytes | None = None
    size: Size | None = None  # as stored
    mode: str | None = None
    passes: int = 1  # see `Header.passes`


MAX_SCANS = 500
"""Scans of a JPEG; more are not counted. Programs write about ten."""

_SLOW_PASSES = 2  # of what is inflated, however its pixels are stored
_TIFF_PASSES = 4  # any of a dozen codecs
_PYTHON_PASSES = 64

_EXIF_MARK = b"Exif\x00\x00"
_JPEG_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
_MARKER_START = re.compile(rb"\xff+")  # any number of padding bytes may come before a marker
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # those are tables
_WITHOUT_LENGTH = frozenset((0x00, 0x01, *range(0xD0, 0xD9)))
_SCAN, _END = 0xDA, 0xD9
_AFTER_PIXELS = re.compile(
    rb"\xff+[^\x00\xff\xd0-\xd7]"
)  # in a scan 0xff is escaped, or restarts the decoder


def parse_jpeg(data: bytes) -> Outline:
    """Segments up to the first scan: the frame header has the size and follows EXIF."""
    exif = outline = None
    for marker, body, end in jpeg_segments(data):
        if outline is None:
            if marker in _FRAMES:
                _, height, width, channels = struct.unpack_from(">BHHB", body)
                if channels not in _JPEG_MODES:
                    raise ValueError("a JPEG has 1, 3 or 4 channels")
                outline = Outline(1, exif, Size(width, height), _JPEG_MODES[channels])
                is_plain = marker in (0xC0, 0xC1)  # all is in one scan, if that has all channels
            elif marker == 0xE1 and exif is None and body[:6] == _EXIF_MARK:
                exif = bytes(body)
        elif marker == _SCAN:
            has_all = is_plain and body[:1] == bytes([channels])
            return outline if has_all else outline._replace(passes=_num_scans(data, end))
    if outline is None:
        raise ValueError("no frame header")
    return outline  # cut short


def _num_scans(data: bytes, at: int) -> int:
    """Scans of a JPEG, whose first has its pixels there. A library reads all of them before it shows one."""
    num_scans = 1
    for _ in range(MAX_STEPS):
        match = _AFTER_PIXELS.search(data, at)
        if match is None or num_scans > MAX_SCANS:
            return num_scans
        at = match.end()
        marker = data[at - 1]
        if marker == _END:
            return num_scans
        num_scans += marker == _SCAN
        if marker not in (0x01, 0xD8):  # the others have a length
            at += int.from_bytes(data[at : at + 2])
    raise ValueError("too many segments")


class JpegSegment(NamedTuple):
    marker: int
    body: memoryview
    end: int  # in the file


def jpeg_segments(data: bytes) -> Iterator[JpegSegment]:
    """Those with a length, up to the header of the first scan."""
    view = memoryview(data)
    at = 2
    for _ in range(MAX_STEPS):
        run = _MARKER_START.search(data, at)
        if run is None or run.end() + 3 > len(data):
            return
        at = run.end() - 1
        marker = data[at + 1]
        if marker == _END:
            return
        if marker in _WITHOUT_LENGTH:
            at += 2
            continue
        length = struct.unpack_from(">H", data, at + 2)[0]
        yield JpegSegment(marker, view[at + 4 : at + 2 + length], at + 2 + length)
        if marker == _SCAN:
            return
        at += 2 + length
    raise ValueError("too many segments")


def parse_png(data: bytes) -> Outline:
    """Chunks before the pixels; those after them are counted. A later EXIF chunk is ignored."""
    frames = 1
    exif = None
    at = 8
    has_pixels = has_profile = False
    for _ in range(MAX_STEPS):
        if has_pixels and at + 12 > len(data):  # the pixels may be cut short
            return Outline(frames, exif, passes=_SLOW_PASSES)
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            return Outline(frames, exif, passes=_SLOW_PASSES)
        has_pixels |= kind == b"IDAT"
        if has_pixels:
            at += 12 + length
            continue
        if kind == b"acTL":
            frames = max(1, struct.unpack_from(">I", data, at + 8)[0])
        if kind == b"eXIf":
            exif = data[at + 8 : at + 8 + length]
        if kind == b"iCCP":
            if has_profile:  # Pillow inflates each, a megabyte
                raise ValueError("two colour profiles")
            has_profile = True
        at += 12 + length
    raise ValueError("too many chunks")


def parse_webp(data: bytes) -> Outline:
    """RIFF chunks. Size and mode are read here because Pillow allocates the canvas on opening a WebP."""
    size = None
    mode = "RGB"
    frames = 0
    exif = None
    at = 12
    for _ in range(MAX_STEPS):
        if at + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"EXIF":
            exif = data[at + 8 : at + 8 + length]
        if kind == b"ANMF":
            frames += 1
        if kind in _WEBP_SIZES and size is None:
            size, has_alpha = _WEBP_SIZES[kind](data, at + 8)
            mode = "RGBA" if has_alpha else "RGB"
        at += 8 + length + length % 2
    if size is None:
        raise ValueError("no picture chunk")
    return Outline(max(1, frames), exif, size, mode, _SLOW_PASSES)


def _vp8x(data: bytes, at: int) -> tuple[Size, bool]:
    width = int.from_bytes(data[at + 4 : at + 7], "little") + 1
    height = int.from_bytes(data[at + 7 : at + 10], "little") + 1
    return Size(width, height), bool(data[at] & 0x10)


def _vp8(data: bytes, at: int) -> tuple[Size, bool]:
    mark, width, height = struct.unpack_from("<3x3sHH", data, at)
    if mark != b"\x9d\x01\x2a":
        raise ValueError("no key frame")
    return Size(width & 0x3FFF, height & 0x3FFF), False


def _vp8l(data: bytes, at: int) -> tuple[Size, bool]:
    mark, bits = struct.unpack_from("<BI", data, at)
    if mark != 0x2F:
        raise ValueError("no lossless header")
    return Size((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1), bool(bits >> 28 & 1)


_WEBP_SIZES = {b"VP8X": _vp8x, b"VP8 ": _vp8, b"VP8L": _vp8l}


def parse_gif(data: bytes) -> Outline:
    """Blocks, counting image descriptors. A first frame larger than the screen enlarges it, as in Pillow."""
    width, height, flags = struct.unpack_from("<6xHHB", data)
    at = 13 + _palette_bytes(flags)
    frames = steps = 0
    while steps < MAX_STEPS and at < len(data) and data[at] in (0x21, 0x2C):
        if data[at] == 0x2C:
            x, y, w, h, local = struct.unpack_from("<HHHHB", data, at + 1)
            if frames == 0:
                width = max(width, x + w)
                height = max(height, y + h)
            frames += 1
            at += 11 + _palette_bytes(local)  # descriptor, palette, code size
        else:
            at += 2
        at, steps = _skip_sub_blocks(data, at, steps + 1)
    if frames == 0:
        raise ValueError("no picture descriptor")
    return Outline(frames, None, Size(width, height), "P", _SLOW_PASSES)


def _palette_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _skip_sub_blocks(data: bytes, at: int, steps: int) -> tuple[int, int]:
    while at < len(data) and data[at] and steps < MAX_STEPS:
        at += 1 + data[at]
        steps += 1
    return at + 1, steps


_ORIENTATION_TAG = 0x0112
_TILE_TAGS = (273, 279, 324, 325)  # where strips and tiles are, and their lengths
_MAX_TILES = 1 << 16
_SHORT = 3
_BYTES_OF_TYPES = ((1, (1, 2, 6, 7)), (2, (3, 8)), (4, (4, 9, 11, 13)), (8, (5, 10, 12, 16, 17, 18)))
_TYPE_BYTES = {kind: width for width, kinds in _BYTES_OF_TYPES for kind in kinds}


class _TiffLayout(NamedTuple):
    entries: str  # struct formats: number of entries; tag, type and count of an entry; offset of a directory
    entry: str
    offset: str
    entry_bytes: int
    first: int  # position of the first directory's offset


def parse_tiff(data: bytes) -> Outline:
    """Directories, one per page. Pillow applies a TIFF's orientation itself, so no EXIF is passed on."""
    order = "<" if data[:2] == b"II" else ">"
    is_big = data[2:4] in (b"+\x00", b"\x00+")
    layout = _TiffLayout("Q", "HHQ", "Q", 20, 8) if is_big else _TiffLayout("H", "HHI", "I", 12, 4)
    at = struct.unpack_from(order + layout.offset, data, layout.first)[0]
    _check_tiff_values(data, at, order, layout)
    frames = 0
    visited = set[int]()
    while at and at not in visited and frames < MAX_STEPS and at + 2 <= len(data):
        visited.add(at)
        frames += 1
        at = _next_directory(data, at, order, layout)
    return Outline(max(1, frames), passes=_TIFF_PASSES)


def _next_directory(data: bytes, at: int, order: str, layout: _TiffLayout) -> int:
    entries = struct.unpack_from(order + layout.entries, data, at)[0]
    at += struct.calcsize(order + layout.entries) + entries * layout.entry_bytes
    if at + struct.calcsize(order + layout.offset) > len(data):
        return 0
    return int(struct.unpack_from(order + layout.offset, data, at)[0])


def _check_tiff_values(data: bytes, at: int, order: str, layout: _TiffLayout) -> None:
    """Refuse entries that claim more bytes than the file has: a reader would copy them for each entry.

    And positions of more tiles or strips than an image needs: a reader makes objects of each.
    """
    entries = struct.unpack_from(order + layout.entries, data, at)[0]
    if entries > MAX_STEPS:
        raise ValueError("too many entries")
    at += struct.calcsize(order + layout.entries)
    total = 0
    for entry in range(entries):
        tag, kind, count = struct.unpack_from(order + layout.entry, data, at + entry * layout.entry_bytes)
        if tag in _TILE_TAGS and count > _MAX_TILES:
            raise ValueError("too many tiles or strips")
        total += count * _TYPE_BYTES.get(kind, 0)
    if total > 2 * len(data):
        raise ValueError("entries claim more bytes than there are")


_RUN_LENGTH = (b"\x01\0\0\0", b"\x02\0\0\0")  # encodings


def parse_bmp(data: bytes) -> Outline:
    """Pillow reads its fixed header, and run-length encoded pixels in Python."""
    if data[30:34] not in _RUN_LENGTH:
        return Outline()
    width, height = struct.unpack_from("<ii", data, 18)
    pixels = max(1, abs(width * height))
    return Outline(passes=_PYTHON_PASSES * (1 + len(data) // pixels))  # a command may make no pixel


def rotated_size(size: Size, orientation: int) -> Size:
    """A stored size as it is seen upright, or an upright one as it is stored."""
    return Size(size.height, size.width) if orientation >= 5 else size


def exif_orientation(exif: bytes) -> int:
    """1 to 8 from the first directory of an EXIF block; 1 if it is missing or broken."""
    body = exif.removeprefix(_EXIF_MARK)
    order = {b"II": "<", b"MM": ">"}.get(body[:2], "<")
    try:
        at = struct.unpack_from(order + "I", body, 4)[0]
        for entry in range(struct.unpack_from(order + "H", body, at)[0]):
            name, kind, _, value = struct.unpack_from(order + "HHIH", body, at + 2 + 12 * entry)
            if (name, kind) == (_ORIENTATION_TAG, _SHORT) and 1 <= value <= 8:
                return int(value)
    except struct.error:
        return 1
    return 1


PARSERS: Mapping[str, Callable[[bytes], Outline]] = {
    "jpeg": parse_jpeg,
    "png": parse_png,
    "webp": parse_webp,
    "gif": parse_gif,
    "bmp": parse_bmp,
    "tiff": parse_tiff,
}
