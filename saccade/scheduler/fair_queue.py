"""Shares the engine between tenants: which request goes next, which gives way. Knows no blocks, no budgets.

As VTC ("Fairness in Serving Large Language Models", OSDI 2024): a tenant's counter is the service it received
divided by its weight, and the tenant with the smallest counter goes first. What one leaves, the others use.

    tenant  weight  service  counter
    A       1       3,000    3,000     a long prompt, chunk by chunk: waits while B has something to do
    B       2       1,000      500     goes first
    C       1       -        3,000     comes back after an hour: begins at the virtual time, saves nothing up

Within a tenant lower values of `priority` go first, then earlier arrivals. With one tenant and one priority
this is first come, first served.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

from saccade.scheduler.request import OpenRequests, ScheduledRequest
from saccade.scheduler.tenant_share import OUTPUT_COST, LabelTotal, Rank, TenantShare, counted_as
from saccade.types.request import Tenant

MAX_IDLE = 256  # tenants without requests that are remembered


@dataclass(slots=True, eq=False)
class _TenantQueue:
    """What one tenant has open."""

    share: TenantShare
    waiting: list[ScheduledRequest] = field(default_factory=list)  # by priority, then arrival, as is the next
    running: list[ScheduledRequest] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.running)


class ServingOrder(NamedTuple):
    """Running requests in the order in which a step serves them."""

    first: deque[ScheduledRequest]
    later: deque[ScheduledRequest]  # prefill of tenants with more service than one that waits: after that
    passed: list[ScheduledRequest]  # got no window when they were served
    oldest: ScheduledRequest | None  # where several tenants have requests

    def pop_victim(self, seq: ScheduledRequest) -> ScheduledRequest | None:
        """The request to preempt for `seq`: the last of the tenant with the largest counter, maybe itself.

        Never one with a window in this step: others may share the blocks that it fills. Never the oldest of
        several tenants: as counters change, two requests could preempt each other for ever. So the oldest one
        that runs ends, then the next. It takes blocks even from requests that were passed over; what it must
        still wait for is only requests with a window in this step, and their tenants' counters grow.
        """
        for queue in (self.later, self.first):
            for index in range(len(queue) - 1, -1, -1):
                victim = queue[index]
                if victim is not self.oldest:
                    del queue[index]
                    return victim
        if seq is not self.oldest:
            return seq
        return self.passed.pop() if self.passed else None


class FairQueue:
    def __init__(self, max_credit: float) -> None:
        """`max_credit`: service that a tenant may still claim which could not use its share for a while."""
        self._max_credit = max_credit
        self._queues: dict[str, _TenantQueue] = {}  # of tenants with open requests
        self._idle: OrderedDict[str, TenantShare] = OrderedDict()  # of others, those that came lately last
        self._virtual_time = 0.0  # the largest counter with which a tenant was given prefill
        self._num_shares = 0  # so far
        self.num_waiting = 0
        self._totals: dict[str, LabelTotal] = {}
        self._order: list[_TenantQueue] | None = None  # of this step; None: not known

    # --- requests come and go -------------------------------------------------------------------------------

    def join(self, tenant: Tenant) -> TenantShare:
        """The share of a tenant that sends a request."""
        queue = self._queues.get(tenant.name)
        if queue is None:
            share = self._idle.pop(tenant.name, None) or self._new_share(tenant)
            queue = self._queues[tenant.name] = _TenantQueue(share)
        share = queue.share
        share.weight = tenant.weight  # an operator may change it, and the label
        share.label = counted_as(tenant, self._totals.keys())
        share.total = self._totals.setdefault(share.label, LabelTotal())
        # Time in which it asked for nothing is not saved up, and what it could not use only so far.
        credit = self._max_credit / share.weight if queue.waiting else 0.0
        share.counter = max(share.counter, self._virtual_time - credit)
        self._order = None
        return share

    def _new_share(self, tenant: Tenant) -> TenantShare:
        self._num_shares += 1
        return TenantShare(tenant.name, number=self._num_shares - 1)

    def wait(self, seq: ScheduledRequest) -> None:
        """A request has come, or was preempted."""
        queue = self._queues[seq.share.name]
        if seq.is_running:
            queue.running.remove(seq)
        insort(queue.waiting, seq, key=_place)
        self.num_waiting += 1

    def start(self, seq: ScheduledRequest) -> None:
        queue = self._queues[seq.share.name]
        queue.waiting.remove(seq)
        self.num_waiting -= 1
        insort(queue.running, seq, key=_place)

    def leave(self, seq: ScheduledRequest) -> None:
        """A request has ended."""
        share = seq.share
        queue = self._queues[share.name]
        if seq.is_running:
            queue.running.remove(seq)
        else:
            queue.waiting.remove(seq)
            self.num_waiting -= 1
        if not queue.is_empty:
            return
        del self._queues[share.name]
        self._idle[share.name] = share
        self._order = None
        if not self._queues:  # all begin anew together
            self._virtual_time = max(self._virtual_time, *(share.counter for share in self._idle.values()))
        if len(self._idle) > MAX_IDLE:
            self._idle.popitem(last=False)

    # --- the order ------------------------------------------------------------------------------------------

    @property
    def num_tenants(self) -> int:
        """With open requests."""
        return len(self._queues)

    def all_waiting(self) -> list[ScheduledRequest]:
        return list(chain.from_iterable(queue.waiting for queue in self._queues.values()))

    def begin_step(self) -> None:
        """Tenants are put in order once a step: that costs as much as all else where there are thousands."""
        self._order = None
        if len(self._queues) == 1:
            return
        for queue in self._queues.values():
            # What a tenant could not use is claimed only so far, also by one that queues.
            share = queue.share
            minimum = self._virtual_time - self._max_credit / share.weight
            if share.counter < minimum:
                share.counter = minimum

    def first_waiting(self, count: int) -> Iterator[ScheduledRequest]:
        """The first waiting request of each tenant, then the second of each, and so on."""
        lists_in_order = (queue.waiting for queue in self._in_order() if queue.waiting)
        lists = list(islice(lists_in_order, count))  # the first requests of further tenants come too late
        if len(lists) == 1:
            return islice(lists[0], count)
        rounds = chain.from_iterable(zip_longest(*lists))
        return islice((seq for seq in rounds if seq is not None), count)

    def waiting_order(self) -> Iterator[ScheduledRequest]:
        """Waiting requests in the order of admission. One that was admitted has been charged for by then."""
        heap = [(*queue.share.rank, queue, 0) for queue in self._queues.values() if queue.waiting]
        heapify(heap)
        while heap:
            counter, number, queue, index = heap[0]
            if index == len(queue.waiting):
                heappop(heap)
                continue
            if counter == queue.share.counter:
                seq = queue.waiting[index]
                yield seq
                index += not seq.is_running  # one that stays keeps its place, and others may pass
            heapreplace(heap, (queue.share.counter, number, queue, index))

    def serving_order(self, running: Sequence[ScheduledRequest]) -> ServingOrder:
        """Running requests by their tenants' counters. Decodes never wait for prompts of other tenants.

        `running` is in order of arrival.
        """
        queues = self._in_order()
        if len(queues) == 1:
            return ServingOrder(deque(queues[0].running), deque(), [], oldest=None)
        first: deque[ScheduledRequest] = deque()
        later: deque[ScheduledRequest] = deque()
        is_after_waiting = False
        for queue in queues:
            if is_after_waiting:
                for seq in queue.running:
                    (first if seq.is_decoding else later).append(seq)
            else:
                first.extend(queue.running)
                is_after_waiting = bool(queue.waiting)
        return ServingOrder(first, later, [], oldest=next(iter(running), None))

    def overdue_victim(
        self, running: Sequence[ScheduledRequest], can_start: Callable[[ScheduledRequest], bool]
    ) -> ScheduledRequest | None:
        """The running request that should give its place to a waiting one, if any.

        Its tenant runs more requests than its share, that of the other fewer. And it only waits for the
        encoder, so that its seat is of no use to it; or its tenant is ahead by twice the service that
        computing the victim again can cost. `can_start`: the first request of a tenant may wait for its
        grammar or image, which must not keep other tenants waiting.
        """
        if len(self._queues) < 2:
            return None
        per_weight = len(running) / sum([queue.share.weight for queue in self._queues.values()])
        with_seats = [self._queues[name] for name in dict.fromkeys(seq.share.name for seq in running)]
        above = [queue for queue in with_seats if len(queue.running) > _fair_count(queue, per_weight)]
        above.sort(key=_rank, reverse=True)
        candidates = [seq for queue in above for seq in reversed(queue.running) if seq is not running[0]]
        if not candidates:
            return None
        victim = next((seq for seq in candidates if seq.waits_for_image), candidates[0])
        last = victim.share
        if not victim.waits_for_image and last.service < last.gives_back_at:
            return None
        for queue in self._in_order():
            is_ahead = (last.counter - queue.share.counter) * last.weight > 2 * victim.recompute_cost
            if not (is_ahead or victim.waits_for_image):
                return None
            is_below = len(queue.running) < _fair_count(queue, per_weight)
            if queue.waiting and is_below and can_start(queue.waiting[0]):
                return victim
        return None

    def has_seat_to_wait(self, share: TenantShare, max_seats: int) -> bool:
        """Whether a tenant may have one more running request that only waits for the encoder.

        Beside other tenants, no more of them than its share of the seats.
        """
        if len(self._queues) < 2:
            return True
        num_waiting = sum(seq.waits_for_image for seq in self._queues[share.name].running)
        total = sum(queue.share.weight for queue in self._queues.values())
        return num_waiting < max(share.weight / total * max_seats, 1)

    def give_back(self, victim: ScheduledRequest) -> None:
        """It is preempted for another tenant. Its own gives up no other before it was served for it."""
        share = victim.share
        share.gives_back_at = share.service + 2 * victim.recompute_cost

    def max_waiting(self, tenant: Tenant, limit: int) -> float:
        """Its share of the queue, which is its own however long the queue is."""
        other_weights = sum(queue.share.weight for name, queue in self._queues.items() if name != tenant.name)
        return limit * tenant.weight / (tenant.weight + other_weights)

    def waiting_of(self, tenant: Tenant) -> int:
        queue = self._queues.get(tenant.name)
        return len(queue.waiting) if queue else 0

    def _in_order(self) -> list[_TenantQueue]:
        if self._order is None:
            self._order = sorted(self._queues.values(), key=_rank)
        return self._order

    # --- service --------------------------------------------------------------------------------------------

    def charge_prefill(self, seq: ScheduledRequest, num_tokens: int) -> None:
        share = seq.share
        self._virtual_time = max(self._virtual_time, share.counter)
        share.charge(num_tokens)

    def charge_outputs(self, sampled: Collection[str], open_requests: OpenRequests) -> None:
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            queue.share.charge(OUTPUT_COST * len(sampled))
            return
        for request_id in sampled:
            if (seq := open_requests.get(request_id)) is not None:  # it may have ended before an async decode
                seq.share.charge(OUTPUT_COST)

    # --- reporting ------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, dict[str, Any]]:
        """By label."""
        stats: dict[str, dict[str, Any]] = {
            label: {"running": 0, "waiting": 0, "service": total.service}
            for label, total in self._totals.items()
        }
        for queue in self._queues.values():
            stats[queue.share.label]["running"] += len(queue.running)
            stats[queue.share.label]["waiting"] += len(queue.waiting)
        return stats

    def check(self, open_requests: OpenRequests) -> None:
        queues = self._queues.values()
        assert not any(queue.is_empty for queue in queues), "a queue without requests is open"
        assert not self._queues.keys() & self._idle.keys(), "a tenant is open and idle"
        assert len(self._idle) <= MAX_IDLE, "too many tenants are remembered"
        for queue in queues:
            assert queue.waiting == sorted(queue.waiting, key=_place), "waiting requests are out of order"
            assert queue.running == sorted(queue.running, key=_place), "running requests are out of order"
            assert not any(seq.is_running for seq in queue.waiting), "a running request waits"
            assert all(seq.is_running for seq in queue.running), "a waiting request runs"
            in_queue = chain(queue.waiting, queue.running)
            assert all(seq.share is queue.share for seq in in_queue), "in a wrong queue"
        assert self.num_waiting == len(self.all_waiting()), "waiting requests miscounted"
        queued = [seq for queue in queues for seq in chain(queue.waiting, queue.running)]
        assert sorted(queued, key=_order) == sorted(open_requests.values(), key=_order), "a request is lost"


def _rank(queue: _TenantQueue) -> Rank:
    return queue.share.rank


def _fair_count(queue: _TenantQueue, per_weight: float) -> float:
    """Running requests that a tenant may have before it must give some back."""
    return max(queue.share.weight * per_weight, 1)


def _place(seq: ScheduledRequest) -> tuple[int, int]:
    return seq.place


def _order(seq: ScheduledRequest) -> int:
    return seq.order
