"""Which waiting requests start to run in a step. None waits for what only a preemption could free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from saccade.scheduler.budget import StepBuilder
from saccade.scheduler.encoder_cache import EncoderCache
from saccade.scheduler.encoder_scheduler import WindowLimit
from saccade.scheduler.fair_queue import FairQueue
from saccade.scheduler.kv_cache import BlockPool, CachedPrefix
from saccade.scheduler.request import ScheduledRequest
from saccade.scheduler.running import RunningRequests
from saccade.scheduler.state_cache import StateCache
from saccade.scheduler.tenant_share import LAST, Rank
from saccade.scheduler.window_planner import WindowPlanner


class FirstWindow(NamedTuple):
    prefix: CachedPrefix  # that the request need not compute
    limit: WindowLimit  # how far it gets after that


@dataclass(slots=True, eq=False)
class Admitter:
    _queue: FairQueue
    _running: RunningRequests
    _windows: WindowPlanner
    _kv_cache: BlockPool
    _state_cache: StateCache
    _encoder_cache: EncoderCache

    def admit_waiting(self, draft: StepBuilder, before: Rank = LAST) -> None:
        """Admit requests of tenants that come `before` a rank. A running one that lacks blocks goes first."""
        if draft.has_preempted or draft.is_short or self._running.seats <= 0:
            return  # the last as nearly always where many wait
        for seq in self._queue.waiting_order():
            if self._running.seats <= 0 or not draft.budget.total or seq.share.rank > before:
                return
            window = self.first_window(seq, draft)
            if window is None:
                continue  # it keeps its place, and others may pass
            prefix, limit = window
            if limit.stops_at_image and not self._queue.has_seat_to_wait(
                seq.share, self._running.max_requests
            ):
                continue
            num_new = self._kv_cache.blocks_for(limit.end) - len(prefix.blocks)
            if not self._kv_cache.can_allocate(num_new, shared=prefix.blocks):
                draft.lacks_blocks = True
                return  # none may pass, or it would never find enough blocks
            self._admit(seq, prefix, draft)
            self._windows.advance(seq, seq.num_computed, limit, draft)

    def first_window(self, seq: ScheduledRequest, draft: StepBuilder) -> FirstWindow | None:
        """What a waiting request could do now. Takes nothing.

        None where its grammar or its image is missing, or other kinds take this step.
        """
        if seq.request_id in draft.not_ready or not draft.budget.left_for(seq, start=0):
            return None
        cached = self._kv_cache.find_prefix(seq.hashes, seq.num_tokens)
        prefix = self._state_cache.usable(seq.hashes, cached)
        start = prefix.num_blocks * self._kv_cache.block_size
        if prefix.is_cut:  # the rest is restored in later steps
            return FirstWindow(prefix, WindowLimit(start, ())) if prefix.num_restored > 0 else None
        limit = self._windows.limit(seq, start, draft)
        return FirstWindow(prefix, limit) if limit.end > start or limit.spans else None

    def _admit(self, seq: ScheduledRequest, prefix: CachedPrefix, draft: StepBuilder) -> None:
        seq.attach_cached_blocks(self._kv_cache, prefix)
        self._kv_cache.count_lookup(seq.num_tokens, seq.num_computed)
        seq.unpin_computed(self._encoder_cache)
        if seq.first_scheduled is None:
            seq.first_scheduled = draft.now
            seq.cached_tokens = seq.num_computed
        self._queue.start(seq)
        self._running.start(seq)
        draft.started.add(seq.request_id)
        self._windows.tell_runner(seq, draft)
