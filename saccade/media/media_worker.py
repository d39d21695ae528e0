"""The process that parses clients' media: `python -m saccade.media.media_worker`, with a socket as its stdin.

libjpeg, libtiff, FFmpeg, PDFium and others read hostile bytes here alone. A file that takes too long, too
much memory or crashes its parser ends this process, and its parent starts another one.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from saccade.errors import RequestError, reason_of
from saccade.helpers.main import AnswerRefused, limit_address_space, serve
from saccade.media.decode import Pixels, decode_item
from saccade.media.jobs import (
    SEND_AGAIN,
    AnyJob,
    Decode,
    PdfBoxes,
    PdfText,
    Refusal,
    Resize,
    VideoHeader,
    encoded,
    unpack,
)
from saccade.media.jpeg_stream import StreamedJpeg
from saccade.media.pdf_reader import PdfReader, UnreadablePdf
from saccade.media.shared_pixels import WrittenPixels
from saccade.media.video_probe import read_video
from saccade.media.video_reader import VideoReaders


class MediaWorker:
    """Keeps what it read last: pages of a PDF and frame groups of a video are asked for one by one."""

    def __init__(self) -> None:
        self._data = b""
        self._pdf = PdfReader()
        self._readers = VideoReaders()
        self._memory = WrittenPixels()
        self._threads: ThreadPoolExecutor | None = None

    def answer(self, body: bytes, fds: Sequence[int]) -> bytes:
        has_data, memory, job, data = unpack(body)
        if not has_data:
            self._forget(data)
        elif not self._data:
            raise AnswerRefused(SEND_AGAIN)
        _limit_memory(memory)
        try:
            for fd in fds:
                self._memory.open(fd)
            return self._done(job)
        except RequestError as error:
            raise AnswerRefused(encoded(Refusal(error.message, error.code, error.param))) from None
        except UnreadablePdf as error:
            raise AnswerRefused(encoded(Refusal(str(error), "invalid_document", is_rest=True))) from None
        except OSError as error:  # of this machine: decoders tell theirs of a file as above
            message = f"cannot be read now: {reason_of(error)}; try again"
            raise AnswerRefused(encoded(Refusal(message, "overloaded", is_rest=True))) from None
        finally:
            self._memory.trim()

    def _forget(self, data: bytes) -> None:
        """What belongs to the file before."""
        self._pdf.close()
        self._readers.close()
        self._data = data

    def _done(self, job: AnyJob) -> bytes:
        if isinstance(job, PdfBoxes):
            return encoded(self._pdf.boxes(self._data, job.limit))
        if isinstance(job, PdfText):
            return encoded(self._pdf.text(self._data, job.page))
        if isinstance(job, VideoHeader):
            return encoded(read_video(self._data))
        return encoded(self._pixels(job).shape)

    def _pixels(self, job: Decode | Resize) -> Pixels:
        item = replace(job.item, data=self._data)
        if isinstance(job, Resize):
            image = StreamedJpeg(item, partial(self._submit, job.threads))
            return self._written(image.resized(job.size, job.resampling))
        if item.page is not None:
            width, height = item.header.size
            return self._pdf.render(self._data, item.page, self._memory.new((height, width, 3)))
        return self._written(decode_item(item, self._readers, self._memory.new))

    def _written(self, pixels: Pixels) -> Pixels:
        """The pixels in shared memory, where some decoders put them at once."""
        shared = self._memory.new(pixels.shape)
        if not np.may_share_memory(shared, pixels):
            np.copyto(shared, pixels)
        return shared

    def _submit(self, threads: int, task: Callable[[], None]) -> Future[None]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max(1, threads))
        return self._threads.submit(task)


def _limit_memory(spare: int) -> None:
    """Bytes beside what this process has. Not where the kernel does not tell that, as on macOS."""
    with suppress(OSError), open("/proc/self/statm", "rb") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
        limit_address_space(now + spare)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(int(sys.argv[1]))
    serve(MediaWorker().answer)


if __name__ == "__main__":
    main()
