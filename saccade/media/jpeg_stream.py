"""Large JPEGs that are resized while they are decoded, to the bits of Pillow's resize of the whole image.

Pillow resizes the width, rounds to 8 bits, then resizes the height. A row's width depends on no other row and
a column's height on no other column, so both are done in parts, by the threads that are free:

    decoder   rows 0 ───────────────────────►                    one thread
    width       [band 0] [band 1] [band 2] ...                   idle threads, and at last the decoder's
    height                                     [block 0] ...     the same

With an EXIF orientation that swaps the axes, bands are columns as stored, which are complete at the end.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from saccade.media.decode import Pixels, check_stored_size, decode, draft, reduce_size, refuse_faults
from saccade.media.image_headers import rotated_size
from saccade.media.rgb import BAND, MIRRORED, MODE, as_image, upright_band
from saccade.types.media import MediaItem, Size

_MIN_PIXELS = 1 << 20  # a smaller image takes one thread a few milliseconds
_BLOCK = 256  # columns

Task = Callable[[], None]
Submit = Callable[[Task], Future[None]]
"""Gives a task to the decode threads."""
OnBand = Callable[[int, int], None]


def is_streamed(item: MediaItem) -> bool:
    """Whether it is a JPEG in colour, large, and becomes narrower."""
    width, height = item.header.size
    if (item.kind, item.header.format, item.header.mode) != ("image", "jpeg", "RGB"):
        return False
    return width * height >= _MIN_PIXELS and item.geometry.resized.width < width


class StreamedJpeg:
    """Decoded by the first call of `resized`."""

    def __init__(self, item: MediaItem, submit: Submit) -> None:
        self._item = item
        self._submit = submit
        self._stored: _StoredJpeg | None = None
        width, height = reduce_size(item.header.size, item.reduction)
        self.shape = (height, width, 3)

    def resized(self, size: Size, resampling: int) -> Pixels:
        """[size.height, size.width, 3]"""
        filter_ = Image.Resampling(resampling)
        with refuse_faults(self._item):
            try:
                return self._resized(size, filter_)
            except _NotStreamed:
                return np.asarray(Image.fromarray(decode(self._item)).resize(size, filter_))

    def _resized(self, size: Size, resampling: Image.Resampling) -> Pixels:
        height, width, _ = self.shape
        if width == size.width or height - size.height > 2 * (width - size.width):
            self._decode(lambda start, end: None)  # Pillow may resize the height first
            return np.asarray(self._upright(0, None).resize(size, resampling).convert("RGB"))
        narrow = Image.new(MODE, (size.width, height))
        small = Image.new(MODE, size)

        def resize_width(start: int, end: int) -> None:
            top = height - end if self._item.header.orientation in MIRRORED else start
            band = self._upright(start, end)
            narrow.paste(band.resize((size.width, end - start), resampling), (0, top))

        def resize_height(start: int) -> None:
            end = min(start + _BLOCK, size.width)
            block = narrow.crop((start, 0, end, height))
            small.paste(block.resize((end - start, size.height), resampling), (start, 0))

        with _shared(self._submit) as add:
            self._decode(lambda start, end: add(partial(resize_width, start, end)))
        with _shared(self._submit) as add:
            for x in range(0, size.width, _BLOCK):
                add(partial(resize_height, x))
        return np.asarray(small.convert("RGB"))

    def _decode(self, on_band: OnBand) -> None:
        """Calls `on_band` for stored rows, or columns, that together are the image."""
        height = self.shape[0]
        is_swapped = self._item.header.orientation >= 5
        position = 0

        def progress(rows: int) -> None:
            nonlocal position
            while rows - position >= BAND:
                on_band(position, position + BAND)
                position += BAND

        if self._stored is None:
            self._stored = _StoredJpeg(self._item)
            self._stored.decode((lambda rows: None) if is_swapped else progress)
        progress(height)
        if position < height:
            on_band(position, height)

    def _upright(self, start: int, end: int | None) -> Image.Image:
        assert self._stored is not None
        return upright_band(self._stored.pixels, start, end, self._item.header.orientation)


class _NotStreamed(Exception):
    """Pillow has decoded it, but not as we watch it: another release may work otherwise."""


class _StoredJpeg(JpegImageFile):
    """Pillow's reader, with pixels in an array that is read before the last one is there.

    Pillow sets the fourth byte of a pixel to 255, and works from left to right: a row whose last pixel has it
    is complete. It is looked at between blocks of input, while Pillow does not work.
    """

    def __init__(self, item: MediaItem) -> None:
        super().__init__(io.BytesIO(item.data))
        check_stored_size(Size(*self.size), item)
        raw_size = rotated_size(item.header.size, item.header.orientation)
        if (self.mode, self.size) != ("RGB", raw_size):
            raise OSError(f"{self.mode} of {self.size} is not what its header was read as")
        draft(self, item.reduction)
        self.pixels = np.zeros((self.height, self.width, 4), np.uint8)
        self.im = as_image(self.pixels).im
        self._rows = 0
        self._progress: Callable[[int], None] = lambda rows: None

    def decode(self, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self.load()
        self._count_rows()
        if self._rows < self.height:
            raise _NotStreamed

    def load_prepare(self) -> None:
        """The pixels are there."""

    def load_read(self, read_bytes: int) -> bytes:
        self._count_rows()
        self._progress(self._rows)
        return super().load_read(read_bytes)

    def _count_rows(self) -> None:
        while count := int(np.count_nonzero(self.pixels[self._rows : self._rows + BAND, -1, 3])):
            self._rows += count


@contextmanager
def _shared(submit: Submit) -> Iterator[Callable[[Task], None]]:
    """Tasks added inside are done at its end, by idle threads or by this one, which waits for no busy thread.

    Threads know the queue, not the tasks: what none of them has taken holds no pixels.
    """
    tasks: deque[Task] = deque()
    futures: list[Future[None]] = []

    def take_first() -> None:
        if task := _pop(tasks.popleft):
            task()

    def add(task: Task) -> None:
        tasks.append(task)
        futures.append(submit(take_first))

    try:
        yield add
        while task := _pop(tasks.pop):
            task()
        for future in futures:
            if not future.cancel():
                future.result()
    finally:
        tasks.clear()


def _pop(pop: Callable[[], Task]) -> Task | None:
    try:
        return pop()
    except IndexError:  # another thread has taken the last
        return None
