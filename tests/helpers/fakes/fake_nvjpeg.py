"""nvJPEG's functions in Python: Pillow decodes, into memory of the host."""

from __future__ import annotations

import ctypes
import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from saccade.runner.encoder.nvjpeg import NvJpeg

BAD_JPEG, NO_MEMORY, NO_HARDWARE = 3, 5, 7
HARDWARE = 3


class FakeNvJpeg:
    """Remembers what it was asked for. A JPEG that Pillow refuses is a bad one."""

    def __init__(self, engines: int = 7, error: int = 0) -> None:
        self.engines = engines
        self.error = error  # added to every value
        self.batches: list[int] = []  # sizes of decoded batches
        self.refused: set[bytes] = set()
        self.live: set[str] = set()  # handles and states
        self.initialized = 0
        self.fails_to_create = 0  # states, so many times

    def nvjpegCreateEx(self, backend: Any, allocator: Any, pinned: Any, flags: Any, handle: Any) -> int:
        assert backend.value == HARDWARE
        if not self.engines:
            return NO_HARDWARE
        handle._obj.value = 1
        self.live.add("handle")
        return 0

    def nvjpegGetHardwareDecoderInfo(self, handle: Any, engines: Any, cores: Any) -> int:
        engines._obj.value, cores._obj.value = self.engines, 1
        return 0

    def nvjpegJpegStateCreate(self, handle: Any, state: Any) -> int:
        if self.fails_to_create:
            self.fails_to_create -= 1
            return NO_MEMORY
        state._obj.value = 2
        self.live.add("state")
        return 0

    def nvjpegJpegStateDestroy(self, state: Any) -> int:
        self.live.remove("state")
        return 0

    def nvjpegDestroy(self, handle: Any) -> int:
        self.live.remove("handle")
        return 0

    def nvjpegGetImageInfo(
        self, handle: Any, data: Any, length: Any, number: Any, css: Any, wide: Any, high: Any
    ) -> int:
        try:
            with Image.open(io.BytesIO(ctypes.string_at(data, length.value))) as image:
                wide[0], high[0] = image.size
                number._obj.value = len(image.getbands())
        except OSError:
            return BAD_JPEG
        return 0

    def nvjpegDecodeBatchedInitialize(self, handle: Any, state: Any, size: Any, threads: Any, form: Any) -> int:
        self.initialized = size.value
        return 0

    def nvjpegDecodeBatched(self, handle: Any, state: Any, data: Any, lengths: Any, images: Any, stream: Any) -> int:
        assert self.initialized == len(images)
        self.batches.append(len(images))
        pointers = ctypes.cast(data, ctypes.POINTER(ctypes.c_void_p))  # not bytes up to the first zero
        sources = [ctypes.string_at(pointers[i], length) for i, length in enumerate(lengths)]
        return max(map(self._decode, sources, images))

    def _decode(self, data: bytes, to: Any) -> int:
        if data in self.refused:
            return BAD_JPEG
        try:
            with Image.open(io.BytesIO(data)) as image:
                pixels = np.asarray(image.convert("RGB"))
        except OSError:
            return BAD_JPEG
        shown = np.ascontiguousarray((pixels.astype(np.int16) + self.error).clip(0, 255).astype(np.uint8))
        assert to.pitch[0] == 3 * shown.shape[1]
        ctypes.memmove(to.channel[0], shown.ctypes.data, shown.nbytes)
        return 0


def open_fake(fake: FakeNvJpeg) -> NvJpeg:
    return NvJpeg(fake, torch.device("cpu"))
