"""Copies decoded images to a CUDA device and preprocesses them there, on a side stream. Knows no queue.

Pixels are copied as decoded, 3 bytes each, through pinned memory, which PyTorch caches by size class. All
threads share one stream: each image reuses the memory that the one before freed. A model that prepares images
on the host does so in all threads at once, and what it made is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from saccade.models.interface import PreparesOnHost, VisionLanguageModel
from saccade.models.vision.preprocess import Pixels, as_tensor
from saccade.types.media import Geometry

Prepare = Callable[[Pixels | Tensor, Geometry], Tensor]
"""(decoded image, geometry) -> patches on the model's device, complete. Runs in the decoding threads."""


class PixelUpload:
    def __init__(self, model: VisionLanguageModel, device: torch.device, reserve_bytes: int = 0) -> None:
        self.model = model
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = Lock()
        with torch.cuda.stream(self._stream):  # freed at once; the allocator keeps it for this stream
            torch.empty(reserve_bytes, dtype=torch.uint8, device=device)

    def __call__(self, image: Pixels | Tensor, geometry: Geometry) -> Tensor:
        """A tensor is on the device already, and complete."""
        if isinstance(self.model, PreparesOnHost):
            rows = self.model.prepare_on_host(image, geometry.resized, geometry.clip)
            return self._complete(lambda: rows.to(self._device, non_blocking=True))
        staged = image if isinstance(image, Tensor) else _staged(image)
        return self._complete(
            lambda: self.model.prepare(staged.to(self._device, non_blocking=True), geometry)
        )

    def place(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """Pinned memory in parts -> the same bytes in one tensor on the device, complete."""

        def copied() -> Tensor:
            whole = torch.empty(size, dtype=torch.uint8, device=self._device)
            start = 0
            for part in parts:
                whole[start : start + part.numel()].copy_(part, non_blocking=True)
                start += part.numel()
            return whole

        return self._complete(copied)

    def _complete(self, work: Callable[[], Tensor]) -> Tensor:
        """Its result, when the stream has made it. Blocks this thread alone."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with self._lock, torch.cuda.stream(self._stream):
            made = work()
            event.record()
        event.synchronize()
        return made


def _staged(image: Pixels) -> Tensor:
    """The image in pinned memory, where it is unless it was not decoded into `pinned`."""
    if image.flags.writeable:
        staged = as_tensor(image)
        if staged.is_pinned():
            return staged
    staged = torch.from_numpy(pinned(image.shape))
    np.copyto(staged.numpy(), image)
    return staged


def joined(parts: Sequence[Tensor], size: int) -> Tensor:
    """The same where the device is the host."""
    return torch.cat(tuple(parts))


def pinned(shape: tuple[int, ...]) -> Pixels:
    """Host memory for asynchronous copies."""
    array: Pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
    return array


def pin(memory: Pixels) -> Callable[[], None]:
    """Host memory that exists already, for asynchronous copies. Returns what undoes it."""
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    if int(cuda.cudaHostRegister(address, memory.nbytes, 0)) != 0:
        with suppress(RuntimeError):  # the runtime tells the next kernel of it
            torch.ones(1, device="cuda")
        return lambda: None  # it is copied into pinned memory then
    return lambda: cuda.cudaHostUnregister(address)


def use_on_current_stream(parts: Iterable[Tensor]) -> None:
    """Tell the allocator that tensors of the upload's stream are read here, so that it reuses them later."""
    for patches in parts:
        if patches.is_cuda:
            patches.record_stream(torch.cuda.current_stream(patches.device))
