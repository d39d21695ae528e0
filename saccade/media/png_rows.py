"""Whether a PNG has all its pixels. That inflates them again, so it is asked only where some look missing."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_PIECE = 1 << 16  # of pixels
_INPUT = 1 << 12  # what is left of it is copied for each piece


def has_all_rows(data: bytes) -> bool:
    """Whether a PNG, whose header was read before, is whole."""
    width, height, depth, colour, _, _, interlace = struct.unpack_from(">IIBBBBB", data, 16)
    passes = _ADAM7 if interlace else ((0, 0, 1, 1),)
    num_bytes = 0
    for x, y, across, down in passes:
        columns = max(0, -(-(width - x) // across))
        rows = max(0, -(-(height - y) // down))
        if columns:
            num_bytes += rows * (1 + (columns * depth * _CHANNELS[colour] + 7) // 8)
    inflate = zlib.decompressobj()
    for part in _pixel_data(data):
        for at in range(0, len(part), _INPUT):
            chunk = part[at : at + _INPUT]
            while chunk and num_bytes > 0 and not inflate.eof:
                num_bytes -= len(inflate.decompress(chunk, _PIECE))
                chunk = inflate.unconsumed_tail
    return num_bytes <= 0


def _pixel_data(data: bytes) -> Iterator[memoryview | bytes]:
    """The bodies of the IDAT chunks."""
    view = memoryview(data)
    at = 8
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IDAT":
            yield view[at + 8 : at + 8 + length]
        at += 12 + length
