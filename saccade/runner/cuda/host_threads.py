"""How many threads of the host PyTorch uses. The number is one of the whole process; engines come and go in it."""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakSet

import torch


class OneThread:
    """Until its end one thread; when the last of several has ended, as many as before the first."""

    _open: ClassVar[WeakSet[OneThread]] = WeakSet()
    _before: ClassVar[int] = 1

    def __init__(self) -> None:
        if not OneThread._open:
            OneThread._before = torch.get_num_threads()
        torch.set_num_threads(1)
        OneThread._open.add(self)

    def end(self) -> None:
        if self in OneThread._open:
            OneThread._open.remove(self)
            if not OneThread._open:
                torch.set_num_threads(OneThread._before)
