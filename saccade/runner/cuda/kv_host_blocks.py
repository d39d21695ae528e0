"""KV blocks in host memory, and the copies to and from there. The scheduler decides which.

    KV cache                       staging                         host memory, pinned beside a GPU
    layers of a block, apart  ◄─►  a block's layers together  ◄─►  the same
              on the stream of the steps         on a stream for each direction, by copy engines

Only the stream of the steps touches the KV cache, so copies are in order with what is computed. It waits for
blocks that come in. For blocks that go out it waits only when all staging buffers are full.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from saccade import costs
from saccade.errors import ConfigError
from saccade.models.layers.torch_attention import PagedKV
from saccade.runner.cuda.staging_sizes import IN_BUFFERS, OUT_BUFFERS, staging_blocks
from saccade.types.latency import LatencyCurve
from saccade.types.step import KVCopy
from saccade.util.torch_utils import to_device

_TIMED_BLOCKS = (1, 4, 16, 64, 256)
_REPEATS = 3
_VALUE_BYTES = 8

Event = torch.cuda.Event | None  # None where nothing is asynchronous
Stream = torch.cuda.Stream | None


class HostBlocks:
    def __init__(self, kv: PagedKV, block_size: int, num_blocks: int) -> None:
        self._caches = [_by_block(cache, block_size) for cache in kv.caches]
        self._device = kv.k.device
        width = sum(len(cache) * cache.shape[2] for cache in self._caches)
        self.num_blocks = num_blocks
        self.block_bytes = width * _VALUE_BYTES
        self._host = _host_memory(num_blocks * self.block_bytes).view(num_blocks, width)
        if self._device.type == "cuda":
            _pin(self._host)
            self._unpin = weakref.finalize(self, _unpin, self._host)  # which keeps the memory until then
            self._unpin.atexit = False
        shape = (staging_blocks(self.block_bytes), width)
        self._out = _Lane(OUT_BUFFERS, shape, self._device)
        self._in = _Lane(IN_BUFFERS, shape, self._device)
        self._copy_blocks = _torch_copy_blocks
        if self._device.type == "cuda":
            from saccade.kernels.ops.copy_kv_blocks import copy_blocks  # needs Triton

            self._copy_blocks = copy_blocks

    def copy(self, offloaded: Sequence[KVCopy], restored: Sequence[KVCopy]) -> None:
        """Out first: what comes in may overwrite those blocks, or read the host blocks they go to."""
        steps = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        for chunk in self._chunks(offloaded):
            self._offload(chunk, steps)
        for chunk in self._chunks(restored):
            self._restore(chunk, steps)

    def _chunks(self, copies: Sequence[KVCopy]) -> Iterator[Sequence[KVCopy]]:
        """What fits in a staging buffer, by host block: neighbours are copied together."""
        copies = sorted(copies, key=lambda copy: copy.host_block)
        size = len(self._out.buffers[0].rows)
        for first in range(0, len(copies), size):
            yield copies[first : first + size]

    def _offload(self, copies: Sequence[KVCopy], steps: Stream) -> None:
        lane = self._out
        buffer = lane.next_buffer()
        _wait(steps, buffer.unused)
        self._stage(copies, buffer.rows, to_cache=False)
        _wait(lane.stream, _record(steps))
        lane.wait_for(self._in, copies)
        with torch.cuda.stream(lane.stream):
            for staged, host in _runs(copies):
                self._host[host].copy_(buffer.rows[staged], non_blocking=True)
        buffer.unused = lane.done(copies)

    def _restore(self, copies: Sequence[KVCopy], steps: Stream) -> None:
        lane = self._in
        buffer = lane.next_buffer()
        _wait(lane.stream, buffer.unused)
        lane.wait_for(self._out, copies)
        with torch.cuda.stream(lane.stream):
            for staged, host in _runs(copies):
                buffer.rows[staged].copy_(self._host[host], non_blocking=True)
        _wait(steps, lane.done(copies))
        self._stage(copies, buffer.rows, to_cache=True)
        buffer.unused = _record(steps)

    def _stage(self, copies: Sequence[KVCopy], rows: Tensor, *, to_cache: bool) -> None:
        blocks = to_device(torch.tensor([copy.block for copy in copies]), self._device)
        first = 0
        for cache in self._caches:
            end = first + len(cache) * cache.shape[2]
            self._copy_blocks(cache, rows[: len(copies), first:end], blocks, to_cache=to_cache)
            first = end

    @torch.inference_mode()
    def measure(self) -> LatencyCurve:
        """Milliseconds to restore some blocks. Overwrites the cache: call it before any request is open."""
        limit = min(self.num_blocks, self._caches[0].shape[1])
        sizes = [size for size in _TIMED_BLOCKS if size <= limit]
        self.copy([KVCopy(0, 0)], ())  # compiles its kernel now
        return tuple((size, min(self._restore_ms(size) for _ in range(_REPEATS))) for size in sizes)

    def _restore_ms(self, count: int) -> float:
        copies = [KVCopy(block, block) for block in range(count)]
        self._synchronize()
        start = time.perf_counter()
        self.copy((), copies)
        self._synchronize()
        return (time.perf_counter() - start) * 1e3

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Unpin the memory; nothing can be copied any more."""
        self._synchronize()
        if self._device.type == "cuda":
            self._unpin()


