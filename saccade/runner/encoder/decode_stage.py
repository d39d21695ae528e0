"""Images that are being decoded, and those decoded ahead. Owns the threads; knows no model and no pass.

Heavy ones have a few threads of their own, so that no other image waits for them:

    light  ─► turns ─► threads, within a budget of patches and source pixels ─► ready
    heavy  ─► turns ─► threads of their own, a few at a time ─────────────────► ready
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from saccade.fair_pool import FairPool, Owner
from saccade.helpers.process import thread_seconds
from saccade.media.media_workers import Ticket
from saccade.runner.encoder.decode_order import DecodeTurns
from saccade.types import Key, MediaItem

_MAX_SOURCE_PIXELS = 50_000_000  # of light ones, decoded at the same time
_AHEAD = 2  # heavy ones that are ready or being decoded, for each of their threads

Ready = TypeVar("Ready")
Decode = Callable[[MediaItem, Ticket], Ready]
"""What becomes of an image, in one of the threads."""


class Begun(NamedTuple, Generic[Ready]):
    item: MediaItem
    future: Future[Ready]
    ticket: Ticket


class DecodeStage(Generic[Ready]):
    def __init__(self, decode: Decode[Ready], threads: int, heavy_threads: int, max_patches: int) -> None:
        """`max_patches`: of light images that are being decoded or wait decoded."""
        self._decode = decode
        self._max_patches = max_patches
        self._max_heavy = _AHEAD * heavy_threads
        self._turns = DecodeTurns()
        self._light = FairPool(threads, "saccade-decode")
        self._heavy = FairPool(heavy_threads, "saccade-decode-heavy")
        self._begun: OrderedDict[Key, Begun[Ready]] = OrderedDict()
        self._leaving: dict[Future[Ready], MediaItem] = {}  # dropped while they were being decoded
        self._took: deque[tuple[MediaItem, float]] = deque()  # CPU time

    def __contains__(self, key: Key) -> bool:
        return key in self._begun

    @property
    def held_patches(self) -> int:
        items = [*(begun.item for begun in self._begun.values()), *list(self._leaving.values())]
        return sum(item.geometry.grid.patches for item in items)

    def submit(self, item: MediaItem, task: Callable[[], None]) -> Future[None]:
        """A part of decoding this image, for a thread that is free."""
        return self._light.submit(Owner(item.client, item.owner), task)

    def start(self, submitted: Iterable[MediaItem], expected: Iterable[MediaItem] = ()) -> None:
        """Begin as many as fit, in turn: `submitted` ones before `expected` ones."""
        self._learn()
        for wanted in (submitted, expected):
            new = [item for item in wanted if item.key not in self._begun]
            self._start_light(item for item in new if not item.is_heavy)
            self._start_heavy(item for item in new if item.is_heavy)

    def is_done(self, key: Key) -> bool:
        begun = self._begun.get(key)
        return begun is not None and begun.future.done()

    def done_heavy(self) -> frozenset[Key]:
        """Heavy ones that are ready, or have failed."""
        return frozenset(begun.item.key for begun in self._of(heavy=True) if begun.future.done())

    def ready(self, key: Key) -> Ready | None:
        """What its thread has brought; None: nothing yet, or an error."""
        begun = self._begun.get(key)
        is_ready = begun is not None and begun.future.done() and begun.future.exception() is None
        return begun.future.result() if begun is not None and is_ready else None

    def futures(self, keys: Collection[Key]) -> list[Future[Ready]]:
        """Of these, and of heavy ones, which are waited for before they are submitted."""
        return [begun.future for key, begun in self._begun.items() if key in keys or begun.item.is_heavy]

    def take(self, item: MediaItem) -> Ready:
        """Waits for it. The calling thread decodes it where it did not fit the limits until now."""
        begun = self._begun.pop(item.key, None)
        if begun is None:
            return self._decode(item, Ticket())
        return begun.future.result()

    def drop(self, kept: Collection[Key] = (), *, running: bool = True) -> None:
        """Forget light ones but these. `running`: also those being decoded, which count meanwhile."""
        for begun in self._of(heavy=False):
            if begun.item.key not in kept and (begun.future.cancel() or running or begun.future.done()):
                self._leave(begun)

    def drop_heavy(self, kept: Collection[Key] = ()) -> None:
        """End the decoding of heavy ones but these, and forget them."""
        for begun in self._of(heavy=True):
            if begun.item.key not in kept:
                begun.future.cancel()
                begun.ticket.cancel()
                self._leave(begun)

    def run(self, work: Callable[[], object]) -> None:
        """Something that one of the threads has to do first."""
        self._light.submit(Owner(""), work).result()

    def close(self) -> None:
        """Waits for the threads."""
        self.drop()
        self.drop_heavy()
        for pool in (self._light, self._heavy):
            pool.close(wait=True)

    def _leave(self, begun: Begun[Ready]) -> None:
        """Its thread may hold what it decoded until it is done."""
        del self._begun[begun.item.key]
        if begun.future.cancelled():  # it never began, so it costs nothing
            self._took.append((begun.item, 0.0))
        self._leaving[begun.future] = begun.item
        begun.future.add_done_callback(self._leaving.pop)

    def _start_light(self, items: Iterable[MediaItem]) -> None:
        light = self._of(heavy=False)
        leaving = [item for item in list(self._leaving.values()) if not item.is_heavy]
        held = sum(item.geometry.grid.patches for item in (*(begun.item for begun in light), *leaving))
        decoding = (begun.item for begun in light if not begun.future.done())
        pixels = sum(map(_source_pixels, (*decoding, *leaving)))
        for item in self._turns.order(items, [begun.item for begun in light]):
            if held and held + item.geometry.grid.patches > self._max_patches:
                break
            if pixels and pixels + _source_pixels(item) > _MAX_SOURCE_PIXELS:
                break
            self._begin(item, self._light)
            held += item.geometry.grid.patches
            pixels += _source_pixels(item)

    def _start_heavy(self, items: Iterable[MediaItem]) -> None:
        num_begun = len(self._of(heavy=True)) + sum(item.is_heavy for item in list(self._leaving.values()))
        for item in self._turns.order(items)[: max(0, self._max_heavy - num_begun)]:
            self._begin(item, self._heavy)

    def _of(self, *, heavy: bool) -> list[Begun[Ready]]:
        return [begun for begun in self._begun.values() if begun.item.is_heavy is heavy]

    def _begin(self, item: MediaItem, pool: FairPool) -> None:
        self._turns.begin(item)
        ticket = Ticket()
        future = pool.submit(Owner(item.client, item.owner), partial(self._timed, item, ticket))
        self._begun[item.key] = Begun(item, future, ticket)

    def _timed(self, item: MediaItem, ticket: Ticket) -> Ready:
        start = thread_seconds()
        try:
            return self._decode(item, ticket)
        finally:
            self._took.append((item, thread_seconds() - start))

    def _learn(self) -> None:
        while self._took:
            self._turns.end(*self._took.popleft())


def _source_pixels(item: MediaItem) -> int:
    return item.header.size.width * item.header.size.height * item.num_frames
