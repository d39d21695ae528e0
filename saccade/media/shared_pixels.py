"""Shared memory that pixels are decoded into: a process writes, its parent reads.

It has no name and cannot shrink, so neither side can make the other read beyond its end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable

import numpy as np

from saccade.media.decode import Pixels

_SMALLEST = 1 << 22
_KEPT = 1 << 26  # larger ones are given back after an image
_F_ADD_SEALS = 1033  # Linux
_F_SEAL_SHRINK = 0x0002


Pin = Callable[[Pixels], Callable[[], None]]
"""Makes memory such that a device copies from it by itself; what it returns undoes that."""


class SharedPixels:
    """The parent's end. Used by one thread at a time."""

    def __init__(self, pin: Pin | None = None) -> None:
        self.fd = -1
        self._memory: mmap.mmap | None = None
        self._pin = pin
        self._unpin: Callable[[], None] | None = None

    @property
    def size(self) -> int:
        return len(self._memory) if self._memory else 0

    def reserve(self, size: int) -> None:
        """Reserve at least so many bytes. What was there is lost."""
        if size <= self.size:
            return
        self.close()
        self.fd = _new_file(1 << (max(size, _SMALLEST) - 1).bit_length())
        self._memory = mmap.mmap(self.fd, 0)
        if self._pin and self.size <= _KEPT:  # it takes longer than a copy, and pays by the next images
            self._unpin = self._pin(self.pixels((self.size,)))

    def pixels(self, shape: tuple[int, ...]) -> Pixels:
        """Those that were written, not copied. ValueError if there are fewer."""
        assert self._memory is not None, "nothing was reserved"
        return np.frombuffer(self._memory, np.uint8, int(np.prod(shape))).reshape(shape)

    def trim(self) -> None:
        if self.size > _KEPT:
            self.close()

    def close(self) -> None:
        """The memory is free when the last view of it is gone."""
        if self._unpin:
            self._unpin()
        self._memory = self._unpin = None
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class WrittenPixels:
    """The process's end."""

    def __init__(self) -> None:
        self._inode = -1
        self._memory: mmap.mmap | None = None

    def open(self, fd: int) -> None:
        """Often the same as before."""
        inode = os.fstat(fd).st_ino
        if inode != self._inode:
            self._memory = mmap.mmap(fd, 0)
            self._inode = inode

    def new(self, shape: tuple[int, ...]) -> Pixels:
        """The memory as an array to decode into."""
        assert self._memory is not None, "no memory came with the job"
        return np.frombuffer(self._memory, np.uint8, int(np.prod(shape))).reshape(shape)

    def trim(self) -> None:
        if self._memory is not None and len(self._memory) > _KEPT:
            self._memory, self._inode = None, -1


def _new_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("saccade-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
        if hasattr(os, "memfd_create"):
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)
    except OSError:
        os.close(fd)
        raise
    return fd
