"""Video probing: format, size, orientation and the timestamp of each frame. Decodes only what opening does.

Containers are recognised by magic bytes and opened by that demuxer only, so a file cannot refer to others.
A `media_worker` reads them: FFmpeg parses no byte of a client in this process.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from saccade.errors import RequestError
from saccade.media.image_headers import rotated_size
from saccade.media.jobs import VideoHeader
from saccade.media.media_workers import MEDIA, Fault, MediaWorkers, Task
from saccade.media.video_file import CODECS, check_available, open_video, video_stream
from saccade.options.engine import MediaPolicy
from saccade.types.media import Size

if TYPE_CHECKING:
    import av

FORMATS = "MP4, MOV, WebM, MKV and AVI"
_QUICKTIME = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_STILLS = tuple(b"ftyp" + brand for brand in (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1"))
_MAX_FRAMES = 1_000_000  # in a file; each packet is read
_SECONDS = 10.0  # of CPU time: fifty times what the header of an hour takes
_MEMORY_MB = 1024
_MAX_BOXES = 10_000
_MAX_LOOKED_AT = 36_000_000  # pixels of a frame that opening may decode: 8K


class VideoInfo(NamedTuple):
    """A video file's header."""

    format: str  # the demuxer: "mov", "matroska" or "avi"
    size: Size  # upright
    orientation: int  # as in EXIF, 1 for upright
    stamps: tuple[int, ...]  # presentation timestamps in order, in the stream's time base
    keys: tuple[int, ...]  # those of them from which decoding can begin
    rate: float  # average frames a second

    @property
    def seconds(self) -> float:
        return len(self.stamps) / self.rate


def probe_video(data: bytes, policy: MediaPolicy, workers: MediaWorkers = MEDIA) -> VideoInfo:
    """Read the header, or raise a RequestError that says why the video is refused."""
    if not data:
        raise RequestError("the video is empty (0 bytes)", code="invalid_video")
    check_video_bytes(len(data), policy)
    check_available()
    what = f"the {_title(_sniff(data))} video of {len(data)} bytes"
    fault = Fault(
        what,
        "invalid_video",
        slow=f"takes more than {_SECONDS:g} s of CPU time until its frames are counted; send a shorter one",
        died=f"cannot be read: it is damaged or needs more than {_MEMORY_MB} MiB",
    )
    body = workers.ask(Task(VideoHeader(), data, _SECONDS, _MEMORY_MB << 20, fault))
    video_info = msgspec.msgpack.decode(body, type=VideoInfo)
    check_video_seconds(video_info.seconds, policy)
    return video_info


def read_video(data: bytes) -> VideoInfo:
    """The header, read by this process."""
    name = _sniff(data)
    try:
        with open_video(data, name, _MAX_LOOKED_AT) as container:
            return _read(container, name, data)
    except RequestError:
        raise
    except Exception:  # FFmpeg has many error types
        what = f"the {_title(name)} video of {len(data)} bytes"
        message = f"{what} is damaged or cut short: its header cannot be read"
        raise RequestError(message, code="invalid_video") from None


def is_video_file(data: bytes) -> bool:
    """Whether these bytes start with the magic bytes of a video."""
    try:
        return bool(_sniff(data))
    except RequestError:
        return False


def check_video_bytes(count: int, policy: MediaPolicy) -> None:
    if count > policy.video.max_bytes:
        limit = f"at most {policy.video.max_bytes} are allowed (max_video_bytes)"
        raise RequestError(f"the video has {count} bytes, and {limit}", code="video_too_large")


def check_video_seconds(seconds: float, policy: MediaPolicy) -> None:
    if seconds > policy.video.max_seconds:
        limit = f"at most {policy.video.max_seconds:g} s are allowed (max_video_seconds)"
        raise RequestError(f"the video lasts {seconds:.6g} s, and {limit}", code="video_too_large")


def _sniff(data: bytes) -> str:
    if data[4:12] in _STILLS:
        raise _unsupported("a still picture (AVIF or HEIF)")
    if data[4:8] in _QUICKTIME:
        return "mov"
    if data.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if data[:4] + data[8:12] == b"RIFFAVI ":
        return "avi"
    raise _unsupported("of an unknown format")


def _unsupported(what: str) -> RequestError:
    message = f"the video is {what}; the formats that can be read are {FORMATS}"
    return RequestError(message, code="unsupported_video_media_type")


def _title(name: str) -> str:
    return {"mov": "MP4", "matroska": "WebM or MKV", "avi": "AVI"}[name]


