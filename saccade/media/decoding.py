"""Decodes media items, within limits that end a decoder: in processes of its own, or in the calling thread.

In processes it does not matter what a file does to its decoder. In the thread only an item's price limits
that, which is known before it begins; PDFs always go to processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from saccade.media.decode import NewPixels, Pixels, decode_item, new_pixels, reduce_size
from saccade.media.jobs import Decode, Resize
from saccade.media.jpeg_stream import StreamedJpeg, Submit
from saccade.media.media_workers import Fault, MediaWorkers, Task, Ticket
from saccade.media.pdf import MEMORY_MB, SECONDS, check_available, pdf_fault
from saccade.media.shared_pixels import Pin
from saccade.media.video_reader import VideoReaders
from saccade.types.media import MediaItem, Size

_SECONDS_PER_PIXEL = 1e-7  # of its price: ten times what a slow machine takes
_MIN_SECONDS = 1.0
_MIN_MEMORY = 512 << 20
_BYTES_PER_PIXEL = 24  # stored, converted, turned and written
_VIDEO_MEMORY = 2 << 30
_NICENESS = 5  # of processes for heavy items, which must not slow the others


class MediaDecoder:
    def __init__(
        self, threads: int, heavy: int, *, isolated: bool, max_seconds: float, pin: Pin | None = None
    ) -> None:
        """`threads` and `heavy`: how many items are decoded at once, and how many heavy ones beside them."""
        self.isolated = isolated
        self._threads = threads
        self._max_seconds = max_seconds
        self._readers = VideoReaders()
        self._workers = MediaWorkers(threads, pin=pin)
        self._heavy = MediaWorkers(heavy, _NICENESS, pin)

    @contextmanager
    def pixels(self, item: MediaItem, ticket: Ticket, new: NewPixels = new_pixels) -> Iterator[Pixels]:
        """[height, width, 3] of an image, [frames, ...] of a group: inside the block.

        `new` is used only in the calling thread.
        """
        if item.header.format == "rgb" or not (self.isolated or item.page is not None):
            yield decode_item(item, self._readers, new)
            return
        with self._of(item).pixels(self._task(item), _num_bytes(item), ticket) as pixels:
            yield pixels

    def streamed(self, item: MediaItem, submit: Submit, ticket: Ticket) -> StreamedJpeg | IsolatedJpeg:
        """A large JPEG that is resized while it is decoded. `submit`: to threads of this process."""
        if not self.isolated:
            return StreamedJpeg(item, submit)
        task = self._task(item)

        def resized(size: Size, resampling: int) -> Pixels:
            job = Resize(Decode.of(item).item, size, resampling, self._threads)
            num_bytes = size.width * size.height * 3
            with self._of(item).pixels(task._replace(job=job), num_bytes, ticket) as pixels:
                return np.array(pixels)

        return IsolatedJpeg(item, resized)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that run."""
        return (*self._workers.pids, *self._heavy.pids)

    def close(self) -> None:
        self._readers.close()
        self._workers.close()
        self._heavy.close()

    def _of(self, item: MediaItem) -> MediaWorkers:
        return self._heavy if item.is_heavy else self._workers

    def _task(self, item: MediaItem) -> Task:
        job = Decode.of(item)
        width, height = item.header.size
        if item.page is not None:
            check_available()
            fault = pdf_fault(f"page {item.page + 1} of the PDF of {len(item.data)} bytes", SECONDS)
            return Task(job, item.data, SECONDS, MEMORY_MB << 20, fault, keep=True)
        seconds = self._max_seconds
        memory = _VIDEO_MEMORY
        if not item.stamps:  # a frame may be far from its key frame
            seconds = min(seconds, _MIN_SECONDS + item.price * _SECONDS_PER_PIXEL)
            memory = _MIN_MEMORY + _BYTES_PER_PIXEL * width * height * item.num_frames
        return Task(job, item.data, seconds, memory, _fault(item, seconds, memory), keep=bool(item.stamps))


class IsolatedJpeg:
    """A `StreamedJpeg` in another process, with threads of its own."""

    def __init__(self, item: MediaItem, resized: Callable[[Size, int], Pixels]) -> None:
        width, height = reduce_size(item.header.size, item.reduction)
        self.shape = (height, width, 3)
        self.resized = resized  # [size.height, size.width, 3]


def _num_bytes(item: MediaItem) -> int:
    size = reduce_size(item.header.size, item.reduction)
    return size.width * size.height * 3 * item.num_frames


def _fault(item: MediaItem, seconds: float, memory: int) -> Fault:
    width, height = item.header.size
    kind = f"{item.header.format.upper()} picture"
    code = "image_parse_error"
    if item.kind == "video":
        kind = "video"
        code = "invalid_video"
    return Fault(
        f"the {kind} of {width}x{height} pixels ({len(item.data)} bytes)",
        code,
        slow=f"takes more than {seconds:.3g} s of CPU time, which its size does not explain; save it anew",
        died=f"cannot be decoded: it is damaged or needs more than {memory >> 20} MiB",
    )
