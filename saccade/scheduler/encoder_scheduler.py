"""Decides which images are encoded, and lets windows into their spans. Knows no blocks and no token budgets.

A window ends before the first span whose embeddings are neither resident nor encoded in this step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from saccade.options.engine import SchedulerConfig
from saccade.scheduler.encoder_cache import EncoderCache
from saccade.scheduler.latency_model import EncoderLoad
from saccade.scheduler.request import ScheduledRequest
from saccade.scheduler.tenant_share import DECODED_PIXEL_COST, EMBEDDING_COST
from saccade.types.media import Key, MediaItem
from saccade.types.prompt import Span
from saccade.types.step import StepResult

_MAX_DECODED_FIRST = 64  # that a plan names


class WindowLimit(NamedTuple):
    end: int  # where the window has to end
    spans: tuple[int, ...]  # spans it enters that the request does not hold yet
    stops_at_image: bool = False  # whose embeddings are missing


class _RefusedRequest(NamedTuple):
    """A request that waits for the encoder or for cache space."""

    seq: ScheduledRequest
    counter: float  # of its tenant when it was first refused

    def is_before(self, other: _RefusedRequest | None) -> bool:
        if other is None:
            return True
        share = self.seq.share
        if share is other.seq.share:
            return self.seq.place < other.seq.place
        return (self.counter, share.number) < (other.counter, other.seq.share.number)


class _FifoTurn:
    """Keeps later requests after one that was refused, until that is served in the next step.

    Not longer: a request that a step does not even look at (no tokens or seats are left) must hold none up.
    Its tenant's counter counts as it was at the first refusal: service for other requests of its tenant does
    not push it back, and every other tenant comes to a larger counter by passing it.
    """

    def __init__(self) -> None:
        self._head: _RefusedRequest | None = None  # the first in the queue
        self._next_head: _RefusedRequest | None = None

    def turn(self) -> None:
        self._head = self._next_head
        self._next_head = None

    def refuse(self, seq: ScheduledRequest) -> None:
        refused = _RefusedRequest(seq, seq.share.counter)
        if self._head and self._head.seq is seq:
            refused = self._head
        if refused.is_before(self._head):
            self._head = refused
        if refused.is_before(self._next_head):
            self._next_head = refused

    def put_first(self, seq: ScheduledRequest) -> None:
        """Before all others in the next step, whatever their tenants' counters."""
        self._next_head = _RefusedRequest(seq, -math.inf)

    def serve(self, seq: ScheduledRequest) -> None:
        """It has what it was queued for."""
        if self._head and self._head.seq is seq:
            self._head = None

    def bars(self, seq: ScheduledRequest) -> bool:
        """Not one that pins space which the head may wait for: it frees that by going on."""
        if self._head is None:
            return False
        return self._head.is_before(_RefusedRequest(seq, seq.share.counter)) and not seq.blocks_cache


class KeptImages(NamedTuple):
    """Encoded ahead and not used yet."""

    of_running: set[Key]
    of_waiting: set[Key]


class _InFlight(NamedTuple):
    """An image that the encoder works on."""

    requester: str  # request id
    work: int


