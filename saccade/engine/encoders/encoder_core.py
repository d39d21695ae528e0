"""What an encoder worker does: images of several engines through one vision tower. Knows no transport.

submit (any thread) ─► a queue for each engine ─► in turn, up to two passes ─► LocalEncoder ─► done
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Condition
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.errors import RequestError
from saccade.runner.encoder.encoder_runner import EncoderResults, LocalEncoder
from saccade.types.media import Key, MediaItem
from saccade.types.step import MediaTimes

_LAYERS = 4  # between two heartbeats
_IDLE_SECONDS = 0.5


class EncoderOutcome(NamedTuple):
    embedding: Tensor | None  # [slots, hidden] on the worker's device; None: see the error
    times: MediaTimes | None
    error: RequestError | None


@dataclass(frozen=True, eq=False)
class EncoderJob:
    engine: Hashable  # which connection it came over
    item: MediaItem
    begin: Callable[[], None]  # called in the thread of `step`, like `done`
    done: Callable[[EncoderOutcome], None]


class EncoderCore:
    def __init__(
        self,
        encoder: LocalEncoder,
        seconds_per_patch: float,
        reasons: tuple[str, ...] = (),
        device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.encoder = encoder
        self.seconds_per_patch = seconds_per_patch
        self.reasons = reasons
        self.device = device
        self._arrived = Condition()  # guards the queues
        self._queues: OrderedDict[Hashable, deque[EncoderJob]] = OrderedDict()  # the next engine first
        self._running: dict[Key, list[EncoderJob]] = {}  # given to the encoder; several engines may want one
        self._num_encoded = 0
        self._clock = clock
        self._counted_at = clock()  # the latest `stats`
        self._idle_seconds = 0.0  # since then
        self._delivery = _Delivery(device) if device.type == "cuda" else None

    def submit(self, job: EncoderJob) -> None:
        with self._arrived:
            self._queues.setdefault(job.engine, deque()).append(job)
            self._arrived.notify()

    def forget(self, engine: Hashable) -> None:
        """It is gone: its images that wait are dropped."""
        with self._arrived:
            self._queues.pop(engine, None)

    @torch.inference_mode()
    def step(self) -> None:
        """Some layers for what is there; waits for a moment where there is nothing."""
        self._admit()
        if not self._running:
            with self._arrived:
                if not self._queues:
                    start = self._clock()
                    self._arrived.wait(_IDLE_SECONDS)
                    self._idle_seconds += self._clock() - start
            return
        self.encoder.advance(_LAYERS)
        images = self.encoder.poll()
        if self._delivery is None:
            self._deliver(images)
        else:
            self._delivery.swap(images, self._deliver)

    def _deliver(self, images: EncoderResults) -> None:
        for key, embedding in images.embeddings.items():
            self._finish(key, EncoderOutcome(embedding, images.times[key], None))
        for key, error in images.errors.items():
            self._finish(key, EncoderOutcome(None, None, error))

    def _admit(self) -> None:
        while job := self._next():
            job.begin()
            if job.item.key in self._running:
                self._running[job.item.key].append(job)
            else:
                self._running[job.item.key] = [job]
                self.encoder.submit([job.item])

    def _next(self) -> EncoderJob | None:
        """One image of each engine in turn, while two passes are not full."""
        with self._arrived:
            patches = sum(jobs[0].item.geometry.grid.patches for jobs in self._running.values())
            if not self._queues or patches >= 2 * self.encoder.max_patches:
                return None
            engine, queue = self._queues.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._queues[engine] = queue
            return job

    def _finish(self, key: Key, outcome: EncoderOutcome) -> None:
        self._num_encoded += outcome.error is None
        for job in self._running.pop(key):
            job.done(outcome)

    def stats(self) -> dict[str, Any]:
        """`use` is the share of the time since the last call in which there were images."""
        with self._arrived:
            jobs = [job for queue in self._queues.values() for job in queue]
        jobs += [same_image[0] for same_image in self._running.values()]
        now = self._clock()
        use = 1 - self._idle_seconds / max(now - self._counted_at, 1e-9)
        self._counted_at = now
        self._idle_seconds = 0.0
        patches = sum(job.item.geometry.grid.patches for job in jobs)
        return {"queue": len(jobs), "patches": patches, "use": use, "encoded": self._num_encoded}

    def close(self) -> None:
        self.encoder.close()


class _Delivery:
    """Hands out the embeddings of a pass while the GPU runs the next one: on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._done = EncoderResults.nothing()
        self._is_complete = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def swap(self, images: EncoderResults, deliver: Callable[[EncoderResults], None]) -> None:
        """Deliver what came before, keep this."""
        before = self._done
        was_complete = self._is_complete
        self._done = images
        self._is_complete = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_complete.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(was_complete)
        with torch.cuda.stream(self._stream):
            for embedding in before.embeddings.values():
                embedding.record_stream(self._stream)
            deliver(before)
