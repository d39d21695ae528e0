"""PyTorch's number of CPU threads. It belongs to the process, in which engines come and go."""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakSet

import torch


class OneTorchThread:
    """PyTorch uses one thread until `end`; after the last of several, as many as before the first."""

    _open: ClassVar[WeakSet[OneTorchThread]] = WeakSet()
    _before: ClassVar[int] = 1

    def __init__(self) -> None:
        if not OneTorchThread._open:
            OneTorchThread._before = torch.get_num_threads()
        torch.set_num_threads(1)
        OneTorchThread._open.add(self)

    def end(self) -> None:
        if self in OneTorchThread._open:
            OneTorchThread._open.remove(self)
            if not OneTorchThread._open:
                torch.set_num_threads(OneTorchThread._before)
