"""Copies between the host and the device that nobody waits for: metadata on its way there, tokens on their way back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.torch_utils import to_device as copy_to_device

Metadata = npt.NDArray[np.int32]


class PinnedStaging:
    """Pinned memory in which a step's numbers are written; two pieces, for one may still be on its way."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        is_cuda = device.type == "cuda"
        hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda) for _ in range(2)]
        self._pieces = [_Piece(host, host.numpy(), _event() if is_cuda else None) for host in hosts]

    def open(self) -> Metadata:
        """The piece to write next, as it was left; waits until its last copy is done."""
        self._pieces.reverse()
        piece = self._pieces[0]
        if piece.sent is not None:
            piece.sent.synchronize()
        return piece.metadata

    def send(self, target: Tensor, first: int = 0) -> None:
        """As much of the piece, from `first` on, as `target` [numbers] holds, in the order of the device's stream."""
        piece = self._pieces[0]
        target.copy_(piece.host[first : first + target.numel()], non_blocking=True)
        if piece.sent is not None:
            piece.sent.record()


class _Piece(NamedTuple):
    host: Tensor  # int32 [size]
    metadata: Metadata  # the same memory
    sent: torch.cuda.Event | None  # its last copy, if any; None where copies are done at once


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class TokenReadback:
    """Pinned memory for tokens on their way to the host. They are read before the third run after theirs."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._hosts = [torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(3)]

    def fetch(self, tokens: Tensor) -> Tensor:
        self._hosts.append(self._hosts.pop(0))
        return self._hosts[-1][: len(tokens)].copy_(tokens, non_blocking=True)


def to_device(metadata: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Without waiting for the device."""
    return copy_to_device(torch.from_numpy(metadata), device)