def _read(container: av.container.InputContainer, name: str, data: bytes) -> VideoInfo:
    stream = video_stream(container)
    if stream is None:
        kinds = ", ".join(sorted({track.type for track in container.streams})) or "nothing"
        message = f"the {_title(name)} file holds no moving pictures, but {kinds}"
        raise RequestError(message, code="invalid_video")
    codec = stream.codec_context.name
    if codec not in CODECS:
        message = f"the video's codec {codec} is not read here; use H.264, VP9 or AV1"
        raise RequestError(message, code="invalid_video")
    size = Size(stream.codec_context.width, stream.codec_context.height)
    if min(size) < 1:
        message = f"the video's header names no size, or its frames have more than {_MAX_LOOKED_AT} pixels"
        raise RequestError(message, code="invalid_video")
    stamps, keys = _stamps(container, stream, name)
    orientation = _orientation(data) if name == "mov" else 1
    return VideoInfo(name, rotated_size(size, orientation), orientation, stamps, keys, _rate(stream, stamps))


def _stamps(
    container: av.container.InputContainer, stream: av.VideoStream, name: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Timestamps of all frames and of key frames, from the packets: a header's count may be wrong."""
    stamps: list[int] = []
    keys: list[int] = []
    num_packets = 0
    for packet in container.demux(stream):
        if not packet.size:
            continue
        num_packets += 1
        stamp = packet.dts if packet.pts is None else packet.pts
        if not packet.is_discard and stamp is not None:
            stamps.append(stamp)
            if packet.is_keyframe:
                keys.append(stamp)
        if num_packets > _MAX_FRAMES:
            raise RequestError(f"the video has more than {_MAX_FRAMES} frames", code="video_too_large")
    if not stamps:
        raise RequestError(f"the {_title(name)} video has no frames", code="invalid_video")
    if name == "mov" and num_packets < stream.frames:
        counts = f"its header says {stream.frames} frames and {num_packets} are there"
        raise RequestError(f"the video is cut short: {counts}", code="invalid_video")
    return tuple(sorted(stamps)), tuple(sorted(keys))


def _rate(stream: av.VideoStream, stamps: tuple[int, ...]) -> float:
    if stream.average_rate:
        return float(stream.average_rate)
    seconds = (stamps[-1] - stamps[0]) * float(stream.time_base or 0)
    return (len(stamps) - 1) / seconds if seconds > 0 else 24.0  # the default of the Hugging Face processors


_ORIENTATIONS = {  # signs of a track's matrix (a, b, c, d) -> EXIF orientation
    (1, 0, 0, 1): 1,
    (-1, 0, 0, 1): 2,
    (-1, 0, 0, -1): 3,
    (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5,
    (0, 1, -1, 0): 6,
    (0, -1, -1, 0): 7,
    (0, -1, 1, 0): 8,
}


def _orientation(data: bytes) -> int:
    """The orientation in the video track's header: phones store videos unrotated."""
    for start, end in _boxes(data, 0, len(data), b"moov"):
        for first, last in _boxes(data, start, end, b"trak"):
            if _is_video(data, first, last):
                return next((_track_orientation(data, *box) for box in _boxes(data, first, last, b"tkhd")), 1)
    return 1


def _is_video(data: bytes, start: int, end: int) -> bool:
    for first, last in _boxes(data, start, end, b"mdia"):
        for body, _ in _boxes(data, first, last, b"hdlr"):
            return data[body + 8 : body + 12] == b"vide"
    return False


def _track_orientation(data: bytes, start: int, end: int) -> int:
    matrix = start + (52 if data[start] == 1 else 40)  # after times of 64 or 32 bits
    if matrix + 20 > end:
        return 1
    a, b, _, c, d = struct.unpack_from(">5i", data, matrix)
    return _ORIENTATIONS.get((_sign(a), _sign(b), _sign(c), _sign(d)), 1)


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


def _boxes(data: bytes, start: int, end: int, name: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of the bodies of all MP4 boxes of this name."""
    for _ in range(_MAX_BOXES):
        if start + 8 > end:
            return
        size = int.from_bytes(data[start : start + 4])
        head = 8
        if size == 1:
            size = int.from_bytes(data[start + 8 : start + 16])
            head = 16
        last = end if size == 0 else start + size
        if last < start + head or last > end:
            return
        if data[start + 4 : start + 8] == name:
            yield start + head, last
        start = last
