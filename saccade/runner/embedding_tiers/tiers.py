"""The tiers of embeddings after the device: host memory, then a store. Which is asked, and what goes where.

    encode ──► put ──► host memory ──► queue ──► writer thread ──► store
    load  ◄── device ◄── host memory ◄── reader threads, with a deadline ◄── store

`load` runs in the threads that decode images, in place of decoding. Whatever fails there means encoding.
A store that fails or is late is left alone for a while. Entries that it has under a name of ours and that
are not of the expected form are removed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import Empty, Full, Queue, SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.media.video_pruning import Ints
from saccade.runner.embedding_tiers.entry import Buffer, EntryForm, Namespace, Restored, checksum
from saccade.runner.embedding_tiers.host import HostEntry, HostTier
from saccade.runner.embedding_tiers.rates import NEVER, EmbeddingTime
from saccade.runner.embedding_tiers.store import BadEntry, Store, StoreError
from saccade.types.media import Key, MediaItem

PAUSE_SECONDS = 10.0  # without the store after it has failed
_TIDY_SECONDS = 3600.0
_READERS = 4
_QUEUED = 256  # entries that wait to be written; their bytes are in host memory

Place = Callable[[Sequence[Tensor], int], Tensor]
"""(host memory in parts, bytes) -> the same bytes on the device, uint8, complete."""

logger = logging.getLogger("saccade.engine")


@dataclass
class TierCounters:
    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    ignored: int = 0  # entries of another form, removed
    errors: int = 0  # reads and writes that failed or came late
    dropped: int = 0  # embeddings that were not kept: too much was being read or written


class _Write(NamedTuple):
    key: Key
    name: str
    form: EntryForm


class EmbeddingTiers:
    """Closed until `open` says what they cost and what encoding costs."""

    read_seconds = 1.0  # that an image waits for the store before it is decoded instead
    close_seconds = 2.0  # to write what is queued when the engine stops

    def __init__(
        self,
        host: HostTier,
        store: Store | None,
        namespace: Namespace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.store = store
        self.namespace = namespace
        self._dtype: torch.dtype = getattr(torch, namespace.dtype)
        self._clock = clock
        self._encode = EmbeddingTime(0.0, 0.0)
        self._host_rate = self._store_rate = NEVER
        self._paused_until = float("-inf")
        self._lock = Lock()  # of counters and the pause
        self._counters = {"host": TierCounters()}
        if store is not None:
            self._counters[store.label] = TierCounters()
        self._writes: Queue[_Write | None] = Queue(_QUEUED)
        self._reads: SimpleQueue[tuple[Future[bool], MediaItem] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        if store is not None:
            targets = [self._write_all, *[self._read_all] * _READERS]
            # Daemons: a folder on a dead network must not keep the process from ending.
            self._threads = [Thread(target=run, name="saccade-embeddings", daemon=True) for run in targets]
            for thread in self._threads:
                thread.start()

    def open(self, encode: EmbeddingTime, host: EmbeddingTime, store: EmbeddingTime = NEVER) -> None:
        self._encode = encode
        self._host_rate = host
        self._store_rate = store
        self._counters = {label: TierCounters() for label in self._counters}  # measuring counts for nothing

    # --- reading --------------------------------------------------------------------------------------------

    def load(self, item: MediaItem, place: Place) -> Restored | None:
        """The embedding, on the device; None: encode it. In a thread that may wait for I/O, not for long."""
        if not self._pays(self._host_rate, item.geometry.slots):
            return None
        restored = self.from_host(item, place)
        self._count("host", hits=restored is not None, misses=restored is None)
        if restored is None and self._is_store_open(item.geometry.slots) and self._promoted_in_time(item):
            restored = self.from_host(item, place)
        return restored

    def from_host(self, item: MediaItem, place: Place) -> Restored | None:
        """What host memory alone has."""
        form = self.namespace.form(item)
        with self.host.reading(item.key) as entry:
            if entry is None or entry.size != form.embedding_bytes:
                return None
            try:
                data = place(self.host.parts(entry.pages, entry.size), entry.size)
            except torch.OutOfMemoryError:  # it was not planned for at this moment
                return None
            self._count("host", read_bytes=entry.size)
            return Restored(data.view(self._dtype).view(form.slots, form.width), entry.coordinates)

    def _promoted_in_time(self, item: MediaItem) -> bool:
        future: Future[bool] = Future()
        self._reads.put((future, item))
        try:
            return future.result(self.read_seconds)
        except TimeoutError:
            future.cancel()
            self._pause(f"it did not answer within {self.read_seconds:g} s")
            return False

    def promote(self, item: MediaItem) -> bool:
        """Read an entry of the store into host memory. Whether there is one, and it is as it should be."""
        assert self.store is not None
        form = self.namespace.form(item)
        pages = self.host.reserve(form.embedding_bytes)
        if pages is None:
            self._count("host", dropped=1)
            return False
        self.host.wait_for_copies()
        coordinates = None if form.cells is None else np.empty((2, form.slots), np.int64)
        try:
            is_found = self._read(self.namespace.name(item.key), form, pages, coordinates)
        except BaseException:
            self.host.give_back(pages)
            raise
        if is_found:
            self.host.insert(item.key, HostEntry(pages, form.embedding_bytes, coordinates))
        else:
            self.host.give_back(pages)
        return is_found

    def _read(self, name: str, form: EntryForm, pages: Sequence[int], coordinates: Ints | None) -> bool:
        assert self.store is not None
        header = bytearray(form.header_bytes)
        buffers = self._buffers(form, pages, coordinates)
        try:
            if not self.store.read(name, header, buffers):
                self._count(self.store.label, misses=1)
                return False
            if not form.is_valid(bytes(header), name, buffers) or not form.fits(coordinates):
                raise BadEntry
        except BadEntry:
            self._count(self.store.label, ignored=1, misses=1)
            with suppress(StoreError):
                self.store.remove(name)
            return False
        except StoreError as error:
            self._pause(str(error))
            return False
        self._count(self.store.label, hits=1, read_bytes=form.size)
        return True

    def _buffers(self, form: EntryForm, pages: Sequence[int], coordinates: Ints | None) -> list[Buffer]:
        parts: list[Buffer] = [part.numpy().data for part in self.host.parts(pages, form.embedding_bytes)]
        return parts if coordinates is None else [coordinates.data.cast("B"), *parts]

    def _read_all(self) -> None:
        assert self.store is not None
        while (task := self._reads.get()) is not None:
            future, item = task
            if future.set_running_or_notify_cancel():
                is_found = False
                try:
                    is_found = self.promote(item)
                except Exception:
                    self._count(self.store.label, errors=1)
                    logger.exception("an embedding could not be read from %s", self.store.where)
                future.set_result(is_found)

    # --- writing --------------------------------------------------------------------------------------------

    def put(self, item: MediaItem, embedding: Tensor, coordinates: Ints | None) -> None:
        """Keep what was just encoded. Never waits; what does not fit is dropped."""
        slots = item.geometry.slots
        if not self._pays(self._host_rate, slots):
            return
        if not self.host.put(item.key, embedding, coordinates):
            self._count("host", dropped=1)
            return
        self._count("host", written_bytes=embedding.nbytes)
        if self.store is not None and self._is_store_open(slots):
            task = _Write(item.key, self.namespace.name(item.key), self.namespace.form(item))
            try:
                self._writes.put_nowait(task)
            except Full:
                self._count(self.store.label, dropped=1)

    def _write_all(self) -> None:
        assert self.store is not None
        self._tidy()
        while True:
            try:
                task = self._writes.get(timeout=_TIDY_SECONDS)
            except Empty:
                self._tidy()
                continue
            try:
                if task is None:
                    return
                self._write(task)
            except StoreError as error:
                self._pause(str(error))
            except Exception:
                self._count(self.store.label, errors=1)
                logger.exception("an embedding could not be written to %s", self.store.where)
            finally:
                self._writes.task_done()

    def _write(self, task: _Write) -> None:
        assert self.store is not None
        with self.host.reading(task.key) as entry:
            if entry is None or self._is_paused:
                self._count(self.store.label, dropped=1)
                return
            buffers = self._buffers(task.form, entry.pages, entry.coordinates)
            self.store.write(task.name, task.form.header(task.name, checksum(buffers)), buffers)
        self._count(self.store.label, written_bytes=task.form.size)

    def _tidy(self) -> None:
        assert self.store is not None
        try:
            self.store.tidy()
        except StoreError as error:
            self._pause(str(error))

    def flush(self) -> None:
        """Wait until everything queued is written or dropped."""
        self._writes.join()

    # --- whether --------------------------------------------------------------------------------------------

    def _pays(self, tier: EmbeddingTime, slots: int) -> bool:
        return tier.seconds(slots) < self._encode.seconds(slots)

    def _is_store_open(self, slots: int) -> bool:
        return self.store is not None and self._pays(self._store_rate, slots) and not self._is_paused

    @property
    def _is_paused(self) -> bool:
        return self._clock() < self._paused_until

    def _pause(self, reason: str) -> None:
        assert self.store is not None
        with self._lock:
            was_paused = self._is_paused
            self._paused_until = self._clock() + PAUSE_SECONDS
        self._count(self.store.label, errors=1)
        if not was_paused:
            message = "embeddings are not kept in %s for %d s, images are encoded: %s"
            logger.warning(message, self.store.where, PAUSE_SECONDS, reason)

    # --- counters -------------------------------------------------------------------------------------------

    def _count(self, tier: str, **more: int) -> None:
        counters = self._counters[tier]
        with self._lock:
            for name, count in more.items():
                setattr(counters, name, getattr(counters, name) + count)

    def stats(self) -> dict[str, Any]:
        """Counters by tier."""
        stats = {tier: asdict(counters) for tier, counters in self._counters.items()}
        stats["host"] |= {"used_bytes": self.host.used_bytes, "evictions": self.host.evictions}
        if self.store is not None:
            usage = {"used_bytes": self.store.used_bytes, "evictions": self.store.evictions}
            stats[self.store.label] |= usage
        return stats

    def close(self) -> None:
        """Write what is queued, within a moment; then no thread is left that could."""
        if self.store is not None:
            with suppress(Full):
                self._writes.put(None, timeout=self.close_seconds)
            for _ in range(_READERS):
                self._reads.put(None)
            self._threads[0].join(self.close_seconds)
            self.store.close()
        self.host.close()
