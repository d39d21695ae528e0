"""Asynchronous copies between host and device: metadata to the device, sampled tokens back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.util.torch_utils import to_device as copy_to_device

Metadata = npt.NDArray[np.int32]


class PinnedStaging:
    """Pinned memory for a step's metadata. Double-buffered: one copy may still be in flight."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        is_cuda = device.type == "cuda"
        hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda) for _ in range(2)]
        self._buffers = [_StagingBuffer(host, host.numpy(), _event() if is_cuda else None) for host in hosts]

    def open(self) -> Metadata:
        """The buffer to write next, with its old contents; waits until its last copy is done."""
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer.metadata

    def send(self, target: Tensor, first: int = 0) -> None:
        """Copy from the buffer, beginning at `first`, as much as `target` holds, in stream order."""
        buffer = self._buffers[0]
        target.copy_(buffer.host[first : first + target.numel()], non_blocking=True)
        if buffer.copied is not None:
            buffer.copied.record()


class _StagingBuffer(NamedTuple):
    host: Tensor  # int32 [size]
    metadata: Metadata  # the same memory
    copied: torch.cuda.Event | None  # after its last copy; None where copies are synchronous


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class TokenReadback:
    """Pinned memory for sampled tokens. They are read before the third copy after theirs."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda) for _ in range(3)]

    def copy(self, tokens: Tensor) -> Tensor:
        self._hosts.append(self._hosts.pop(0))
        return self._hosts[-1][: len(tokens)].copy_(tokens, non_blocking=True)


def to_device(metadata: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy without waiting for the device."""
    return copy_to_device(torch.from_numpy(metadata), device)
