"""Shared memory that embeddings pass through from an encoder worker to an engine, and what is reserved in it.

The engine owns it and hands a file descriptor to the worker. It has no name: when both processes are gone,
however they ended, so is the memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os

_ALIGNMENT = 64
_F_ADD_SEALS = 1033  # Linux
_F_SEAL_SHRINK = 0x0002


class Space:
    """Which bytes of an arena are free. First fit; adjacent free ranges are joined."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: dict[int, int] = {0: size}  # start -> end, in order
        self._reserved: dict[int, int] = {}

    def reserve(self, size: int) -> int | None:
        """Where so many bytes begin; None: there is no such range now."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        start = next((start for start, end in self._free.items() if end - start >= size), None)
        if start is None:
            return None
        end = self._free[start]
        ranges = [(first, last) for first, last in self._free.items() if first != start]
        if end - start > size:
            ranges.append((start + size, end))
        self._free = dict(sorted(ranges))
        self._reserved[start] = start + size
        return start

    def free(self, start: int) -> None:
        ranges = sorted([*self._free.items(), (start, self._reserved.pop(start))])
        joined: dict[int, int] = {}
        last = 0
        for first, end in ranges:
            if joined.get(last) == first:
                joined[last] = end
            else:
                joined[first] = end
                last = first
        self._free = joined

    @property
    def used(self) -> int:
        return sum(end - start for start, end in self._reserved.items())

    def check(self) -> None:
        """The conservation law: every byte is free or reserved, once."""
        end = 0
        for first, last in sorted([*self._free.items(), *self._reserved.items()]):
            assert first == end, f"bytes {end} to {first} have no owner, or two"
            end = last
        assert end == self.size, f"{self.size - end} bytes were lost"


def new_arena(size: int) -> int:
    """The descriptor of so much shared memory. It cannot shrink: no process reads beyond its end."""
    fd = os.memfd_create("saccade-embeddings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)
    except OSError:
        os.close(fd)
        raise
    return fd


def mapped(fd: int) -> memoryview:
    """All of an arena; unmapped when the last view of it is gone. Closes the descriptor."""
    try:
        return memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
    finally:
        os.close(fd)