class _CopyRows:
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows  # int64 [blocks, width]
        self.unused: Event = None  # since then


class _Lane:
    """One direction: its stream, staging buffers, and which host blocks are being copied."""

    def __init__(self, count: int, shape: tuple[int, int], device: torch.device) -> None:
        self.stream: Stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.buffers = [_CopyRows(torch.empty(shape, dtype=torch.int64, device=device)) for _ in range(count)]
        self._under_way: deque[_UnderWay] = deque()

    def next_buffer(self) -> _CopyRows:
        self.buffers.append(self.buffers.pop(0))
        return self.buffers[-1]

    def done(self, copies: Sequence[KVCopy]) -> Event:
        """After the copies of these blocks, which were launched."""
        event = _record(self.stream)
        if event is not None:
            self._under_way.append(_UnderWay(event, {copy.host_block for copy in copies}))
        return event

    def wait_for(self, other: _Lane, copies: Sequence[KVCopy]) -> None:
        """Copies of the other direction that read or write the same host blocks go first."""
        while other._under_way and other._under_way[0].event.query():  # type: ignore[no-untyped-call]
            other._under_way.popleft()
        host_blocks = {copy.host_block for copy in copies}
        for event, being_copied in other._under_way:
            if not host_blocks.isdisjoint(being_copied):
                _wait(self.stream, event)


class _UnderWay(NamedTuple):
    event: torch.cuda.Event
    host_blocks: set[int]


def _record(stream: Stream) -> Event:
    return None if stream is None else stream.record_event()


def _wait(stream: Stream, event: Event) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


def _by_block(cache: Tensor, block_size: int) -> Tensor:
    """[layers, slots, heads, d] -> [layers, blocks, values of 8 bytes]"""
    blocks = cache.view(len(cache), cache.shape[1] // block_size, -1)
    return blocks.view(torch.int64)


def _runs(copies: Sequence[KVCopy]) -> Iterator[tuple[slice, slice]]:
    """Neighbours in host memory: their rows in the staging buffer, and their host blocks."""
    numbered = enumerate(copy.host_block for copy in copies)
    for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0]):
        (first, host), *rest = run
        yield slice(first, first + 1 + len(rest)), slice(host, host + 1 + len(rest))


def _torch_copy_blocks(cache: Tensor, rows: Tensor, blocks: Tensor, *, to_cache: bool) -> None:
    """As `kernels.ops.copy_kv_blocks`, in PyTorch."""
    by_layer = rows.view(len(rows), len(cache), -1).transpose(0, 1)  # [layers, n, width]
    if to_cache:
        cache.index_copy_(1, blocks, by_layer)
    else:
        by_layer.copy_(cache.index_select(1, blocks))


def _host_memory(num_bytes: int) -> Tensor:
    """Written, not only reserved, so that missing memory fails at start-up."""
    try:
        pages = mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise _refused(num_bytes, str(error)) from None
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # fewer pages to pin; none is copied by a fork
        with suppress(OSError, AttributeError):  # a system that has none
            pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.int64).zero_()


def _pin(memory: Tensor) -> None:
    """`Tensor.pin_memory` would round up to a power of two."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise _refused(memory.nbytes, f"CUDA error {code} while pinning it")


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def _refused(num_bytes: int, why: str) -> ConfigError:
    return ConfigError(
        f"{num_bytes} bytes ({num_bytes / costs.GIB:.2f} GiB) of host memory for KV blocks cannot be had: "
        f"{why}; lower --kv-offload-gb, or raise the limits of memory and of locked memory (ulimit -l)"
    )
