"""JPEGs decoded into device memory for the decoding threads: those that wait together are one batch.

    thread ─► space for its pixels ─► waits ─┐ one thread at a time
    thread ─► space for its pixels ─► waits ─┴► nvJPEG, all that wait ─► pixels ─► resized ─► space given back

It owns the pixels until they are resized. What nvJPEG cannot decode is None, and the host decodes it.
"""

from __future__ import annotations

import io
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Lock

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from saccade import costs
from saccade.errors import ConfigError
from saccade.runner.encoder.image_errors import is_of_the_device
from saccade.runner.encoder.nvjpeg import Jpeg, NvJpeg, NvJpegError, load_library
from saccade.types.media import MediaItem, Size

logger = logging.getLogger("saccade.engine")

_TESTED = Size(1600, 1200)
_TOLERANCE = 4  # of 255, in the self-test: decoders round differently
_RISK = (
    "--gpu-jpeg: a damaged JPEG may show parts of an image decoded before it, also of another client's. Use "
    "it only where all clients may see all images."
)


@dataclass(eq=False)
class _JpegJob:
    jpeg: Jpeg
    orientation: int
    is_done: bool = False
    pixels: Tensor | None = None  # upright; None after it is done: it could not be decoded


class GpuJpegs:
    def __init__(self, nvjpeg: NvJpeg, max_pixels: int = costs.MAX_GPU_JPEG_PIXELS) -> None:
        self._nvjpeg = nvjpeg
        self._max_pixels = max_pixels
        self._held_pixels = 0
        self._freed = Condition()
        self._waiting: deque[_JpegJob] = deque()
        self._turn = Lock()  # to call nvJPEG

    @contextmanager
    def pixels(self, item: MediaItem) -> Iterator[Tensor | None]:
        """uint8 [height, width, 3], upright, complete on the device until the block ends."""
        width, height = item.header.size
        if width * height > self._max_pixels:
            yield None
            return
        orientation = item.header.orientation
        size = Size(width, height)
        if orientation >= 5:
            size = Size(height, width)
        with self._space(width * height):
            job = _JpegJob(Jpeg.of(item.data, size), orientation)
            self._waiting.append(job)
            with self._turn:
                if not job.is_done:  # by another thread, with its own
                    self._run([self._waiting.popleft() for _ in range(len(self._waiting))])
            yield job.pixels
            job.pixels = None

    def check_idle(self) -> None:
        """The conservation law: what was taken was given back."""
        assert self._held_pixels == 0, f"{self._held_pixels} pixels are held by nobody"
        assert not self._waiting, f"{len(self._waiting)} JPEGs wait for nobody"

    def close(self) -> None:
        with self._turn:
            self._nvjpeg.close()

    @contextmanager
    def _space(self, pixels: int) -> Iterator[None]:
        with self._freed:
            self._freed.wait_for(lambda: self._held_pixels + pixels <= self._max_pixels)
            self._held_pixels += pixels
        try:
            yield
        finally:
            with self._freed:
                self._held_pixels -= pixels
                self._freed.notify_all()

    def _run(self, jobs: Sequence[_JpegJob]) -> None:
        """Decode them as one batch. One that fails must not fail the others."""
        if len(jobs) > 1 and self._decode(jobs):
            return
        for job in jobs:
            self._decode([job])
            job.is_done = True

    def _decode(self, jobs: Sequence[_JpegJob]) -> bool:
        try:
            decoded = self._nvjpeg.decode([job.jpeg for job in jobs])
            with torch.inference_mode(), self._nvjpeg.on_stream():
                for index, job in enumerate(jobs):
                    decoded[index] = upright(decoded[index], job.orientation)
                self._nvjpeg.wait()
        except NvJpegError:
            return False
        except RuntimeError as error:  # PyTorch's: out of memory, in one of its forms
            if is_of_the_device(error):
                raise
            return False
        for job, pixels in zip(jobs, decoded, strict=True):
            job.pixels = pixels
            job.is_done = True
        return True


def upright(pixels: Tensor, orientation: int) -> Tensor:
    """[H, W, 3] after an EXIF orientation of 1, 3, 6 or 8. At most one copy is made."""
    if orientation == 3:
        return pixels.flip(0, 1)
    if orientation in (6, 8):
        rotated = pixels.transpose(0, 1)
        axis = 1 if orientation == 6 else 0
        backwards = torch.arange(rotated.shape[axis] - 1, -1, -1, device=pixels.device)
        return rotated.index_select(axis, backwards)
    return pixels


def build_gpu_jpegs(device: torch.device) -> GpuJpegs:
    try:
        nvjpeg = NvJpeg(load_library(), device)
        check_pixels(nvjpeg)
    except NvJpegError as error:
        raise ConfigError(f"gpu_jpeg was asked for, but {error}; leave out --gpu-jpeg") from None
    with nvjpeg.on_stream():  # freed at once; the allocator keeps it for this stream
        torch.empty(costs.gpu_jpeg_bytes(), dtype=torch.uint8, device=device)
    logger.warning(_RISK)
    return GpuJpegs(nvjpeg)


def check_pixels(nvjpeg: NvJpeg) -> None:
    """The self-test: nvJPEG decodes as Pillow, alone and in a batch."""
    small = np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8)
    photo = Image.fromarray(small).resize(_TESTED, Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    photo.save(stream, "JPEG", quality=90, subsampling="4:2:0")
    with Image.open(stream) as image:
        expected = np.asarray(image.convert("RGB")).astype(np.int16)
    for number in (1, 2):
        for out in nvjpeg.decode([Jpeg.of(stream.getvalue(), _TESTED)] * number):
            largest = int(np.abs(out.cpu().numpy() - expected).max())
            if largest > _TOLERANCE:
                raise NvJpegError(f"nvJPEG's pixels differ by {largest} of 255 from Pillow's")
