"""Embeddings in host memory: one block, taken at start, in pages. It does not know when to use them.

    pages    | a a a b b . . a a c . |      an entry is a list of pages; the last one may be partly empty

Beside a GPU the memory is pinned. An entry is copied from the device on a stream of its own when it was
encoded; the threads that read it wait for that copy. The least recently used entry is evicted first.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from threading import Lock

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.runner.embedding_tiers.entry import Ints
from saccade.types.media import Key

PAGE_BYTES = 256 << 10  # an embedding of 1280x960 takes some megabytes


@dataclass(eq=False, slots=True)
class HostEntry:
    pages: tuple[int, ...]
    size: int  # bytes of the embedding
    coordinates: Ints | None
    copied: torch.cuda.Event | None = None  # after the copy from the device
    readers: int = 0  # an entry that is being read is not evicted


class HostTier:
    def __init__(self, num_bytes: int, device: torch.device, page_bytes: int = PAGE_BYTES) -> None:
        pages = num_bytes // page_bytes
        self._page_bytes = page_bytes
        self._memory = torch.empty(pages * page_bytes, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            _pin(self._memory)
            self._unpin = weakref.finalize(
                self, _unpin, self._memory
            )  # also of an engine that was not closed
            self._unpin.atexit = False
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last_copy: torch.cuda.Event | None = None
        self._entries: OrderedDict[Key, HostEntry] = OrderedDict()  # least recently used first
        self._free = list(range(pages))[::-1]
        self._num_pages = pages
        self._num_reserved = 0
        self._lock = Lock()
        self.evictions = 0

    @property
    def total_bytes(self) -> int:
        return self._num_pages * self._page_bytes

    @property
    def used_bytes(self) -> int:
        return (self._num_pages - len(self._free)) * self._page_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def put(self, key: Key, embedding: Tensor, coordinates: Ints | None) -> bool:
        """Copy an embedding from the device, without waiting. False: it does not fit beside what is read."""
        data = embedding.contiguous().view(torch.uint8).flatten()
        pages = self.reserve(data.numel())
        if pages is None:
            return False
        if self._stream is None:
            self._copy(data, pages)
            self.insert(key, HostEntry(pages, data.numel(), coordinates))
            return True
        self._stream.wait_stream(torch.cuda.current_stream(data.device))
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._copy(data, pages)
            copied.record()
        data.record_stream(self._stream)
        self._last_copy = copied
        self.insert(key, HostEntry(pages, data.numel(), coordinates, copied))
        return True

    def _copy(self, data: Tensor, pages: Sequence[int]) -> None:
        start = 0
        for part in self.parts(pages, data.numel()):
            part.copy_(data[start : start + part.numel()], non_blocking=True)
            start += part.numel()

    def reserve(self, size: int) -> tuple[int, ...] | None:
        """Pages for so many bytes, evicting what is not being read. None: too few. Insert or return them."""
        count = -(-size // self._page_bytes)
        with self._lock:
            if not self._evict_until(count):
                return None
            pages = tuple(self._free.pop() for _ in range(count))
            self._num_reserved += count
        return pages

    def wait_for_copies(self) -> None:
        """Before the host writes to reserved pages: a copy to an evicted entry may still be under way."""
        if (copy := self._last_copy) is not None:
            copy.synchronize()

    def _evict_until(self, count: int) -> bool:
        if count > self._num_pages:
            return False
        while len(self._free) < count:
            victim = next((key for key, entry in self._entries.items() if not entry.readers), None)
            if victim is None:
                return False
            self._release(self._entries.pop(victim).pages)
            self.evictions += 1
        return True

    def insert(self, key: Key, entry: HostEntry) -> None:
        """Reserved pages become an entry. If there is one, which has the same bytes, that one stays."""
        with self._lock:
            self._num_reserved -= len(entry.pages)
            if key in self._entries:
                self._release(entry.pages)
            else:
                self._entries[key] = entry

    def give_back(self, pages: Sequence[int]) -> None:
        """Reserved pages that were not used."""
        with self._lock:
            self._num_reserved -= len(pages)
            self._release(pages)

    def _release(self, pages: Sequence[int]) -> None:
        self._free += reversed(pages)  # taken again in the same order, so that runs stay runs

    def discard(self, key: Key) -> None:
        """Remove an entry, unless it is being read."""
        with self._lock:
            if key in self._entries and not self._entries[key].readers:
                self._release(self._entries.pop(key).pages)

    @contextmanager
    def reading(self, key: Key) -> Iterator[HostEntry | None]:
        """The entry, complete and safe from eviction; None if there is none."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                entry.readers += 1
        if entry is None:
            yield None
            return
        try:
            if entry.copied is not None:
                entry.copied.synchronize()
            yield entry
        finally:
            with self._lock:
                entry.readers -= 1

    def parts(self, pages: Sequence[int], size: int) -> list[Tensor]:
        """The memory of so many bytes in these pages: uint8, one tensor for each run of adjacent pages."""
        parts = []
        for _, run in groupby(enumerate(pages), lambda pair: pair[1] - pair[0]):
            places = [page for _, page in run]
            length = min(size, len(places) * self._page_bytes)
            start = places[0] * self._page_bytes
            parts.append(self._memory[start : start + length])
            size -= length
        return parts

    def close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
            self._stream = None
            self._unpin()

    def check(self) -> None:
        """The conservation law: each page is free, reserved, or of one entry."""
        with self._lock:
            pages = [page for entry in self._entries.values() for page in entry.pages] + self._free
            assert len(pages) == len(set(pages)), "a page has two owners"
            assert len(pages) + self._num_reserved == self._num_pages, "pages were lost"
            assert all(-(-e.size // self._page_bytes) == len(e.pages) for e in self._entries.values())


def _pin(memory: Tensor) -> None:
    """Pin it as it is: PyTorch's allocator of pinned memory would round it up to a power of two."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        with contextlib.suppress(RuntimeError):  # CUDA tells the error again at the next launch
            torch.zeros(1, device="cuda")
        size = f"{memory.numel() / (1 << 30):.2f} GiB"
        raise ConfigError(
            f"{size} of host memory could not be pinned (CUDA error {int(status)}); "
            "lower --embedding-host-gb or raise the limit of locked memory (ulimit -l)"
        )


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
