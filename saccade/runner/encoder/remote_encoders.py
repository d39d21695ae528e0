"""Encoder workers as the encoder stage uses them: which one gets an image, and what is done when it fails.

Owns the channels and the list of images that workers died of. A decoding thread calls `load` in place of
decoding and waits there; None means that the image is encoded in this engine, as without workers.

    lost     the worker died: once more, alone, in another worker; without one, in the engine
    late     beyond what its patches should take: in the engine; the worker gets no image for a while
    wrong    another size, shape or dtype than the bill says: in the engine
    twice    two workers died of the image: it is refused

Frame groups of videos are not sent: each would carry its whole file.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from threading import Condition, Event, Thread
from typing import Any

import torch

from saccade.errors import RequestError
from saccade.helpers.process import count_seconds
from saccade.runner.embedding_tiers.entry import EntryForm, Namespace, Restored
from saccade.runner.embedding_tiers.tiers import Place
from saccade.runner.encoder.encoder_channel import (
    Connect,
    EncoderChannel,
    EncoderLate,
    EncoderLost,
    RemoteEmbedding,
)
from saccade.types.media import Key, MediaItem

IMAGES_PER_WORKER = 8  # under way at the same time: each holds a thread that waits
MAX_DEATHS = 2
_MAX_SUSPECTS = 1024  # images that a worker died of, the latest ones
_RECONNECT_SECONDS = 0.25
_CLOSE_SECONDS = 1.0  # for a connection that is just being made
_PAUSE_SECONDS = 10.0  # without images for a worker that was late
_PATIENCE = 4.0  # times what the patches before an image and its own should take
_NEW_SHARE = 0.25  # of the latest measurement in the rate

logger = logging.getLogger("saccade.engine")


@dataclass
class RemoteCounters:
    encoded: int = 0  # by workers
    fallbacks: int = 0  # encoded in the engine: lost, late, wrong, or no worker was up
    lost: int = 0
    late: int = 0
    wrong: int = 0
    quarantined: int = 0  # images
    refused: int = 0  # times that one of those was wanted


@dataclass(eq=False)
class _EncoderWorker:
    """A channel, and what this engine has in it."""

    channel: EncoderChannel
    seconds_per_patch: float
    patches: int = 0
    images: int = 0
    is_reserved: bool = False  # for a suspect alone
    paused_until: float = 0.0

    def learn(self, patches: int, seconds: float) -> None:
        self.seconds_per_patch += _NEW_SHARE * (seconds / patches - self.seconds_per_patch)


class RemoteEncoders:
    min_seconds = 10.0  # that an image may take, however small

    def __init__(
        self,
        addresses: Sequence[str],
        connect: Connect,
        form: Namespace,
        arena_bytes: int,
        num_engines: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`form`: width and dtype of embeddings. `arena_bytes`: of embeddings under way in one worker."""
        self.counters = RemoteCounters()
        self.max_images = IMAGES_PER_WORKER * len(addresses)
        self._addresses = addresses
        self._connect = connect
        self._form = form
        self._arena_bytes = arena_bytes
        self._num_engines = num_engines  # that share the workers
        self._clock = clock
        self._workers: dict[str, _EncoderWorker] = {}  # by address, open ones
        self._changed = Condition()  # guards all that follows the options
        self._suspects: OrderedDict[Key, int] = OrderedDict()  # deaths of workers
        self._is_closed = Event()
        self._connector = Thread(target=self._keep_connected, name="saccade-encoders", daemon=True)
        self._connector.start()

    # --- connections ----------------------------------------------------------------------------------------

    def _keep_connected(self) -> None:
        while not self._is_closed.is_set():
            for address in self._addresses:
                worker = self._workers.get(address)
                if worker is None or not worker.channel.is_open:
                    self._open(address)
            self._is_closed.wait(_RECONNECT_SECONDS)

    def _open(self, address: str) -> None:
        with self._changed:
            self._workers.pop(address, None)
        with suppress(OSError):
            channel = self._connect(address, self._arena_bytes)
            if self._is_closed.is_set():
                channel.close()
                return
            with self._changed:
                self._workers[address] = _EncoderWorker(channel, channel.seconds_per_patch)
                self._changed.notify_all()

    @property
    def is_up(self) -> bool:
        """Whether an image would be sent now."""
        return bool(self._usable())

    def _usable(self) -> list[_EncoderWorker]:
        now = self._clock()
        return [w for w in list(self._workers.values()) if w.channel.is_open and now >= w.paused_until]

    # --- one image ------------------------------------------------------------------------------------------

    def load(self, item: MediaItem, place: Place) -> Restored | None:
        """The embedding, on the device; None: encode it here. RequestError: it cannot be encoded."""
        if item.kind != "image":
            return None
        form = self._form.form(item)
        for _ in range(MAX_DEATHS):
            self._refuse_quarantined(item)
            with self._reserved(item, form) as worker:
                if worker is None:
                    break
                try:
                    return self._encoded(worker, item, form, place)
                except EncoderLost as lost:
                    self._note_loss(item, lost)
                except EncoderLate as late:
                    self._note_late(worker, late)
                    break
                except _Wrong as wrong:
                    logger.warning("an encoder worker sent %s; the image is encoded here", wrong)
                    self._count(wrong=1)
                    break
                except torch.OutOfMemoryError:  # on this device, as it may happen to a tier's embeddings
                    break
        self._refuse_quarantined(item)
        if self._is_closed.is_set():
            raise RuntimeError("the engine is closing")
        self._count(fallbacks=1)
        return None

    def _encoded(self, worker: _EncoderWorker, item: MediaItem, form: EntryForm, place: Place) -> Restored:
        patches = item.geometry.grid.patches
        with worker.channel.encode(item, form.embedding_bytes, self._seconds(worker)) as reply:
            _check(reply, form)
            data = place([torch.frombuffer(reply.data, dtype=torch.uint8)], form.embedding_bytes)
        with self._changed:
            worker.learn(patches, (reply.times.decode_ms + reply.times.encode_ms) / 1e3)
            self._suspects.pop(item.key, None)
        self._count(encoded=1)
        count_seconds(reply.times.decode_ms / 1e3)
        dtype: torch.dtype = getattr(torch, form.dtype)
        return Restored(data.view(dtype).view(form.slots, form.width), None, reply.times)

    def _seconds(self, worker: _EncoderWorker) -> float:
        """Time allowed for all that this engine has in the worker, while other engines have as much."""
        usual = worker.patches * worker.seconds_per_patch * self._num_engines
        return self.min_seconds + _PATIENCE * usual

    @contextmanager
    def _reserved(self, item: MediaItem, form: EntryForm) -> Iterator[_EncoderWorker | None]:
        """The least loaded worker; for a suspect one with nothing else of this engine in it.

        None: no worker can take it now.
        """
        patches = item.geometry.grid.patches
        with self._changed:
            is_alone = item.key in self._suspects
            worker = None
            if form.embedding_bytes <= self._arena_bytes:
                worker = self._choose_alone() if is_alone else self._choose()
            if worker is not None:
                worker.images += 1
                worker.patches += patches
        try:
            yield worker
        finally:
            if worker is not None:
                with self._changed:
                    worker.images -= 1
                    worker.patches -= patches
                    if is_alone:
                        worker.is_reserved = False
                    self._changed.notify_all()

    def _choose(self) -> _EncoderWorker | None:
        """Waits while all are reserved or full."""
        while usable := self._usable():
            free = [
                worker for worker in usable if not worker.is_reserved and worker.images < IMAGES_PER_WORKER
            ]
            if free:
                return min(free, key=lambda worker: worker.patches * worker.seconds_per_patch)
            self._changed.wait(_RECONNECT_SECONDS)  # a worker may also die or become late meanwhile
        return None

    def _choose_alone(self) -> _EncoderWorker | None:
        """Reserves a worker, then waits until nothing is left in it."""
        worker = self._choose()
        if worker is None:
            return None
        worker.is_reserved = True
        while worker.images and worker in self._usable():
            self._changed.wait(_RECONNECT_SECONDS)
        if worker.images:
            worker.is_reserved = False
            return None
        return worker

    # --- what went wrong ------------------------------------------------------------------------------------

    def _note_loss(self, item: MediaItem, lost: EncoderLost) -> None:
        if self._is_closed.is_set():
            return
        self._count(lost=1)
        logger.warning("an encoder worker was lost with an image in it: %s", lost)
        if not lost.was_begun:
            return
        with self._changed:
            deaths = self._suspects.pop(item.key, 0) + 1
            self._suspects[item.key] = deaths
            while len(self._suspects) > _MAX_SUSPECTS:
                self._suspects.popitem(last=False)
        if deaths == MAX_DEATHS:
            self._count(quarantined=1)
            logger.error("an image ended %d encoder workers; requests with it are refused", deaths)

    def _note_late(self, worker: _EncoderWorker, late: EncoderLate) -> None:
        self._count(late=1)
        worker.paused_until = self._clock() + _PAUSE_SECONDS
        with self._changed:
            self._changed.notify_all()
        logger.warning("an encoder worker gets no image for %.0f s: %s", _PAUSE_SECONDS, late)

    def _refuse_quarantined(self, item: MediaItem) -> None:
        if self._suspects.get(item.key, 0) < MAX_DEATHS:
            return
        self._count(refused=1)
        width, height = item.header.size
        raise RequestError(
            f"the picture of {width}x{height} pixels is refused: {MAX_DEATHS} encoder workers ended while "
            "they encoded it; send the picture in another format, such as PNG",
            code="invalid_image",
        )

    # --- reporting ------------------------------------------------------------------------------------------

    def _count(self, **more: int) -> None:
        with self._changed:
            for name, count in more.items():
                setattr(self.counters, name, getattr(self.counters, name) + count)

    def stats(self) -> dict[str, Any]:
        workers = list(self._workers.values())
        connected = sum(worker.channel.is_open for worker in workers)
        return {**asdict(self.counters), "connected": connected, "open": sum(w.images for w in workers)}

    def close(self) -> None:
        """Images under way are given up."""
        self._is_closed.set()
        self._connector.join(_CLOSE_SECONDS)
        workers = list(self._workers.values())
        self._workers.clear()
        for worker in workers:
            worker.channel.close()
        with self._changed:
            self._changed.notify_all()


class _Wrong(Exception):
    """An embedding that is not as the bill says."""


def _check(reply: RemoteEmbedding, form: EntryForm) -> None:
    shape = (form.slots, form.width)
    expected = (shape, form.dtype, form.embedding_bytes)
    if (reply.shape, reply.dtype, len(reply.data)) != expected:
        size = f"{len(reply.data)} bytes of shape {list(reply.shape)} and dtype {reply.dtype}"
        raise _Wrong(f"{size}, not {form.embedding_bytes} of {list(shape)} and {form.dtype}")
