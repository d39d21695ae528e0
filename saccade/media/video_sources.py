"""Video loading: any object that a caller may pass becomes a file with its header, or a list of frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saccade.errors import RequestError
from saccade.media.load import decode_data_url, read_file
from saccade.media.video_probe import VideoInfo, check_video_bytes, probe_video
from saccade.options.engine import MediaPolicy

FRAME_TYPES = ("video/jpeg", "video/png", "video/webp")
"""MIME types of data: URLs that hold a list of frames."""
_MAX_SENT = 10_000  # frames in one data: URL, before sampling


@dataclass(frozen=True, slots=True)
class Video:
    """A video as a caller gave it."""

    source: Any
    param: str  # its path in the request, for errors
    allow_path: bool = True  # False for strings that a client sent


class File(NamedTuple):
    data: bytes
    video_info: VideoInfo


def load_video_source(video: Video, policy: MediaPolicy) -> File | Sequence[Any]:
    """A file with its header, or a list of frames as given."""
    match video.source:
        case list() | tuple() | np.ndarray(ndim=4) as source:
            return list(source)
        case bytes() | bytearray() | memoryview() as source:
            return _file(bytes(source), policy)
        case str(source) if source[:5].lower() == "data:":
            return _from_data_url(source, policy)
        case str() | Path() as source if video.allow_path and "://" not in str(source):
            data = read_file(source, lambda count: check_video_bytes(count, policy), "video", "invalid_video")
            return _file(data, policy)
        case str():
            message = "a video cannot be fetched from there; send it as a data: URL with base64 data"
            raise RequestError(message, code="invalid_video_url")
        case source:
            shape = f" of the shape {source.shape}" if isinstance(source, np.ndarray) else ""
    kinds = "a path, bytes, a list of frames, an array [frames, height, width, 3] or a data: URL"
    message = f"a video is {kinds}, not {type(source).__name__}{shape}"
    raise RequestError(message, code="invalid_video")


def _file(data: bytes, policy: MediaPolicy) -> File:
    return File(data, probe_video(data, policy))


def _from_data_url(url: str, policy: MediaPolicy) -> File | list[str]:
    """A file; or for the type video/jpeg, comma-separated frames (vLLM's format)."""
    check_video_bytes(len(url) // 4 * 3, policy)
    head, _, payload = url.partition(",")
    kind = head[5:].split(";")[0].strip().lower()
    if kind in FRAME_TYPES:
        count = payload.count(",") + 1
        if count > _MAX_SENT:
            frames = f"the video has {count} frames, and at most {_MAX_SENT} may be sent"
            raise RequestError(f"{frames}; send fewer", code="video_too_large")
        still = head.replace("video/", "image/", 1)
        return [f"{still},{frame}" for frame in payload.split(",")]
    try:
        return _file(decode_data_url(url, replace(policy, max_image_bytes=policy.video.max_bytes)), policy)
    except RequestError as error:
        message = error.message.replace("the picture's", "the video's", 1)
        raise RequestError(message, code=error.code, param=error.param) from None