class EncoderScheduler:
    """Lets windows into spans and starts encoding, one step after the other.

    A refusal queues a request only where pins and encodings in flight alone block it: those end by
    themselves. Anything else (blocks it waits for, its own earlier spans) may depend on later requests.
    """

    def __init__(
        self, cache: EncoderCache, encoder_budget: int, num_workers: int = 0, steps_ahead: int = 1
    ) -> None:
        self.encode: list[MediaItem] = []  # given to the encoder in this step
        self.is_sliced = False
        self._cache = cache
        self._own_budget = encoder_budget
        self._steps_ahead = steps_ahead
        self._encoder_budget = encoder_budget * (1 + num_workers)
        self._local_work: int | None = None  # embeddings that the engine itself makes; None: all in flight
        self._decoded: frozenset[Key] = frozenset()  # of those that are decoded before they are encoded
        self.waits_for_decoding = False  # some of them are to be decoded
        self._wanted: Counter[Key] = Counter()  # media of open requests
        self._left: dict[Key, None] = {}  # of requests that have ended since the last plan
        self._budget = 0  # work that may still be given to the encoder in this step
        self._in_flight: dict[Key, _InFlight] = {}
        self._encode_queue = _FifoTurn()
        self._space_queue = _FifoTurn()  # even pinning what is resident would keep space away

    @classmethod
    def of(cls, config: SchedulerConfig, cache: EncoderCache) -> EncoderScheduler:
        return cls(cache, config.encoder_budget, config.num_encoders, config.steps_ahead)

    @property
    def has_workers(self) -> bool:
        """Whether encoder workers are up, which make embeddings beside the engine."""
        return self._local_work is not None

    @property
    def own_load(self) -> EncoderLoad:
        """The part of what is in flight that steps of this engine spend time on."""
        if self._local_work is not None:
            return EncoderLoad(self._local_work, min(self._local_work, 1))
        return EncoderLoad(self.work_in_flight, len(self._in_flight))

    @property
    def is_busy(self) -> bool:
        """With images that are encoded, or decoded before that."""
        return any((self._in_flight, self.waits_for_decoding))

    @property
    def work_in_flight(self) -> int:
        """Embeddings that the encoder is making, on which time and memory depend; some may be pruned then."""
        return sum(flight.work for flight in self._in_flight.values())

    def join(self, seq: ScheduledRequest) -> None:
        self._wanted.update(span.key for span in seq.spans)

    def leave(self, seq: ScheduledRequest) -> None:
        for span in seq.spans:
            self._wanted[span.key] -= 1
            self._left[span.key] = None

    def drain_unwanted(self) -> tuple[Key, ...]:
        """Media that no open request has any more, since the last call."""
        if not self._left:
            return ()
        unwanted = tuple(key for key in self._left if not self._wanted[key])
        for key in unwanted:
            del self._wanted[key]
        self._left.clear()
        return unwanted

    def observe(self, result: StepResult) -> None:
        """What a step showed of encoder workers, and of images that are decoded first."""
        self._local_work = result.local_work
        self._decoded = result.decoded

    def begin_step(self, is_sliced: bool, max_work: int | None = None) -> None:
        """`is_sliced`: encoding advances a few layers a step; what is in flight cannot be used in this step.

        `max_work`: embeddings in flight at a time, but one image however large.
        """
        self.is_sliced = is_sliced
        self.encode = []
        # What earlier steps left in flight counts too: the budget bounds the encoder's memory.
        maximum = self._encoder_budget if self.has_workers and is_sliced else self._own_budget
        if max_work is not None:
            maximum = min(max_work, maximum)
        self._budget = maximum - self.work_in_flight
        self._encode_queue.turn()
        self._space_queue.turn()

    def window_limit(self, seq: ScheduledRequest, start: int, end: int) -> WindowLimit:
        """How far the window [start, end) may go. Takes nothing, so it can be asked early."""
        entered: list[int] = []
        space = self._cache.space
        budget = self._budget
        keys: set[Key] = set()
        for index in range(seq.next_span, len(seq.spans)):
            span = seq.spans[index]
            if span.start >= end:
                break
            if span.pinned_until <= start or index in seq.pins:
                continue
            if span.key not in keys:
                if not self._may_enter(seq, index):
                    return WindowLimit(max(start, span.start), tuple(entered), stops_at_image=True)
                keys.add(span.key)
                space -= self._cache.space_taken_by(span.key, span.num_embeds)
                if span.key not in self._cache:
                    budget -= span.encode_cost
                if min(space, budget) < 0:  # earlier spans of this window take what it needs
                    return WindowLimit(max(start, span.start), tuple(entered), stops_at_image=True)
            entered.append(index)
        return WindowLimit(end, tuple(entered))

    def enter(self, seq: ScheduledRequest, spans: Iterable[int]) -> None:
        """Pin the embeddings of spans that `window_limit` allowed, and encode those that are missing."""
        # Resident ones are pinned first: they must not be evicted to make space for the others.
        to_encode = [index for index in spans if not self._pin(seq, index)]
        for index in to_encode:
            if not self._pin(seq, index):  # the same image may come twice in one window
                span = seq.spans[index]
                tenant = seq.request.tenant
                is_reserved = self._cache.reserve(span.key, span.num_embeds, seq.holder(index), tenant=tenant)
                assert is_reserved, "a span was entered without space for it"
                self._start(seq, index)
        seq.pins.update(spans)
        self._space_queue.serve(seq)

    def look_ahead(
        self, ahead: Iterable[tuple[ScheduledRequest, int]], images: KeptImages | None = None
    ) -> None:
        """Start encoding what will be needed next, in order, unpinned: a waiting request must hold no space.

        No idle entry is evicted that an earlier span still needs. With several tenants none of `images` is;
        but a running request evicts those of waiting ones before it starves: they may wait for its seat.
        """
        keep = images.of_running | images.of_waiting if images else set()
        is_full = False
        for seq, index in ahead:
            span = seq.spans[index]
            if span.key not in self._cache:
                starves = seq.is_running and span.start <= seq.num_computed
                if (is_full and not starves) or self._waits_for_decoding(seq, index):
                    continue
                if not self._can_encode(seq, span):
                    return
                is_reserved = self._reserve(seq, span, keep)
                if not is_reserved and images and starves:
                    is_reserved = self._reserve(seq, span, images.of_running)
                if is_reserved:
                    self._start(seq, index)
                elif images is None:
                    return
                else:
                    is_full = True
            keep.add(span.key)

    def _reserve(self, seq: ScheduledRequest, span: Span, keep: Collection[Key]) -> bool:
        return self._cache.reserve(span.key, span.num_embeds, None, keep=keep, tenant=seq.request.tenant)

    def prefetch(self, ahead: Iterable[tuple[ScheduledRequest, int]]) -> tuple[MediaItem, ...]:
        """What will be encoded next, as much as `steps_ahead` may encode: decoding of images can begin."""
        items: dict[Key, MediaItem] = {}
        budget = self._steps_ahead * self._encoder_budget
        for seq, index in ahead:
            span = seq.spans[index]
            item = seq.request.prompt.items[index]
            if span.key in self._cache or span.key in items or item.is_decoded_first:
                continue
            budget -= span.encode_cost
            if budget < 0:
                break
            items[span.key] = item
        return tuple(items.values())

    def decode_first(self, ahead: Iterable[tuple[ScheduledRequest, int]]) -> tuple[MediaItem, ...]:
        """Images that may take long: until then they take neither budget nor space that others could use."""
        items: dict[Key, MediaItem] = {}
        for seq, index in ahead:
            item = seq.request.prompt.items[index]
            if item.is_decoded_first and item.key not in self._cache:
                items[item.key] = item
            if len(items) == _MAX_DECODED_FIRST:
                break
        self.waits_for_decoding = bool(items)
        return tuple(items.values())

    def has(self, key: Key) -> bool:
        """Its embeddings are resident, or being made."""
        return key in self._cache

    def lacks_cache_space(self, seq: ScheduledRequest) -> bool:
        """Whether the image of a request's next token is missing and does not fit beside what is pinned."""
        ahead = range(seq.next_span, len(seq.spans))
        span = next((seq.spans[index] for index in ahead if index not in seq.pins), None)
        if span is None or span.start >= seq.next_end or span.key in self._cache:
            return False
        return span.num_embeds > self._cache.space

    def prefer(self, seq: ScheduledRequest) -> None:
        """The cache space that becomes free is for this request: another one was preempted for it."""
        self._space_queue.put_first(seq)

    def pop_requester(self, key: Key) -> str:
        """An encoding ended: which request had asked for it."""
        return self._in_flight.pop(key).requester

    def reset(self) -> None:
        """The encoder was cleared."""
        self._in_flight.clear()

    def check(self, requests: Iterable[ScheduledRequest]) -> None:
        assert +self._wanted == Counter(span.key for seq in requests for span in seq.spans), "wrong media"
        work = self.work_in_flight
        assert work <= self._encoder_budget, f"{work} embeddings in flight, {self._encoder_budget} allowed"
        assert self._in_flight.keys() == self._cache.in_flight(), "the cache has other images in flight"

    def _waits_for_decoding(self, seq: ScheduledRequest, index: int) -> bool:
        item = seq.request.prompt.items[index]
        return item.is_decoded_first and item.key not in self._cache and item.key not in self._decoded

    def _may_enter(self, seq: ScheduledRequest, index: int) -> bool:
        span = seq.spans[index]
        if self._space_queue.bars(seq) or self._waits_for_decoding(seq, index):
            return False
        if self.is_sliced:
            return self._cache.is_resident(span.key)
        if span.key in self._cache:
            return True
        return not self._encode_queue.bars(seq) and self._can_encode(seq, span)

    def _can_encode(self, seq: ScheduledRequest, span: Span) -> bool:
        """Whether budget and space allow it. A refused request is queued."""
        if span.num_embeds > self._cache.space:
            self._space_queue.refuse(seq)
        elif span.encode_cost <= self._budget or (self.is_sliced and not self._in_flight):
            return True
        self._encode_queue.refuse(seq)
        return False

    def _pin(self, seq: ScheduledRequest, index: int) -> bool:
        return self._cache.acquire(seq.spans[index].key, seq.holder(index), seq.request.tenant)

    def _start(self, seq: ScheduledRequest, index: int) -> None:
        span = seq.spans[index]
        self._encode_queue.serve(seq)
        item = seq.request.prompt.items[index]
        seq.share.charge(EMBEDDING_COST * span.encode_cost + DECODED_PIXEL_COST * item.price)
        self.encode.append(item)
        self._budget -= span.encode_cost
        self._in_flight[span.key] = _InFlight(seq.request_id, span.encode_cost)
