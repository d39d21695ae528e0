"""Which JPEGs a GPU's decoder may get: the plain ones that cameras write. Reads segments, decodes nothing."""

from __future__ import annotations

from saccade.media.image_headers import jpeg_segments
from saccade.types.media import Header

END = b"\xff\xd9"
_FRAME, _SCAN, _ADOBE, _SEVERAL = 0xC0, 0xDA, 0xEE, 0xE2
_HARMLESS = frozenset({0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})  # tables, restart interval, notes
_ORIENTATIONS = (1, 3, 6, 8)  # those that a camera writes; the others mirror
_COMPONENTS = b"\x03"
_NAMES = b"\x01\x02\x03"
_SAMPLINGS = (  # sampling of Y, Cb and Cr
    b"\x22\x11\x11",  # 4:2:0
    b"\x21\x11\x11",  # 4:2:2
    b"\x11\x11\x11",  # 4:4:4
)


def is_plain_jpeg(data: bytes, header: Header) -> bool:
    """Baseline, 8 bits, YCbCr of a usual subsampling, in one scan, not cut short, not mirrored."""
    if header.orientation not in _ORIENTATIONS:
        return False
    has_frame = False
    for marker, body, end in jpeg_segments(data):
        if marker == _SCAN:
            has_all = bytes(body[:1]) == _COMPONENTS
            return has_frame and has_all and data.rfind(END, end) > 0
        if marker == _FRAME and not has_frame and _is_usual(body):
            has_frame = True
        elif marker not in _HARMLESS or (marker == _ADOBE and not _is_ycbcr(bytes(body))):
            return False
    return False


def _is_usual(frame: memoryview) -> bool:
    """8 bits of three components, sampled as cameras do."""
    components = bytes(frame[6:])  # three bytes each: its name, its sampling, its table
    about = (bytes(frame[:1]), bytes(frame[5:6]), components[::3], components[1::3])
    return about in [(b"\x08", _COMPONENTS, _NAMES, sampling) for sampling in _SAMPLINGS]


def _is_ycbcr(adobe: bytes) -> bool:
    """Adobe's segment, if it names the colours, names these; other programs' segments do not count."""
    return adobe[:5] != b"Adobe" or adobe[11:12] == b"\x01"


def plain_length(data: bytes) -> int:
    """The length of a plain JPEG up to its end. Phones put further images there, and name them (MPF)."""
    has_several = False
    end = 0
    for marker, body, after in jpeg_segments(data):
        has_several |= (marker, bytes(body[:4])) == (_SEVERAL, b"MPF\0")
        end = after
    marker_at = data.find(END, end) if has_several else data.rfind(END, end)  # the latter takes no time
    return marker_at + len(END)
