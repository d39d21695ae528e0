"""Frames of video files, a group at a time, so that never more than a group is in memory. Owns the open decoders.

Groups of a video are usually wanted one after the other. A decoder that has just read one stands where the next begins;
a few such are kept, because starting again means decoding from the last key frame on.
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
from saccade.media.rgb import upright
from saccade.media.video_file import open_video, video_streams
from saccade.types import MediaItem, Size

if TYPE_CHECKING:
    import av

Frame = npt.NDArray[np.uint8]  # [height, width, 3]

_KEPT = 2  # open decoders that wait for the next group; each holds its video's bytes and some decoded frames
_NEAR = 10  # seconds: further ahead, looking for a key frame is quicker than decoding all that lies between
_MAX_PIXELS = 20_000_000_000  # decoded for one group: some ten seconds, in which an engine may have to wait for it


class VideoReaders:
    def __init__(self) -> None:
        self._idle: list[_Reader] = []  # the longest unused first
        self._lock = Lock()

    def frames(self, item: MediaItem) -> list[Frame]:
        """The frames of a group, upright."""
        reader = self._take(item)
        try:
            *frames, last = [reader.frame_at(stamp) for stamp in item.stamps]
            # Whoever has the reader next may get this frame again, and a frame is converted by one thread at a time:
            # two that do it at once may never end. Frames of one time are one frame.
            shown = _upright(last, item)
        except BaseException:
            reader.close()
            raise
        self._keep(reader)
        return [*(shown if frame is last else _upright(frame, item) for frame in frames), shown]

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for reader in idle:
            reader.close()

    def _take(self, item: MediaItem) -> _Reader:
        """One that stands shortly before the group, or a new one."""
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
    """One decoder, which only ever goes forward."""

    def __init__(self, item: MediaItem) -> None:
        self.data = item.data
        self._item = item
        self._container, self._stream = _open(item)
        self._near = int(_NEAR / (self._stream.time_base or Fraction(1)))
        self._frames = self._from(item.stamps[0])
        self._current: av.VideoFrame | None = None
        self._maximum = max(1, _MAX_PIXELS // math.prod(item.header.size))  # frames decoded on the way to one

    def is_shortly_before(self, stamp: int) -> bool:
        at = None if self._current is None else self._current.pts
        return at is not None and at <= stamp <= at + self._near

    def frame_at(self, stamp: int) -> av.VideoFrame:
        """The first frame shown at this time or later."""
        current, passed = self._current, 0
        if current is not None and current.pts is not None and stamp > current.pts + self._near:
            self._frames, current = self._from(stamp), None  # the frames of a group may lie minutes apart
        while current is None or current.pts is None or current.pts < stamp:
            current, passed = next(self._frames, None), passed + 1
            if passed > self._maximum:
                raise RequestError(
                    f"the video has so few key frames that more than {self._maximum} frames would have to be decoded "
                    "for one; encode it with more of them, or smaller",
                    code="video_too_large",
                )
            if current is None:
                raise RequestError(
                    f"the video of {len(self.data)} bytes is damaged or cut short: it ends before a frame that its "
                    "header names",
                    code="invalid_video",
                )
        self._current = current
        return current

    def close(self) -> None:
        self._frames = iter(())
        self._current = None
        self._container.close()

    def _from(self, stamp: int) -> Iterator[av.VideoFrame]:
        """Frames from the last key frame before this time on; from the start where the file's index is no help."""
        self._container.seek(stamp, stream=self._stream, backward=True)
        frames = self._container.decode(self._stream)
        first = next(frames, None)
        if first is not None and first.pts is not None and first.pts <= stamp:
            yield first
            yield from frames
            return
        self._container.close()
        self._container, self._stream = _open(self._item)
        yield from self._container.decode(self._stream)


def _open(item: MediaItem) -> tuple[av.container.InputContainer, av.VideoStream]:
    width, height = item.header.size
    # A frame in the middle that claims another size is refused before memory is taken for it; codecs round sides up.
    limit = (width + 256) * (height + 256)
    container = open_video(item.data, item.header.format, limit)
    stream = video_streams(container)
    assert stream is not None, "the header was read from it"
    stream.codec_context.thread_count = 1  # groups are decoded side by side already
    stream.codec_context.options = {"max_pixels": str(limit)}
    return container, stream


def _upright(frame: av.VideoFrame, item: MediaItem) -> Frame:
    stored = Size(*reversed(item.header.size)) if item.header.orientation >= 5 else item.header.size
    if (frame.width, frame.height) != stored:
        raise RequestError(
            f"the video's header says {stored.width}x{stored.height} pixels but a frame has {frame.width}x"
            f"{frame.height}",
            code="invalid_video",
        )
    pixels: Frame = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
    if item.header.orientation == 1:
        return pixels
    return np.asarray(upright(Image.fromarray(pixels), item.header.orientation))
