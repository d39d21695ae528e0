"""How a video file is opened, for those who read its header and those who decode it. Knows no requests.

Opening looks into the first frames of every stream. So only the codecs below are let near the bytes, and frames larger
than the caller expects are left alone before memory is taken for them. PyAV is optional, imported when a video comes.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING

from saccade.errors import RequestError

if TYPE_CHECKING:
    import av

CODECS = frozenset(
    ("h264", "hevc", "vp8", "vp9", "libvpx", "libvpx-vp9", "av1", "libdav1d", "mpeg4", "mjpeg", "mpeg2video", "prores")
)
_COVER = 0x400  # FFmpeg's mark of a stream that is one still picture beside the music


def is_available() -> bool:
    """Whether files can be read here. Looks for PyAV without loading it."""
    return find_spec("av") is not None


def open_video(data: bytes, format: str, max_pixels: int) -> av.container.InputContainer:
    """With just this reader. Close it."""
    try:
        import av
    except ImportError:
        raise RequestError(
            "video files cannot be read here: PyAV is not installed; the operator installs it with "
            "`pip install saccade[video]`; a list of frames needs nothing",
            code="unsupported",
        ) from None
    limits = {"codec_whitelist": ",".join(sorted(CODECS)), "max_pixels": str(max_pixels)}
    return av.open(io.BytesIO(data), "r", format=format, metadata_errors="ignore", options=limits)


def video_streams(container: av.container.InputContainer) -> av.VideoStream | None:
    """The first stream of video that is not a cover."""
    for stream in container.streams.video:
        if not stream.disposition.value & _COVER:
            return stream
    return None
