"""The one rule: a window ends before the first span whose embeddings are neither resident nor can be had in this step.

Owns the encoder budget of a step and the order in which pictures are encoded. Knows nothing of blocks or token budgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from saccade.scheduler.encoder_cache import EncoderCache
from saccade.scheduler.request import ScheduledRequest
from saccade.types import Key, MediaItem, Span


class WindowLimit(NamedTuple):
    end: int  # where the window has to end
    spans: tuple[int, ...]  # spans it enters that the request does not hold yet


class _FifoTurn:
    """Keeps those who came later behind a request that was refused, until it is served in the next step.

    Not longer: a request that is not even looked at in a step (no token budget, no place) must hold nobody up.
    """

    def __init__(self) -> None:
        self._head = self._next_head = math.inf  # arrival order of the first in line

    def turn(self) -> None:
        self._head, self._next_head = self._next_head, math.inf

    def refuse(self, seq: ScheduledRequest) -> None:
        self._head, self._next_head = min(self._head, seq.order), min(self._next_head, seq.order)

    def serve(self, seq: ScheduledRequest) -> None:
        """It has what it stood in line for."""
        if seq.order == self._head:
            self._head = math.inf

    def bars(self, seq: ScheduledRequest) -> bool:
        """Not who holds on to room that the head of the line may wait for: it gives it back by going on."""
        return seq.order > self._head and not seq.blocks_cache


class _InFlight(NamedTuple):
    """An item that the encoder has."""

    requester: str  # who asked for it
    work: int


class EncoderScheduler:
    """Lets windows into spans and starts encodings, one step after the other.

    A refusal puts a request in line only when nothing but pins and flights stands in its way: those end by themselves.
    What else might stand there (blocks it waits for, its own earlier spans) may depend on the requests behind it.
    """

    def __init__(self, cache: EncoderCache, encoder_budget: int) -> None:
        self.encode: list[MediaItem] = []  # given to the encoder in this step
        self.is_sliced = False
        self._cache = cache
        self._encoder_budget = encoder_budget
        self._budget = 0  # work that may still be given to the encoder in this step
        self._flights: dict[Key, _InFlight] = {}
        self._encode_line = _FifoTurn()  # for the encoder
        self._room_line = _FifoTurn()  # for room in the cache: even pinning what is resident would keep room away

    @property
    def work_in_flight(self) -> int:
        """Embeddings that the tower is making. Time and memory depend on these; the cache counts those that stay."""
        return sum(flight.work for flight in self._flights.values())

    def begin_step(self, is_sliced: bool, max_work: int | None = None) -> None:
        """`is_sliced`: encoding goes on a few layers a step, so what is in flight cannot be used in this step.

        `max_work`: of which no more than this at a time, but one picture however large.
        """
        self.is_sliced = is_sliced
        self.encode = []
        # What earlier steps left in flight counts too: the encoder's memory is bounded by the budget whatever the mode.
        maximum = self._encoder_budget if max_work is None else min(max_work, self._encoder_budget)
        self._budget = maximum - self.work_in_flight
        self._encode_line.turn()
        self._room_line.turn()

    def reach(self, seq: ScheduledRequest, start: int, end: int) -> WindowLimit:
        """How far the window [start, end) may go. Takes nothing, so it can be asked before blocks are certain."""
        entered: list[int] = []
        room, budget = self._cache.room, self._budget
        seen: set[Key] = set()
        for index in range(seq.next_span, len(seq.spans)):
            span = seq.spans[index]
            if span.start >= end:
                break
            if span.pinned_until <= start or index in seq.held:
                continue
            if span.key not in seen:
                if not self._may_enter(seq, span):
                    return WindowLimit(max(start, span.start), tuple(entered))
                seen.add(span.key)
                room -= self._cache.room_taken_by(span.key, span.slots)
                budget -= 0 if span.key in self._cache else span.work
                if room < 0 or budget < 0:  # spans before it in this window take what it would need
                    return WindowLimit(max(start, span.start), tuple(entered))
            entered.append(index)
        return WindowLimit(end, tuple(entered))

    def enter(self, seq: ScheduledRequest, spans: Iterable[int]) -> None:
        """Pin the embeddings of spans that `reach` allowed, and encode those that are missing."""
        # What is there is pinned first: room for the missing ones must not be made by evicting it.
        missing = [index for index in spans if not self._pin(seq, index)]
        for index in missing:
            if not self._pin(seq, index):  # the same picture may come twice in one window
                is_reserved = self._cache.reserve(seq.spans[index].key, seq.spans[index].slots, seq.holder(index))
                assert is_reserved, "a span was entered without room for it"
                self._start(seq, index)
        seq.held.update(spans)
        self._room_line.serve(seq)

    def look_ahead(self, ahead: Iterable[tuple[ScheduledRequest, int]]) -> None:
        """Start encoding what will be needed next, in order, without a pin: who waits must not hold room.

        No idle entry is evicted that someone further ahead still wants.
        """
        wanted: set[Key] = set()
        for seq, index in ahead:
            span = seq.spans[index]
            if span.key not in self._cache:
                if not self._can_encode(seq, span) or not self._cache.reserve(span.key, span.slots, None, keep=wanted):
                    return
                self._start(seq, index)
            wanted.add(span.key)

    def prefetch(self, ahead: Iterable[tuple[ScheduledRequest, int]]) -> tuple[MediaItem, ...]:
        """What will be encoded next, as much as one step may encode, so that decoding can begin."""
        items: dict[Key, MediaItem] = {}
        budget = self._encoder_budget
        for seq, index in ahead:
            span = seq.spans[index]
            if span.key in self._cache or span.key in items:
                continue
            budget -= span.work
            if budget < 0:
                break
            items[span.key] = seq.request.prompt.items[index]
        return tuple(items.values())

    def is_short_of_room(self, seq: ScheduledRequest) -> bool:
        """Whether the item that a request needs for its next token is missing and does not fit beside what is held."""
        missing = (span for i, span in enumerate(seq.spans) if i >= seq.next_span and i not in seq.held)
        span = next(missing, None)
        if span is None or span.start > seq.num_computed or span.key in self._cache:
            return False
        return span.slots > self._cache.room

    def pop_requester(self, key: Key) -> str:
        """A flight ended: which request had asked for it."""
        return self._flights.pop(key).requester

    def reset(self) -> None:
        """Nothing is in flight any more."""
        self._flights.clear()

    def check(self) -> None:
        work = self.work_in_flight
        assert work <= self._encoder_budget, f"{work} embeddings are being made, {self._encoder_budget} allowed"
        assert self._flights.keys() == self._cache.in_flight(), "gate and cache disagree about what is in flight"

    def _may_enter(self, seq: ScheduledRequest, span: Span) -> bool:
        if self._room_line.bars(seq):
            return False
        if span.key in self._cache:
            return not self.is_sliced or self._cache.is_resident(span.key)
        return not self.is_sliced and not self._encode_line.bars(seq) and self._can_encode(seq, span)

    def _can_encode(self, seq: ScheduledRequest, span: Span) -> bool:
        """Whether budget and room allow it. Who is refused gets in line."""
        if span.slots > self._cache.room:
            self._room_line.refuse(seq)
        elif span.work <= self._budget or (self.is_sliced and not self._flights):
            return True
        self._encode_line.refuse(seq)
        return False

    def _pin(self, seq: ScheduledRequest, index: int) -> bool:
        return self._cache.acquire(seq.spans[index].key, seq.holder(index))

    def _start(self, seq: ScheduledRequest, index: int) -> None:
        span = seq.spans[index]
        self._encode_line.serve(seq)
        self.encode.append(seq.request.prompt.items[index])
        self._budget -= span.work
        self._flights[span.key] = _InFlight(seq.request_id, span.work)
