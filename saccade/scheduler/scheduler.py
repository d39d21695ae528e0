"""Plans steps and commits their results: which request computes which window of its tokens, what it holds.

Owns the queues, the KV blocks and the encoder slots, as ids and counts. Has no clock; sees no tensor or text.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

from saccade.errors import RequestError
from saccade.options.engine import SchedulerConfig
from saccade.scheduler.async_decode import async_decode_windows, can_fuse
from saccade.scheduler.budget import StepBudget, StepBuilder, are_enough, demand_of
from saccade.scheduler.cache_log import CacheLog
from saccade.scheduler.encoder_cache import EncoderCache
from saccade.scheduler.encoder_failures import affected_requests
from saccade.scheduler.encoder_lookahead import deadlocked, encoded_ahead, missing_items, next_up, spans_ahead
from saccade.scheduler.encoder_scheduler import EncoderScheduler, WindowLimit
from saccade.scheduler.fair_queue import LAST, FairQueue, Rank, ServingOrder
from saccade.scheduler.invariants import check_held, check_running
from saccade.scheduler.kv_cache import BlockPool, CachedPrefix
from saccade.scheduler.kv_event_log import KVEventLog
from saccade.scheduler.request import ScheduledRequest
from saccade.scheduler.request_validation import refuse_impossible, refuse_overload
from saccade.scheduler.state_cache import StateCache
from saccade.scheduler.step_policy import StepLimits, make_policy
from saccade.types.events import FinishReason, TokenEvent
from saccade.types.media import Key, MediaItem
from saccade.types.prompt import RECORD_BYTES
from saccade.types.request import Request
from saccade.types.step import Admission, Sample, ScheduledWindow, StepPlan, StepResult

_CREDIT_STEPS = 8  # full steps that a tenant may claim later which could not use its share for a while
_FirstWindow = tuple[CachedPrefix, WindowLimit]


class Scheduler:
    """schedule() -> the runner runs the plan -> commit(); add() and abort() between steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._block_size = config.block_size
        self._kv_cache = BlockPool.of(config)
        self._encoder_cache = EncoderCache(config.encoder_cache_slots, config.keep_idle_embeddings)
        self._encoder = EncoderScheduler.of(config, self._encoder_cache)
        self.policy = make_policy(config)
        self._begun = 0.0  # when the latest step was planned
        self._state_cache = StateCache(config.state_rows, config.block_size)
        self._open: dict[str, ScheduledRequest] = {}
        self._queue = FairQueue(_CREDIT_STEPS * (config.max_num_batched_tokens + config.encoder_budget))
        self._running: list[ScheduledRequest] = []  # in order of arrival
        self._freed: list[str] = []  # requests that the runner has not been told of
        self.not_ready: frozenset[str] = frozenset()  # requests that skip the next step: their grammar
        self._plans: list[StepPlan] = []  # being run: one, or several with async scheduling
        self._is_short = False  # of blocks: the next step is a sync one, which may preempt
        self._lacks_blocks = False  # the waiting request that goes next
        self._num_added = self._num_steps = self._num_preemptions = 0

    # --- requests come and go -------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request; RequestError if it can never run or the queue is full."""
        if request.request_id in self._open:
            name = request.request_id
            raise RequestError(f"a request with the id {name!r} is already open; choose another id")
        refuse_overload(request.tenant, self._queue, len(self._running), self.config)
        refuse_impossible(request, self.config)
        prompt = request.prompt
        assert len(prompt.identity) == RECORD_BYTES * len(prompt), "identity and tokens differ in length"
        share = self._queue.join(request.tenant)
        seq = ScheduledRequest(request, self._num_added, now, self.config.block_size, share)
        self._num_added += 1
        self._open[seq.request_id] = seq
        self._encoder.join(seq)
        self._queue.wait(seq)

    def missing(self, request_id: str) -> tuple[MediaItem, ...]:
        """Images of a waiting request that come next, neither resident nor spared by the prefix cache."""
        return missing_items(self._open[request_id], self._candidates(), self._kv_cache, self._encoder)

    def abort(self, request_id: str, now: float) -> TokenEvent | None:
        """End a request between two steps. None if it is not open."""
        return self._finish(self._open[request_id], "abort", now) if request_id in self._open else None

    def fail_all(self, error: RequestError, now: float) -> list[TokenEvent]:
        """A step broke: end every request and empty both caches, since it is unknown what was written."""
        for seq in self._open.values():
            seq.media.clear()  # a device that has died cannot be asked how long its images took
        events = [self._finish(seq, "error", now, error=error) for seq in tuple(self._open.values())]
        plans = self._plans
        self._plans = []
        # The runner may have broken off before it read a plan, so what the plan told is told again.
        freed_requests = (request_id for plan in plans for request_id in plan.freed_requests)
        self._freed = list(dict.fromkeys((*freed_requests, *self._freed)))
        self._kv_cache.reset()
        self._state_cache.reset()
        self._encoder_cache.reset(untold=[key for plan in plans for key in plan.evicted])
        self._encoder.reset()
        return events

    def reset_prefix_cache(self) -> None:
        self._kv_cache.reset()
        self._state_cache.reset()

    def has_unfinished(self) -> bool:
        return bool(self._open)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def has_decodes(self) -> bool:
        """Whether a running request decodes."""
        return any(seq.is_decoding for seq in self._running)

    def fills_step(self) -> bool:
        """Whether the waiting requests fill the next step."""
        return are_enough(self._queue.all_waiting(), self.config)

    def has_image(self, key: Key) -> bool:
        """Its embeddings are resident, or the encoder is making them."""
        return key in self._encoder_cache

    def index(self) -> None:
        """Hash what was planned lately: for when the next plan is not waited for."""
        self._kv_cache.index()

    def log_caches(self) -> CacheLog:
        """From now on the changes of both caches are noted there."""
        log = self._encoder_cache.log = self._kv_cache.log_changes()
        return log

    def log_kv_events(self) -> KVEventLog:
        """From now on the changes of the prefix cache are noted there, with all tokens."""
        return self._kv_cache.log_events()

    # --- planning -------------------------------------------------------------------------------------------

    def schedule(self, now: float, *, latency_bounded: bool = True) -> StepPlan:
        """Decide the next step: running requests first, then waiting ones, then images that come next."""
        self._begun = now
        plan = self._plan(now, latency_bounded)
        assert plan is not None
        return plan

    def schedule_async_decode(self) -> StepPlan | None:
        """The next decode step, before the tokens of running steps are known; None where the host samples."""
        is_short = self._is_short
        self._is_short = False
        if is_short or not self._plans or not all(seq.samples_on_device for seq in self._running):
            return None
        windows = async_decode_windows(self._kv_cache, self._plans, self._open)
        return self._planned(decode=windows, encode_layers=0, kind="async_decode") if windows else None

    def schedule_async_prefill(self, now: float, *, latency_bounded: bool = True) -> StepPlan | None:
        """Prefill and encoding beside an async decode step that runs; None when there is nothing to do."""
        (decode,) = self._plans
        served = frozenset([window.request_id for window in decode.decode])
        if self._open.keys() <= served and not self._encoder.is_busy:
            return None  # nearly every step of many decodes: nothing else is open or under way
        return self._plan(now, latency_bounded, served)

    def _plan(self, now: float, bounded: bool, served: frozenset[str] = frozenset()) -> StepPlan | None:
        """`served`: requests whose decode runs already. None where nothing is to be done beside them."""
        self._queue.begin_step()
        seats = self.config.max_num_seqs - len(self._running)
        fuses = can_fuse(served, self._running, self._queue.first_waiting(seats))
        demand = demand_of(self._candidates(), self._num_steps, self._encoder, fuses, bounded, seats)
        limits = self.policy.limits(demand)
        draft = StepBuilder(now, StepBudget(limits, demand), served, limits.skip_decode)
        self._kv_cache.host.max_restored = limits.max_restored_blocks
        self._fill(draft, limits)
        moves = draft.has_windows or served or self._kv_cache.host.is_restoring
        if limits.encode_layers is not None and not (moves or self._encoder_cache.slots_in_flight):
            # Waiting requests hold the cache space that a running one needs. Whole images go in.
            limits = limits._replace(encode_layers=None)
            self._queue.begin_step()
            self._fill(draft, limits)
        self._is_short = draft.is_short or draft.needs_sync
        layers = self.policy.encode_layers(limits, demand, draft.budget.num_prefills, self._encoder.own_load)
        ahead = next_up(self._candidates, self._kv_cache, self._encoder, limits)
        encodes = self._encoder.encode or (layers != 0 and self._encoder_cache.slots_in_flight > 0)
        if served and not (draft.has_windows or draft.admitted or encodes or ahead.is_new):
            return None
        fused = sum(window.end - window.start for window in draft.prefill)
        samples = any(window.samples for window in chain(draft.decode, draft.prefill))
        return self._planned(
            decode=tuple(draft.decode),
            prefill=tuple(draft.prefill),
            admitted=tuple(draft.admitted),
            encode=tuple(self._encoder.encode),
            encode_layers=layers,
            prefetch=ahead.prefetch,
            decode_first=ahead.decode_first,
            kind="async_prefill" if served else "sync",
            fuse_with_next=bool(served and fused) and not samples and self.policy.fuses(demand, fused),
        )

    def _planned(self, **parts: Any) -> StepPlan:
        self._num_steps += 1
        copies = self._kv_cache.drain_copies()
        evicted = self._encoder_cache.drain_evicted()
        parts["unwanted"] = self._encoder.drain_unwanted()
        plan = StepPlan(self._num_steps, *copies, freed_requests=tuple(self._freed), evicted=evicted, **parts)
        self._freed = []
        self._plans.append(plan)
        return plan

    def _fill(self, draft: StepBuilder, limits: StepLimits) -> None:
        is_sliced = limits.encode_layers is not None
        self._encoder.begin_step(is_sliced, limits.max_encode_in_flight if is_sliced else None)
        self._make_way(draft)
        order = self._queue.serving_order(self._running)
        self._serve_running(draft, order.first, order)
        if order.later and not draft.is_short:
            self._admit_waiting(draft, before=order.later[0].share.rank)
            self._serve_running(draft, order.later, order)
        windows = chain(draft.decode, draft.prefill)
        stuck = deadlocked(self._running, windows, self._encoder)
        if stuck and draft.async_decode:
            draft.needs_sync = True
        elif stuck:
            self._encoder.prefer(stuck[0])
            self._preempt(stuck[-1], draft)
            draft.has_preempted = True
        self._admit_waiting(draft)
        if is_sliced:
            is_shared = self._queue.num_tenants > 1
            kept = encoded_ahead(self._candidates(), self._encoder) if is_shared else None
            self._encoder.look_ahead(spans_ahead(self._candidates(), self._kv_cache), kept)

    def _candidates(self) -> Iterator[ScheduledRequest]:
        """Running requests, and as many waiting ones as could run at once."""
        return chain(self._running, self._queue.first_waiting(self.config.max_num_seqs))

    def _make_way(self, draft: StepBuilder) -> None:
        """Where seats or blocks are lacking, a tenant above its share may have to give one back."""
        is_full = len(self._running) >= self.config.max_num_seqs
        if not (is_full or self._lacks_blocks):
            return
        self._lacks_blocks = False
        victim = self._queue.overdue_victim(
            self._running, can_start=lambda seq: self._first_window(seq, draft) is not None
        )
        if victim is not None and draft.async_decode:
            draft.needs_sync = True
        elif victim is not None:
            self._queue.give_back(victim)
            self._preempt(victim, draft)

    def _serve_running(self, draft: StepBuilder, queue: deque[ScheduledRequest], order: ServingOrder) -> None:
        """Serve a queue of `order`. A request that lacks blocks preempts those that come last, or itself."""
        while queue and draft.budget.total:
            seq = queue.popleft()
            if seq.request_id in self.not_ready or (draft.skip_decode and seq.is_decoding):
                order.passed.append(seq)
                continue
            if seq.request_id in draft.async_decode:
                draft.budget.total -= 1
                continue
            if not (seq.is_decoding or self._state_cache.is_needed):
                found = seq.rematch_prefix(self._kv_cache)
                if found.num_blocks:
                    seq.unpin_computed(self._encoder_cache)
                    draft.admitted.append(self._admission(seq))
                if found.is_cut:
                    order.passed.append(seq)
                    continue
            start = seq.num_computed
            limit = self._window_limit(seq, start, draft)
            while limit.end > start and not seq.has_blocks(self._kv_cache, limit.end):
                if draft.async_decode:  # a running step must keep its blocks; the step after it may preempt
                    draft.is_short = True
                    return
                victim = order.pop_victim(seq)
                if victim is not None:
                    self._preempt(victim, draft)
                    draft.has_preempted = True
                if victim is seq or victim is None:
                    break
                limit = self._window_limit(seq, start, draft)  # a victim's pins are gone now
            else:
                self._advance(draft, seq, start, limit)
                if limit.end == start:
                    order.passed.append(seq)

    def _admit_waiting(self, draft: StepBuilder, before: Rank = LAST) -> None:
        """Admit requests of tenants that come `before` a rank. A running one that lacks blocks goes first."""
        if draft.has_preempted or draft.is_short or len(self._running) >= self.config.max_num_seqs:
            return  # the last as nearly always where many wait
        for seq in self._queue.waiting_order():
            is_full = len(self._running) >= self.config.max_num_seqs or not draft.budget.total
            if is_full or seq.share.rank > before:
                return
            window = self._first_window(seq, draft)
            if window is None:
                continue  # it keeps its place, and others may pass
            found, limit = window
            if limit.stops_at_image and not self._queue.has_seat_to_wait(seq.share, self.config.max_num_seqs):
                continue
            num_new = self._kv_cache.blocks_for(limit.end) - len(found.blocks)
            if not self._kv_cache.can_allocate(num_new, shared=found.blocks):
                self._lacks_blocks = True
                return  # none may pass, or it would never find enough blocks
            self._admit(draft, seq, found)
            self._advance(draft, seq, seq.num_computed, limit)

    def _first_window(self, seq: ScheduledRequest, draft: StepBuilder) -> _FirstWindow | None:
        """Of a waiting request: the blocks it finds, and how far it gets after them.

        None where its grammar or its image is missing, or other kinds take this step.
        """
        if seq.request_id in self.not_ready or not draft.budget.left_for(seq, start=0):
            return None
        found = self._state_cache.usable(seq.hashes, self._kv_cache.find_prefix(seq.hashes, seq.num_tokens))
        start = found.num_blocks * self._block_size
        limit = WindowLimit(start, ()) if found.is_cut else self._window_limit(seq, start, draft)
        is_going_on = limit.end > start or limit.spans or (found.is_cut and found.num_restored)
        return (found, limit) if is_going_on else None

    def _window_limit(self, seq: ScheduledRequest, start: int, draft: StepBuilder) -> WindowLimit:
        end = min(seq.num_tokens, start + draft.budget.left_for(seq, start))
        return self._encoder.window_limit(seq, start, end) if seq.has_images_ahead else WindowLimit(end, ())

    def _admit(self, draft: StepBuilder, seq: ScheduledRequest, found: CachedPrefix) -> None:
        seq.attach_cached_blocks(self._kv_cache, found)
        self._kv_cache.count_lookup(seq.num_tokens, seq.num_computed)
        seq.unpin_computed(self._encoder_cache)
        if seq.first_scheduled is None:
            seq.first_scheduled = draft.now
            seq.cached_tokens = seq.num_computed
        self._queue.start(seq)
        draft.started.add(seq.request_id)
        seq.is_running = True
        insort(self._running, seq, key=lambda other: other.order)
        draft.admitted.append(self._admission(seq))

    def _admission(self, seq: ScheduledRequest) -> Admission:
        state = self._state_cache.checkpoint_after(seq.hashes, len(seq.blocks))
        return Admission(seq.request, tuple(seq.output), tuple(seq.blocks), state)

    def _advance(self, draft: StepBuilder, seq: ScheduledRequest, start: int, limit: WindowLimit) -> None:
        """A window; or some images alone, where one token attends to more than a step may encode."""
        if limit.end > start:
            self._add_window(draft, seq, start, limit)
        elif limit.spans:
            self._encoder.enter(seq, limit.spans)

    def _add_window(self, draft: StepBuilder, seq: ScheduledRequest, start: int, limit: WindowLimit) -> None:
        end = limit.end
        new_blocks: tuple[int, ...] = ()
        if end > len(seq.blocks) * self._block_size:
            new_blocks = self._kv_cache.allocate(self._kv_cache.blocks_for(end) - len(seq.blocks))
            seq.blocks.extend(new_blocks)
        if limit.spans:
            self._encoder.enter(seq, limit.spans)
        if end >= (seq.num_cached_blocks + 1) * self._block_size:
            seq.cache_blocks(self._kv_cache, end)
        draft.budget.take(seq, start, end)
        checkpoints = self._state_cache.plan(seq, start, end)
        samples = end == seq.num_tokens
        window = ScheduledWindow(seq.request_id, start, end, new_blocks, samples, checkpoints)
        if samples and end - start == 1 and seq.output:
            draft.decode.append(window)
        else:
            draft.prefill.append(window)
            self._queue.charge_prefill(seq, end - start)

    def _preempt(self, seq: ScheduledRequest, draft: StepBuilder) -> None:
        draft.admitted = [admission for admission in draft.admitted if admission.request is not seq.request]
        self._queue.wait(seq)
        self._release(seq)
        if seq.request_id in draft.started:  # it only pinned images
            self._freed.remove(seq.request_id)
        seq.num_preemptions += 1
        self._num_preemptions += 1

    # --- committing -----------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Take over what a step did. Returns one event for each request that has a new token or ended."""
        self._plans.remove(plan)
        self.policy.observe(plan, result, now - self._begun)
        self._encoder.local_work = result.local_work
        self._encoder.decoded = result.decoded
        for key in result.encoded:
            self._book_encoded(key, result)
        events = self._end_failed(plan, result, now) if result.failed else []
        self._state_cache.commit(plan.windows, self._open)
        is_in_flight = plan.encode_layers is None and plan.windows and self._encoder_cache.slots_in_flight
        assert not is_in_flight, "the step should have encoded everything, but something is still in flight"
        samples = result.samples
        self._queue.charge_outputs(samples, self._open)
        unsampled = result.unsampled
        for window in plan.windows:
            request_id = window.request_id
            end = window.end
            seq = self._open.get(request_id)
            if seq is None:
                continue  # it ended with its image, or before an async decode step
            seq.num_computed = end
            if not end % self._block_size and end > seq.num_cached_blocks * self._block_size:
                seq.cache_blocks(self._kv_cache, end)  # async decode: its tokens were not known
            if seq.spans and seq.has_images_ahead:
                seq.unpin_computed(self._encoder_cache)
            if unsampled and request_id in unsampled:
                events.append(self._finish(seq, "error", now, error=unsampled[request_id]))
            elif window.samples:
                events.append(self._take_sample(seq, samples[request_id], now))
        return events

    def _book_encoded(self, key: Key, result: StepResult) -> None:
        self._encoder_cache.encoded(key)
        seq = self._open.get(self._encoder.pop_requester(key))
        if seq is not None and key not in result.restored:
            seq.count_media(key, lambda: result.encoded[key])

    def _take_sample(self, seq: ScheduledRequest, sample: Sample, now: float) -> TokenEvent:
        token, logprobs, is_last, _, of_prompt = sample
        seq.output.append(token)
        seq.num_tokens += 1
        if seq.first_token is None:
            seq.first_token = now
        if is_last or (token in seq.stop_ids and len(seq.output) >= seq.request.params.min_tokens):
            return self._finish(seq, "stop", now, sample)
        if seq.num_tokens >= seq.max_total_tokens:
            return self._finish(seq, "length", now, sample)
        # As TokenEvent(...), in half the time: a step makes one for every running request.
        event = (seq.request_id, token, logprobs, None, None, None, None, None, of_prompt)
        return tuple.__new__(TokenEvent, event)

    def _end_failed(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        caches = (self._encoder_cache, self._kv_cache)
        affected = affected_requests(result.failed, plan, self._open, self._encoder, *caches)
        failing = [(self._open[name], error) for name, error in affected.items() if name in self._open]
        return [self._finish(seq, "error", now, error=error) for seq, error in failing]

    # --- releasing ------------------------------------------------------------------------------------------

    def _finish(
        self,
        seq: ScheduledRequest,
        reason: FinishReason,
        now: float,
        sample: Sample | None = None,
        error: RequestError | None = None,
    ) -> TokenEvent:
        """The one place where a request ends, so it ends once."""
        del self._open[seq.request_id]
        self._queue.leave(seq)
        self._encoder.leave(seq)
        if seq.is_running:
            self._release(seq)
        return seq.last_event(reason, now, sample, error)

    def _release(self, seq: ScheduledRequest) -> None:
        """A running request gives back all it holds, on finish, abort, failure and preemption alike."""
        self._running.remove(seq)
        seq.release(self._kv_cache, self._encoder_cache)
        self._freed.append(seq.request_id)

    # --- reporting ------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        pool = self._kv_cache.stats()
        return {
            "steps": self._num_steps,
            "running": len(self._running),
            "waiting": self._queue.num_waiting,
            "preemptions": self._num_preemptions,
            "kv": {name: pool[name] for name in ("total", "used", "idle", "free")},
            "prefix_cache": {name: pool[name] for name in ("queries", "hits", "evictions")},
            "kv_offload": self._kv_cache.host.stats(),
            "encoder_cache": self._encoder_cache.stats(),
            "encoder_cache_tenants": self._encoder_cache.tenants(),
            "tenants": self._queue.stats(),
        }

    def check(self) -> None:
        """Assert the invariants of both caches, and that they agree with what the requests hold."""
        self._kv_cache.check()
        self._encoder_cache.check()
        self._encoder.check(self._open.values())
        self._state_cache.check()
        check_held(self._open.values(), self._kv_cache, self._encoder_cache)
        self._queue.check(self._open)
        check_running(self._open.values(), self._running, self.config.max_num_seqs)
