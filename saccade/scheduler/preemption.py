"""Which running request gives back all it holds, so that others go on; it computes again later.

blocks        a running request lacks them        the last of the tenant with the largest counter
seat, blocks  a waiting one lacks them            one of a tenant above its share (`FairQueue.overdue_victim`)
cache space   running ones wait for each other    the last of them; the space is the first one's

Nothing is preempted beside a step that runs: it must keep its blocks. The next step is then a sync one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from saccade.scheduler.budget import StepBuilder
from saccade.scheduler.encoder_lookahead import deadlocked
from saccade.scheduler.encoder_scheduler import EncoderScheduler
from saccade.scheduler.fair_queue import FairQueue, ServingOrder
from saccade.scheduler.request import ScheduledRequest
from saccade.scheduler.running import RunningRequests


@dataclass(slots=True, eq=False)
class Preemption:
    _running: RunningRequests
    _queue: FairQueue
    _encoder: EncoderScheduler
    count: int = 0

    def make_way(self, draft: StepBuilder, can_start: Callable[[ScheduledRequest], bool]) -> None:
        """Where seats or blocks are lacking, a tenant above its share may have to give one back."""
        if self._running.seats > 0 and not draft.lacks_blocks:
            return
        draft.lacks_blocks = False
        victim = self._queue.overdue_victim(self._running.in_order, can_start)
        if victim is None:
            return
        if draft.async_decode:
            draft.needs_sync = True
        else:
            self._queue.give_back(victim)
            self._preempt(victim, draft)

    def free_blocks(self, draft: StepBuilder, seq: ScheduledRequest, order: ServingOrder) -> bool:
        """Take blocks for `seq` from the request that comes last. False where that is itself, or none is."""
        victim = order.pop_victim(seq)
        if victim is not None:
            self._preempt(victim, draft)
            draft.has_preempted = True
        return victim not in (None, seq)

    def end_deadlock(self, draft: StepBuilder) -> None:
        """Running requests may pin images and lack space for more, each that of the other."""
        stuck = deadlocked(self._running.in_order, draft.windows, self._encoder)
        if not stuck:
            return
        if draft.async_decode:
            draft.needs_sync = True
        else:
            self._encoder.prefer(stuck[0])
            self._preempt(stuck[-1], draft)
            draft.has_preempted = True

    def _preempt(self, seq: ScheduledRequest, draft: StepBuilder) -> None:
        draft.admitted = [admission for admission in draft.admitted if admission.request is not seq.request]
        self._queue.wait(seq)
        self._running.release(seq, is_known=seq.request_id not in draft.started)  # else it only pinned images
        seq.num_preemptions += 1
        self.count += 1
