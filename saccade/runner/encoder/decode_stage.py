"""Images that are being decoded, and those decoded ahead. Owns the threads; knows no model and no pass.

Heavy ones have a few threads of their own, so that no other image waits for them:

    light  ─► turns ─► threads, within a budget of patches and source pixels ─► ready
    heavy  ─► turns ─► threads of their own, a few at a time ─────────────────► ready

Images that may take long are decoded before the encoder gets them, and ready ones must not keep away the one
that is needed first (`make_room`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, KeysView, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Generic, NamedTuple, NoReturn, TypeVar

from saccade.helpers.process import thread_seconds
from saccade.media.media_workers import Ticket
from saccade.runner.encoder.decode_order import DecodeTurns
from saccade.types.media import Key, MediaItem
from saccade.util.fair_pool import FairPool, Owner

_MAX_SOURCE_PIXELS = 50_000_000  # of light ones, decoded at the same time
_AHEAD = 2  # heavy ones that are ready or being decoded, for each of their threads

Ready = TypeVar("Ready")
Decode = Callable[[MediaItem, Ticket], Ready]
"""What becomes of an image, in one of the threads."""


class DecodeJob(NamedTuple, Generic[Ready]):
    item: MediaItem
    future: Future[Ready]
    ticket: Ticket


class _LightLoad(NamedTuple):
    """What light images take."""

    patches: int
    pixels: int  # of their sources, while they are decoded

    def leaves_space_for(self, item: MediaItem, max_patches: int) -> bool:
        """One that is larger than a limit goes alone."""
        more = self.with_more(item)
        if self.patches and more.patches > max_patches:
            return False
        return not self.pixels or more.pixels <= _MAX_SOURCE_PIXELS

    def with_more(self, item: MediaItem) -> _LightLoad:
        return _LightLoad(self.patches + item.geometry.grid.patches, self.pixels + _source_pixels(item))


class DecodeStage(Generic[Ready]):
    def __init__(self, decode: Decode[Ready], threads: int, heavy_threads: int, max_patches: int) -> None:
        """`max_patches`: of light images that are being decoded or wait decoded."""
        self._decode = decode
        self._max_patches = max_patches
        self._max_heavy = _AHEAD * heavy_threads
        self._turns = DecodeTurns()
        self._light = FairPool(threads, "saccade-decode")
        self._heavy = FairPool(heavy_threads, "saccade-decode-heavy")
        self._begun: OrderedDict[Key, DecodeJob[Ready]] = OrderedDict()
        self._leaving: dict[Future[Ready], MediaItem] = {}  # dropped while they were being decoded
        self._took: deque[tuple[MediaItem, float]] = deque()  # CPU time

    def __contains__(self, key: Key) -> bool:
        return key in self._begun

    def keys(self) -> KeysView[Key]:
        return self._begun.keys()

    @property
    def held_patches(self) -> int:
        items = [*(job.item for job in self._begun.values()), *list(self._leaving.values())]
        return sum(item.geometry.grid.patches for item in items)

    def submit(self, item: MediaItem, task: Callable[[], None]) -> Future[None]:
        """A part of decoding this image, for a thread that is free."""
        return self._light.submit(Owner(item.client, item.owner), task)

    def start(self, submitted: Iterable[MediaItem], expected: Iterable[MediaItem] = ()) -> None:
        """Begin as many as fit, in turn: `submitted` ones before `expected` ones."""
        self._learn()
        for group in (submitted, expected):
            new = [item for item in group if item.key not in self._begun]
            self._start_light(item for item in new if not item.is_heavy)
            self._start_heavy(item for item in new if item.is_heavy)

    def make_room(self, items: Sequence[MediaItem], submitted: Collection[Key]) -> None:
        """Begin the first of `items` even where none fits: ready ones that are wanted last give way.

        Not those `submitted`, which the encoder takes without waiting for others.
        """
        if not items or items[0].key in self._begun or self._fits(items[0]):
            return
        place = {item.key: index for index, item in enumerate(items)}
        ready = [job for job in self._of(heavy=items[0].is_heavy) if job.future.done()]
        ready = [job for job in ready if job.item.key not in submitted]
        ready.sort(key=lambda job: place.get(job.item.key, len(items)))
        while not self._fits(items[0]):
            if not ready:
                return
            self._leave(ready.pop())
        self._begin(items[0])

    def is_done(self, key: Key) -> bool:
        return key in self._begun and self._begun[key].future.done()

    def decoded_first(self) -> frozenset[Key]:
        """Those of them that are ready, or have failed."""
        jobs = self._begun.items()
        return frozenset(key for key, (item, future, _) in jobs if item.is_decoded_first and future.done())

    def ready(self, key: Key) -> Ready | None:
        """What its thread has brought; None: nothing yet, or an error."""
        if not self.is_done(key):
            return None
        future = self._begun[key].future
        return None if future.exception() else future.result()

    def futures(self, keys: Collection[Key]) -> list[Future[Ready]]:
        """Futures of these, and of those that are decoded before they are submitted."""
        jobs = self._begun.items()
        return [future for key, (item, future, _) in jobs if key in keys or item.is_decoded_first]

    def take(self, item: MediaItem) -> Ready:
        """Waits for it. The calling thread decodes it where it did not fit the limits until now."""
        job = self._begun.pop(item.key, None)
        if job is None:
            return self._decode(item, Ticket())
        return job.future.result()

    def drop_expected(self, keys: Collection[Key]) -> None:
        """Forget what was begun early, but these and what is being decoded."""
        for job in list(self._begun.values()):
            if job.item.key in keys or job.item.is_decoded_first:
                continue
            if job.future.cancel() or job.future.done():
                self._leave(job)

    def end(self, keys: Iterable[Key]) -> None:
        """End their decoding, and forget them. Those being decoded count until their threads are free."""
        for job in [self._begun[key] for key in keys if key in self._begun]:
            job.future.cancel()
            job.ticket.cancel()
            self._leave(job)

    def run(self, work: Callable[[], object]) -> None:
        """Something that one of the threads has to do first."""
        self._light.submit(Owner(""), work).result()

    def close(self) -> None:
        """Waits for the threads."""
        self.end(self._begun.keys())
        for pool in (self._light, self._heavy):
            pool.close(wait=True)
        self._decode = _closed  # the one before belongs to the owner of this: no cycle is left

    def _leave(self, job: DecodeJob[Ready]) -> None:
        """Its thread may hold what it decoded until it is done."""
        del self._begun[job.item.key]
        if job.future.cancelled():  # it never began, so it costs nothing
            self._took.append((job.item, 0.0))
        self._leaving[job.future] = job.item
        job.future.add_done_callback(self._leaving.pop)

    def _start_light(self, items: Iterable[MediaItem]) -> None:
        light = self._held_light()
        for item in self._turns.order(items, [job.item for job in self._of(heavy=False)]):
            if not light.leaves_space_for(item, self._max_patches):
                break
            self._begin(item)
            light = light.with_more(item)

    def _start_heavy(self, items: Iterable[MediaItem]) -> None:
        for item in self._turns.order(items)[: self._space_for_heavy()]:
            self._begin(item)

    def _fits(self, item: MediaItem) -> bool:
        if item.is_heavy:
            return self._space_for_heavy() > 0
        return self._held_light().leaves_space_for(item, self._max_patches)

    def _held_light(self) -> _LightLoad:
        light = self._of(heavy=False)
        leaving = [item for item in list(self._leaving.values()) if not item.is_heavy]
        patches = sum(item.geometry.grid.patches for item in (*(job.item for job in light), *leaving))
        decoding = (job.item for job in light if not job.future.done())
        return _LightLoad(patches, sum(map(_source_pixels, (*decoding, *leaving))))

    def _space_for_heavy(self) -> int:
        num_begun = len(self._of(heavy=True)) + sum(item.is_heavy for item in list(self._leaving.values()))
        return max(0, self._max_heavy - num_begun)

    def _of(self, *, heavy: bool) -> list[DecodeJob[Ready]]:
        return [job for job in self._begun.values() if job.item.is_heavy is heavy]

    def _begin(self, item: MediaItem) -> None:
        self._turns.begin(item)
        ticket = Ticket()
        pool = self._heavy if item.is_heavy else self._light
        future = pool.submit(Owner(item.client, item.owner), partial(self._timed, item, ticket))
        self._begun[item.key] = DecodeJob(item, future, ticket)

    def _timed(self, item: MediaItem, ticket: Ticket) -> Ready:
        start = thread_seconds()
        try:
            return self._decode(item, ticket)
        finally:
            self._took.append((item, thread_seconds() - start))

    def _learn(self) -> None:
        while self._took:
            self._turns.end(*self._took.popleft())


def _closed(item: MediaItem, ticket: Ticket) -> NoReturn:
    raise RuntimeError("the decode stage was closed")


def _source_pixels(item: MediaItem) -> int:
    return item.header.size.width * item.header.size.height * item.num_frames
