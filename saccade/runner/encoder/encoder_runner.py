"""The encoder stage: decodes images in a fair thread pool and encodes them, some layers at a time.

It owns pixels and the current pass. It does not know requests or caches; the scheduler never submits a key
that is resident or in flight.

    submit ─► queue ─► decode stage, prepare ─► pass (packed patches, layer by layer) ─► poll
                       or: load from a tier or an encoder worker ──────────────────────► poll
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import BoundedSemaphore
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from saccade import costs
from saccade.errors import RequestError
from saccade.media.decode import new_pixels
from saccade.media.decoding import MediaDecoder
from saccade.media.jpeg_stream import is_streamed
from saccade.media.media_workers import Ticket
from saccade.media.video_pruning import Ints, Kept, kept_of
from saccade.models.interface import PreparesOnHost, VisionLanguageModel
from saccade.runner.embedding_tiers.entry import Restored
from saccade.runner.embedding_tiers.tiers import EmbeddingTiers, Place
from saccade.runner.encoder.decode_order import embeddings_of
from saccade.runner.encoder.decode_stage import DecodeStage
from saccade.runner.encoder.encoder_pass import EncoderPass, Prepared
from saccade.runner.encoder.gpu_jpeg import GpuJpegs
from saccade.runner.encoder.image_errors import is_of_the_device, unusable
from saccade.runner.encoder.remote_encoders import RemoteEncoders
from saccade.runner.encoder.timing import Times
from saccade.runner.encoder.upload import PixelUpload, Prepare, joined, pin, pinned, use_on_current_stream
from saccade.types.media import Geometry, Key, MediaItem
from saccade.types.step import MediaTimes, Slice

_HEAVY_SHARE = 4  # for so many threads there is one more, for images that take long to decode
_CPU = torch.device("cpu")
_IDLE_WAIT = 0.005  # seconds that an otherwise idle step waits for image decoding


class EncoderResults(NamedTuple):
    """Results since the last poll."""

    embeddings: dict[Key, Tensor]  # [slots, hidden] each, complete in the order of the current stream
    times: Times
    errors: dict[Key, RequestError]
    coordinates: dict[Key, Ints]  # [2, slots]: row and column of each embedding, of pruned frame groups
    restored: set[Key]  # those of the embeddings that a tier had

    @classmethod
    def nothing(cls) -> EncoderResults:
        return cls({}, Times(), {}, {}, set())


@dataclass
class EncoderCounters:
    decoded: int = 0
    encoded: int = 0
    passes: int = 0
    failed: int = 0
    restored: int = 0  # found in a tier, neither decoded nor encoded
    gpu_jpegs: int = 0  # decoded by nvJPEG
    gpu_jpeg_fallbacks: int = 0  # meant for it, and decoded on the host
    peak_patches: int = 0  # maximum of patches held at once: decoded ahead plus current pass


class Encoder(Protocol):
    """What the runner needs of an encoder stage."""

    counters: EncoderCounters
    max_patches: int  # that go through the tower together

    @property
    def local_work(self) -> int | None:
        """Embeddings that this process encodes; None: all that were submitted."""

    def submit(self, items: Sequence[MediaItem]) -> None: ...
    def prefetch_media(self, items: Sequence[MediaItem]) -> None: ...
    def prefetch(self, items: Sequence[MediaItem]) -> None: ...
    def decode_first(self, items: Sequence[MediaItem]) -> None: ...
    def decoded_first(self) -> frozenset[Key]: ...
    def end(self, keys: Collection[Key]) -> None: ...
    def release(self) -> None: ...
    def advance(self, layers: int | None, *, may_wait: bool = True) -> Slice: ...
    def poll(self) -> EncoderResults: ...
    def tier_stats(self) -> dict[str, Any]: ...
    def remote_stats(self) -> dict[str, Any]:
        """Counters of encoder workers; empty without them."""

    def clear(self) -> None: ...
    def close(self) -> None: ...


class LocalEncoder:
    """Encodes on the model's own device, in the engine's thread; images are decoded in a thread pool.

    With encoder workers the threads wait for them instead, and images that no worker encoded are left.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        max_patches: int,
        threads: int,
        device: torch.device = _CPU,
        upload_bytes: int = 0,  # device memory reserved for preprocessing
        tiers: EmbeddingTiers | None = None,
        remote: RemoteEncoders | None = None,
        max_ahead: int | None = None,  # patches decoded ahead or in workers; None: those of a few passes
        jpegs: GpuJpegs | None = None,
        isolated: bool = False,  # images are decoded in other processes
        max_decode_seconds: float = 30.0,
    ) -> None:
        self.model = model
        self.jpegs = jpegs
        self.tiers = tiers
        self.remote = remote
        self.place: Place = joined
        self._on_cuda = False
        self._to_patches: Prepare = model.prepare
        if device.type == "cuda":
            self._on_cuda = True
            upload = PixelUpload(model, device, upload_bytes)
            self._to_patches = upload
            self.place = upload.place
        self._is_async = self._on_cuda  # a pass is launched, and runs while the host goes on
        self.max_patches = max_patches  # per pass; a larger single image gets a pass of its own
        self.counters = EncoderCounters()
        heavy = max(1, threads // _HEAVY_SHARE)
        self._decoder = MediaDecoder(
            threads,
            heavy,
            isolated=isolated,
            max_seconds=max_decode_seconds,
            pin=pin if self._on_cuda else None,
        )
        self._decoders = BoundedSemaphore(threads)
        if remote is not None:
            threads += remote.max_images  # these only wait for workers
        if max_ahead is None:
            max_ahead = costs.passes_ahead(prepares_on_host=isinstance(model, PreparesOnHost)) * max_patches
        self._stage: DecodeStage[Prepared | Restored] = DecodeStage(self._prepare, threads, heavy, max_ahead)
        self._queue: OrderedDict[Key, MediaItem] = OrderedDict()  # submitted, not yet in a pass
        self._alone: set[Key] = set()  # were in a pass that failed; each is retried alone
        self._current: EncoderPass | None = None
        self._results = EncoderResults.nothing()

    def warm_up(self, geometry: Geometry, frames: int) -> None:
        """Prepare a blank image, and a frame group if the model has them, which compiles the kernels."""
        width, height = geometry.resized
        blank = np.zeros((height + 1, width + 1, 3), np.uint8)  # one pixel larger, so that it is resized too
        inputs = [blank]
        if frames > 1:
            inputs.append(np.stack([blank] * frames))
        for pixels in inputs:
            self._stage.run(partial(torch.inference_mode()(self._to_patches), pixels, geometry))

    @property
    def is_idle(self) -> bool:
        return not self._queue and self._current is None

    @property
    def local_work(self) -> int | None:
        if self.remote is None or not self.remote.is_up:
            return None
        items = [item for item in self._queue.values() if isinstance(self._stage.ready(item.key), Prepared)]
        if self._current is not None:
            items += self._current.items
        return sum(map(embeddings_of, items))

    def submit(self, items: Sequence[MediaItem]) -> None:
        for item in items:
            assert item.key not in self._queue, "a key is submitted once until it is polled"
            self._queue[item.key] = item
        self._stage.make_room(list(self._queue.values()), self._queue.keys())
        self._start_decoding()

    def prefetch_media(self, items: Sequence[MediaItem]) -> None:
        """Begin to decode new arrivals, after all prefetches. `prefetch` drops what is not submitted."""
        self._start_decoding([item for item in items if not item.is_decoded_first])

    def prefetch(self, items: Sequence[MediaItem]) -> None:
        """Begin to decode what will probably be submitted soon; drop earlier prefetches not in it."""
        self._stage.drop_expected({item.key for item in items} | self._queue.keys())
        self._start_decoding(items)

    def decode_first(self, items: Sequence[MediaItem]) -> None:
        """Decode these, which are submitted when they are decoded. The first of them can always begin."""
        self._stage.make_room(items, self._queue.keys())
        self._start_decoding(items)

    def decoded_first(self) -> frozenset[Key]:
        return self._stage.decoded_first()

    def end(self, keys: Collection[Key]) -> None:
        """No request wants them any more: end their decoding, unless they are submitted."""
        self._stage.end(key for key in keys if key not in self._queue)

    def release(self) -> None:
        """Drop all prefetches, without waiting."""
        self.end(self._stage.keys())

    def advance(self, layers: int | None, *, may_wait: bool = True) -> Slice:
        """Run up to this many layers; None: until everything submitted is encoded. Returns what was done.

        A slice does not wait for image decoding, unless `may_wait` says that the step has nothing else to do.
        """
        if may_wait and self._current is None:
            self._wait_for_decoding(is_sliced=layers is not None)
        self._take_restored()
        total = Slice()
        limit = math.inf if layers is None else layers
        while limit > 0:
            if self._current is None and not self._begin_pass(is_sliced=layers is not None):
                break
            share = min(1.0, self._current_patches / self.max_patches)
            start = time.perf_counter()
            count = self._run_layers(limit)
            total = Slice(total.layers + count * share, total.seconds + time.perf_counter() - start)
            if self._current is not None:
                break
            limit -= count
            self._start_decoding()
        return total

    def _wait_for_decoding(self, *, is_sliced: bool) -> None:
        """Wait for a moment. Where whole images are encoded, they are waited for later, one by one."""
        self._start_decoding()
        if self._queue and not is_sliced:
            return
        futures = self._stage.futures(self._queue.keys())
        if futures:
            wait(futures, timeout=_IDLE_WAIT, return_when=FIRST_COMPLETED)

    def poll(self) -> EncoderResults:
        results = self._results
        self._results = EncoderResults.nothing()
        return results

    def tier_stats(self) -> dict[str, Any]:
        return self.tiers.stats() if self.tiers else {}

    def remote_stats(self) -> dict[str, Any]:
        return self.remote.stats() if self.remote else {}

    def clear(self) -> None:
        """Drop everything in flight, after a failed step."""
        self._queue.clear()
        self.release()
        self._alone.clear()
        self._current = None
        self.poll()

    def close(self) -> None:
        self.clear()
        if self.remote:
            self.remote.close()  # or threads would wait for it
        self._stage.close()  # first: its threads copy from the decoder's memory
        self._decoder.close()
        if self.jpegs:
            self.jpegs.close()
        if self.tiers:
            self.tiers.close()

    # --- decoding -------------------------------------------------------------------------------------------

    def _start_decoding(self, expected: Sequence[MediaItem] = ()) -> None:
        self._stage.start(self._queue.values(), expected)
        patches = self._stage.held_patches + self._current_patches
        self.counters.peak_patches = max(self.counters.peak_patches, patches)

    def _prepare(self, item: MediaItem, ticket: Ticket) -> Prepared | Restored:
        with torch.inference_mode():
            sources: tuple[EmbeddingTiers | RemoteEncoders | None, ...] = (self.tiers, self.remote)
            for source in sources:
                if source and (restored := source.load(item, self.place)):
                    return restored
            with nullcontext() if item.is_heavy else self._decoders:
                ticket.check()
                start = time.perf_counter()
                patches = self._decode_on_gpu(item)
                on_gpu = patches is not None
                pruning = None
                if patches is None:
                    patches, pruning = self._decode(item, ticket)
        return Prepared(patches, pruning, (time.perf_counter() - start) * 1e3, on_gpu)

    def _decode_on_gpu(self, item: MediaItem) -> Tensor | None:
        if self.jpegs is None or not item.gpu_jpeg:
            return None
        with self.jpegs.pixels(item) as pixels:
            return None if pixels is None else self._to_patches(pixels, item.geometry)

    def _decode(self, item: MediaItem, ticket: Ticket) -> tuple[Tensor, Kept | None]:
        if not self._on_cuda and is_streamed(item):
            image = self._decoder.streamed(item, partial(self._stage.submit, item), ticket)
            return self.model.prepare(image, item.geometry), None
        new = pinned if self._on_cuda else new_pixels
        with self._decoder.pixels(item, ticket, new) as pixels:
            return self._to_patches(pixels[item.leading :], item.geometry), kept_of(item, pixels)

    def _take(self, item: MediaItem) -> Prepared | None:
        """The decoded image, or None: its embedding is there already, or it failed (see the errors)."""
        try:
            prepared = self._stage.take(item)
        except RequestError as error:
            self._fail(item, error)
            return None
        except Exception as error:  # such as a resize out of memory: only this image fails
            if is_of_the_device(error):
                raise
            self._fail(item, unusable(item, type(error)))
            return None
        if isinstance(prepared, Restored):
            self._finish_restored(item, prepared)
            return None
        self.counters.decoded += 1
        self.counters.gpu_jpegs += prepared.on_gpu
        self.counters.gpu_jpeg_fallbacks += item.gpu_jpeg and not prepared.on_gpu
        return prepared

    def _take_restored(self) -> None:
        """What a tier had or a worker encoded needs no pass, and does not wait for the one that runs."""
        for item in list(self._queue.values()):
            if isinstance(self._stage.ready(item.key), Restored):
                del self._queue[item.key]
                self._take(item)

    def _finish_restored(self, item: MediaItem, restored: Restored) -> None:
        use_on_current_stream([restored.embedding])
        if restored.coordinates is not None:
            self._results.coordinates[item.key] = restored.coordinates
        self._results.embeddings[item.key] = restored.embedding
        if restored.times is None:
            self._results.times.put(item.key, MediaTimes(0.0, 0.0))
            self._results.restored.add(item.key)
            self.counters.restored += 1
            return
        self._results.times.put(item.key, restored.times)
        self.counters.encoded += 1
        if self.tiers:
            self.tiers.put(item, restored.embedding, restored.coordinates)

    @property
    def _current_patches(self) -> int:
        return self._current.patches if self._current else 0

    # --- passes ---------------------------------------------------------------------------------------------

    def _begin_pass(self, *, is_sliced: bool) -> bool:
        """Take images from the queue, in order, up to the patch budget, and set up the tower for them.

        If passes run asynchronously, only the first image is waited for.
        """
        self._start_decoding()
        batch: list[tuple[MediaItem, Prepared]] = []
        patches = 0
        for item in list(self._queue.values()):
            if not self._stage.is_done(item.key):
                if is_sliced:
                    continue
                if batch and self._is_async:
                    continue
            size = item.geometry.grid.patches
            is_apart = patches + size > self.max_patches or item.key in self._alone
            if batch and is_apart:
                break
            del self._queue[item.key]
            prepared = self._take(item)
            if prepared is None:
                continue
            batch.append((item, prepared))
            patches += size
            if item.key in self._alone:
                break
        if batch:
            self.counters.passes += 1
            self._current = EncoderPass(self.model, batch, on_cuda=self._on_cuda)
        return bool(batch)

    def _run_layers(self, limit: float) -> int:
        """Advance the current pass by about `limit` layers; returns how many ran."""
        current = self._current
        assert current is not None
        count = current.run_layers(limit)
        if current.failure is not None:
            self._current = None
            self._retry_or_fail(current.items, current.failure)
        elif current.is_complete:
            self._current = None
            self._finish(current)
        return count

    def _finish(self, current: EncoderPass) -> None:
        for image in current.images():
            key = image.item.key
            if image.cells is not None:
                self._results.coordinates[key] = image.cells
            self._results.embeddings[key] = image.embedding
            if self.tiers:
                self.tiers.put(image.item, image.embedding, image.cells)
            self._results.times.add(key, image.decode_ms, current.watch, image.share)
            self._alone.discard(key)
            self.counters.encoded += 1

    def _retry_or_fail(self, items: Sequence[MediaItem], kind: type[Exception]) -> None:
        """One image must not fail the others of its pass: after a failure each is retried alone."""
        if self._on_cuda:
            torch.cuda.empty_cache()  # cached blocks of other sizes may be all that was missing
        if len(items) == 1:
            self._alone.discard(items[0].key)
            self._fail(items[0], unusable(items[0], kind))
            return
        for item in reversed(items):
            self._alone.add(item.key)
            self._queue[item.key] = item
            self._queue.move_to_end(item.key, last=False)

    def _fail(self, item: MediaItem, error: RequestError) -> None:
        self.counters.failed += 1
        self._results.errors[item.key] = error
