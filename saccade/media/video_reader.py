"""Video decoding, one frame group at a time. Owns the open decoders.

Groups of a video are usually decoded in order. A few decoders stay open, as a new one starts at a key frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.errors import RequestError
from saccade.media.image_headers import rotated_size
from saccade.media.rgb import upright
from saccade.media.video_file import open_video, video_stream
from saccade.types.media import MediaItem

if TYPE_CHECKING:
    import av

Frame = npt.NDArray[np.uint8]  # [height, width, 3]

_KEPT = 2  # idle decoders; each holds its video's bytes and some decoded frames
_NEAR = 10  # seconds: further ahead, seeking is faster than decoding everything between
_MAX_PIXELS = 20_000_000_000  # decoded for one group: some ten seconds, during which an engine may wait


class VideoReaders:
    def __init__(self) -> None:
        self._idle: list[_Reader] = []  # least recently used first
        self._lock = Lock()

    def frames(self, item: MediaItem) -> list[Frame]:
        """The frames of a group, upright."""
        reader = self._take(item)
        try:
            *frames, last = [reader.frame_at(stamp) for stamp in item.stamps]
            # Converted before the reader is shared: its next user may get this frame again, and two threads
            # that convert one frame can deadlock. Equal timestamps give the same frame object.
            last_image = _upright(last, item)
        except BaseException:
            reader.close()
            raise
        self._keep(reader)
        return [*(last_image if frame is last else _upright(frame, item) for frame in frames), last_image]

    def close(self) -> None:
        with self._lock:
            idle = self._idle
            self._idle = []
        for reader in idle:
            reader.close()

    def _take(self, item: MediaItem) -> _Reader:
        """An idle reader that is shortly before the group, or a new one."""
        with self._lock:
            for reader in self._idle:
                if reader.data is item.data and reader.is_shortly_before(item.stamps[0]):
                    self._idle.remove(reader)
                    return reader
        return _Reader(item)

    def _keep(self, reader: _Reader) -> None:
        with self._lock:
            self._idle.append(reader)
            surplus = self._idle.pop(0) if len(self._idle) > _KEPT else None
        if surplus:
            surplus.close()


class _Reader:
    """One decoder, which moves forward only."""

    def __init__(self, item: MediaItem) -> None:
        self.data = item.data
        self._item = item
        self._container, self._stream = _open(item)
        self._near = int(_NEAR / (self._stream.time_base or Fraction(1)))
        self._frames = self._from(item.stamps[0])
        self._current: av.VideoFrame | None = None
        self._maximum = max(1, _MAX_PIXELS // math.prod(item.header.size))  # frames decoded to reach one

    def is_shortly_before(self, stamp: int) -> bool:
        at = _time_of(self._current)
        return at <= stamp <= at + self._near

    def frame_at(self, stamp: int) -> av.VideoFrame:
        """The first frame shown at this time or later."""
        current = self._current
        num_decoded = 0
        if stamp > _time_of(current) + self._near:
            self._frames = self._from(stamp)  # frames of a group may be minutes apart
            current = None
        while current is None or current.pts is None or current.pts < stamp:
            current = next(self._frames, None)
            num_decoded += 1
            if num_decoded > self._maximum:
                effort = f"more than {self._maximum} frames would have to be decoded for one"
                remedy = "encode it with more of them, or smaller"
                message = f"the video has so few key frames that {effort}; {remedy}"
                raise RequestError(message, code="video_too_large")
            if current is None:
                what = f"the video of {len(self.data)} bytes is damaged or cut short"
                message = f"{what}: it ends before a frame that its header names"
                raise RequestError(message, code="invalid_video")
        self._current = current
        return current

    def close(self) -> None:
        self._frames = iter(())
        self._current = None
        self._container.close()

    def _from(self, stamp: int) -> Iterator[av.VideoFrame]:
        """Frames from the last key frame before this time on; from the start without a usable index."""
        self._container.seek(stamp, stream=self._stream, backward=True)
        frames = self._container.decode(self._stream)
        first = next(frames, None)
        if first is not None and _time_of(first) <= stamp:
            yield first
            yield from frames
            return
        self._container.close()
        self._container, self._stream = _open(self._item)
        yield from self._container.decode(self._stream)


def _time_of(frame: av.VideoFrame | None) -> float:
    """Its time stamp; infinite where there is none."""
    stamp = getattr(frame, "pts", None)
    if stamp is None:
        return math.inf
    return float(stamp)


def _open(item: MediaItem) -> tuple[av.container.InputContainer, av.VideoStream]:
    width, height = item.header.size
    # A later frame of another size is refused before it is allocated; codecs round sides up.
    limit = (width + 256) * (height + 256)
    container = open_video(item.data, item.header.format, limit)
    stream = video_stream(container)
    assert stream is not None, "the header was read from it"
    stream.codec_context.thread_count = 1  # groups are decoded in parallel already
    stream.codec_context.options = {"max_pixels": str(limit)}
    return container, stream


def _upright(frame: av.VideoFrame, item: MediaItem) -> Frame:
    size = rotated_size(item.header.size, item.header.orientation)
    if (frame.width, frame.height) != size:
        sizes = f"{size.width}x{size.height} pixels but a frame has {frame.width}x{frame.height}"
        raise RequestError(f"the video's header says {sizes}", code="invalid_video")
    pixels: Frame = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
    if item.header.orientation == 1:
        return pixels
    return np.asarray(upright(Image.fromarray(pixels), item.header.orientation))
