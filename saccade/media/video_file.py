"""Opening video files with PyAV, for the probe and the reader.

Opening decodes the first frames of every stream, so it is limited to the codecs below and to a frame size.
PyAV is optional and imported with the first video.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING

from saccade.errors import RequestError

if TYPE_CHECKING:
    import av

_OLDER = ("mpeg4", "mjpeg", "mpeg2video", "prores")
CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "libvpx", "libvpx-vp9", "av1", "libdav1d", *_OLDER})
_COVER = 0x400  # AV_DISPOSITION_ATTACHED_PIC: a cover image


def is_available() -> bool:
    """Whether PyAV is installed. Does not import it."""
    return find_spec("av") is not None


def check_available() -> None:
    if not is_available():
        remedy = "the operator installs it with `pip install saccade[video]`; a list of frames needs nothing"
        message = f"video files cannot be read here: PyAV is not installed; {remedy}"
        raise RequestError(message, code="unsupported")


def open_video(data: bytes, format: str, max_pixels: int) -> av.container.InputContainer:
    """Open with this demuxer only. The caller closes it."""
    import av

    limits = {"codec_whitelist": ",".join(sorted(CODECS)), "max_pixels": str(max_pixels)}
    return av.open(io.BytesIO(data), "r", format=format, metadata_errors="ignore", options=limits)


def video_stream(container: av.container.InputContainer) -> av.VideoStream | None:
    """The first video stream that is not a cover image."""
    for stream in container.streams.video:
        if not stream.disposition.value & _COVER:
            return stream
    return None
