"""Brings decoded pictures to a CUDA device and prepares them there, beside the engine's own stream. Knows no queue.

Pixels travel as they were decoded, 3 bytes each, through pinned memory; PyTorch keeps pinned blocks by size class, so
pinning costs time once a size. One stream for all threads: what one picture frees there the next one reuses, so only
one picture at a time takes memory beside its patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from saccade.models.interface import VisionLanguageModel
from saccade.models.vision.preprocess import Pixels, as_tensor
from saccade.types import Geometry

Prepare = Callable[[Pixels, Geometry], Tensor]
"""(decoded picture, geometry) -> patches on the model's device, complete. Runs in the threads that decode."""


class Upload:
    def __init__(self, model: VisionLanguageModel, device: torch.device, reserve_bytes: int = 0) -> None:
        self.model = model
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = Lock()
        with torch.cuda.stream(self._stream):  # freed at once, and kept for this stream: later pictures are cut from it
            torch.empty(reserve_bytes, dtype=torch.uint8, device=device)

    def __call__(self, image: Pixels, geometry: Geometry) -> Tensor:
        staged = as_tensor(image) if image.flags.writeable else None
        if staged is None or not staged.is_pinned():  # not decoded into `pinned`
            staged = torch.from_numpy(pinned(image.shape))
            np.copyto(staged.numpy(), image)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with self._lock, torch.cuda.stream(self._stream):
            patches = self.model.prepare(staged.to(self._device, non_blocking=True), geometry)
            done.record()
        done.synchronize()  # nobody is kept waiting but this thread
        return patches


def pinned(shape: tuple[int, ...]) -> Pixels:
    """Memory that is copied from while others work."""
    array: Pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
    return array


def use_on_current_stream(parts: Iterable[Tensor]) -> None:
    """They were made on the upload's stream: its next picture must not take their memory before this stream is done."""
    for patches in parts:
        if patches.is_cuda:
            patches.record_stream(torch.cuda.current_stream(patches.device))
