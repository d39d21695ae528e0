"""Plans steps and commits their results: which request computes which window of its tokens, what it holds.

Owns the queues, the KV blocks and the encoder slots, as ids and counts. Has no clock; sees no tensor or text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

from saccade.errors import RequestError
from saccade.options.engine import SchedulerConfig
from saccade.scheduler.admission import Admitter
from saccade.scheduler.async_decode import async_decode_windows, can_fuse
from saccade.scheduler.budget import StepBudget, StepBuilder, StepOutcome, are_enough, demand_of
from saccade.scheduler.cache_log import CacheLog
from saccade.scheduler.encoder_cache import EncoderCache
from saccade.scheduler.encoder_failures import affected_requests
from saccade.scheduler.encoder_lookahead import encoded_ahead, missing_items, next_up, spans_ahead
from saccade.scheduler.encoder_scheduler import EncoderScheduler
from saccade.scheduler.fair_queue import FairQueue, ServingOrder
from saccade.scheduler.invariants import check_held, check_running
from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.kv_event_log import KVEventLog
from saccade.scheduler.preemption import Preemption
from saccade.scheduler.request import ScheduledRequest
from saccade.scheduler.request_validation import refuse_impossible, refuse_overload
from saccade.scheduler.running import RunningRequests
from saccade.scheduler.state_cache import StateCache
from saccade.scheduler.step_policy import StepLimits, make_policy
from saccade.scheduler.window_planner import WindowPlanner
from saccade.types.events import FinishReason, TokenEvent
from saccade.types.media import Key, MediaItem
from saccade.types.prompt import RECORD_BYTES
from saccade.types.request import Request
from saccade.types.step import Sample, StepPlan, StepResult

_CREDIT_STEPS = 8  # full steps that a tenant may claim later which could not use its share for a while
_NONE: frozenset[str] = frozenset()


class Scheduler:
    """schedule() -> the runner runs the plan -> commit(); add() and abort() between steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy = make_policy(config)
        self._kv_cache = BlockPool.of(config)
        self._encoder_cache = EncoderCache(config.encoder_cache_slots, config.keep_idle_embeddings)
        self._state_cache = StateCache(config.state_rows, config.block_size)
        self._encoder = EncoderScheduler.of(config, self._encoder_cache)
        self._queue = FairQueue(_CREDIT_STEPS * (config.max_num_batched_tokens + config.encoder_budget))
        self._open: dict[str, ScheduledRequest] = {}
        self._running = RunningRequests(config.max_num_seqs, self._kv_cache, self._encoder_cache)
        caches = (self._kv_cache, self._state_cache, self._encoder_cache)
        self._windows = WindowPlanner(*caches, self._encoder, self._queue)
        self._admitter = Admitter(self._queue, self._running, self._windows, *caches)
        self._preemption = Preemption(self._running, self._queue, self._encoder)
        self._plans: list[StepPlan] = []  # being run: one, or several with async scheduling
        self._outcome = StepOutcome()  # of the latest plan
        self._num_added = self._num_steps = 0

    # --- requests come and go -------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request; RequestError if it can never run or the queue is full."""
        if request.request_id in self._open:
            name = request.request_id
            raise RequestError(f"a request with the id {name!r} is already open; choose another id")
        refuse_overload(request.tenant, self._queue, len(self._running.in_order), self.config)
        refuse_impossible(request, self.config)
        prompt = request.prompt
        assert len(prompt.identity) == RECORD_BYTES * len(prompt), "identity and tokens differ in length"
        share = self._queue.join(request.tenant)
        keeps_whole = self.config.disable_chunked_mm_input
        seq = ScheduledRequest(
            request, self._num_added, now, self.config.block_size, share, keeps_images_whole=keeps_whole
        )
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
        self._running.tell_again(request_id for plan in plans for request_id in plan.freed_requests)
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
        return any(seq.is_decoding for seq in self._running.in_order)

    def fills_step(self) -> bool:
        """Whether the waiting requests fill the next step."""
        return are_enough(self._queue.all_waiting(), self.config)

    def has_image(self, key: Key) -> bool:
        """Its embeddings are resident, or the encoder is making them."""
        return key in self._encoder_cache

    def index(self) -> None:
        """Hash what was planned lately: for when the next plan is not waited for."""
        self._kv_cache.prefixes.enter_all()

    def log_caches(self) -> CacheLog:
        """From now on the changes of both caches are noted there."""
        log = self._encoder_cache.log = self._kv_cache.log_changes()
        return log

    def log_kv_events(self) -> KVEventLog:
        """From now on the changes of the prefix cache are noted there, with all tokens."""
        return self._kv_cache.log_events()

    # --- planning -------------------------------------------------------------------------------------------

    def schedule(
        self, now: float, *, latency_bounded: bool = True, not_ready: frozenset[str] = _NONE
    ) -> StepPlan:
        """Decide the next step: running requests first, then waiting ones, then images that come next.

        `not_ready`: requests that sit it out, since their grammar is being made.
        """
        plan = self._plan(now, latency_bounded, not_ready)
        assert plan is not None
        return plan

    def schedule_async_decode(self) -> StepPlan | None:
        """The next decode step, before the tokens of running steps are known; None where the host samples."""
        if self._outcome.needs_sync:
            self._outcome = self._outcome._replace(needs_sync=False)
            return None
        if not all(seq.samples_on_device for seq in self._running.in_order):
            return None
        windows = async_decode_windows(self._kv_cache, self._plans, self._open)
        return self._planned(decode=windows, encode_layers=0, kind="async_decode") if windows else None

    def schedule_async_prefill(
        self, now: float, *, latency_bounded: bool = True, not_ready: frozenset[str] = _NONE
    ) -> StepPlan | None:
        """Prefill and encoding beside an async decode step that runs; None when there is nothing to do."""
        (decode,) = self._plans
        decoding = frozenset([window.request_id for window in decode.decode])
        if self._open.keys() <= decoding and not self._encoder.is_busy:
            return None  # nearly every step of many decodes: nothing else is open or under way
        return self._plan(now, latency_bounded, not_ready, decoding)

    def _plan(
        self, now: float, bounded: bool, not_ready: frozenset[str], decoding: frozenset[str] = _NONE
    ) -> StepPlan | None:
        """`decoding`: requests whose decode runs already. None where nothing is to be done beside them."""
        self._queue.begin_step()
        seats = self._running.seats
        fuses = can_fuse(decoding, self._running.in_order, self._queue.first_waiting(seats))
        demand = demand_of(self._candidates(), self._num_steps, self._encoder, fuses, bounded, seats)
        limits = self.policy.limits(demand)
        budget = StepBudget(limits, demand)
        draft = StepBuilder(
            now, budget, self._outcome.lacks_blocks, not_ready, decoding, skip_decode=limits.skip_decode
        )
        self._kv_cache.host.begin_step(limits.max_restored_blocks)
        self._fill(draft, limits)
        moves = any((draft.has_windows, decoding, self._kv_cache.host.is_restoring))
        if limits.encode_layers is not None and not (moves or self._encoder_cache.slots_in_flight):
            # Waiting requests hold the cache space that a running one needs. Whole images go in.
            limits = limits._replace(encode_layers=None)
            self._queue.begin_step()
            self._fill(draft, limits)
        self._outcome = draft.outcome
        layers = self.policy.encode_layers(limits, demand, budget.num_prefills, self._encoder.own_load)
        ahead = next_up(self._candidates, self._kv_cache, self._encoder, limits)
        encodes = self._encoder.encode or (layers != 0 and self._encoder_cache.slots_in_flight > 0)
        if decoding and not any((draft.has_windows, draft.admitted, encodes, ahead.is_new)):
            return None
        fused = sum(window.end - window.start for window in draft.prefill)
        samples = any(window.samples for window in draft.windows)
        return self._planned(
            decode=tuple(draft.decode),
            prefill=tuple(draft.prefill),
            admitted=tuple(draft.admitted),
            encode=tuple(self._encoder.encode),
            encode_layers=layers,
            prefetch=ahead.prefetch,
            decode_first=ahead.decode_first,
            kind="async_prefill" if decoding else "sync",
            fuse_with_next=all((decoding, fused, not samples)) and self.policy.fuses(demand, fused),
        )

    def _planned(self, **parts: Any) -> StepPlan:
        self._num_steps += 1
        copies = self._kv_cache.drain_copies()
        parts["freed_requests"] = self._running.drain_freed()
        parts["evicted"] = self._encoder_cache.drain_evicted()
        parts["unwanted"] = self._encoder.drain_unwanted()
        plan = StepPlan(self._num_steps, *copies, **parts)
        self._plans.append(plan)
        return plan

    def _fill(self, draft: StepBuilder, limits: StepLimits) -> None:
        is_sliced = limits.encode_layers is not None
        self._encoder.begin_step(is_sliced, limits.max_encode_in_flight if is_sliced else None)
        self._preemption.make_way(draft, lambda seq: self._admitter.first_window(seq, draft) is not None)
        order = self._queue.serving_order(self._running.in_order)
        self._serve_running(draft, order.first, order)
        if order.later and not draft.is_short:
            self._admitter.admit_waiting(draft, before=order.later[0].share.rank)
            self._serve_running(draft, order.later, order)
        self._preemption.end_deadlock(draft)
        self._admitter.admit_waiting(draft)
        if is_sliced:
            is_shared = self._queue.num_tenants > 1
            images = encoded_ahead(self._candidates(), self._encoder) if is_shared else None
            self._encoder.look_ahead(spans_ahead(self._candidates(), self._kv_cache), images)

    def _candidates(self) -> Iterator[ScheduledRequest]:
        """Running requests, and as many waiting ones as could run at once."""
        return chain(self._running.in_order, self._queue.first_waiting(self.config.max_num_seqs))

    def _serve_running(self, draft: StepBuilder, queue: deque[ScheduledRequest], order: ServingOrder) -> None:
        """Serve a queue of `order`. A request that lacks blocks preempts those that come last, or itself."""
        while queue and draft.budget.total:
            seq = queue.popleft()
            if seq.request_id in draft.not_ready or (draft.skip_decode and seq.is_decoding):
                order.passed.append(seq)
                continue
            if seq.request_id in draft.async_decode:
                draft.budget.total -= 1
                continue
            if not seq.is_decoding and self._windows.waits_for_blocks(seq, draft):
                order.passed.append(seq)
                continue
            start = seq.num_computed
            limit = self._windows.limit(seq, start, draft)
            while not seq.has_blocks(self._kv_cache, limit.end):
                if draft.async_decode:  # a running step must keep its blocks; the step after it may preempt
                    draft.is_short = True
                    return
                if not self._preemption.free_blocks(draft, seq, order):
                    break
                limit = self._windows.limit(seq, start, draft)  # a victim's pins are gone now
            else:
                self._windows.advance(seq, start, limit, draft)
                if limit.end == start:
                    order.passed.append(seq)

    # --- committing -----------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float, seconds: float) -> list[TokenEvent]:
        """Take over what a step did. Returns one event for each request that has a new token or ended.

        `seconds`: from its plan to its result.
        """
        self._plans.remove(plan)
        self.policy.observe(plan, result, seconds)
        self._encoder.observe(result)
        for key in result.encoded:
            self._book_encoded(key, result)
        events = self._end_failed(plan, result, now) if result.failed else []
        self._state_cache.commit(plan.windows, self._open)
        is_left = (plan.encode_layers is None, plan.windows, self._encoder_cache.slots_in_flight)
        assert not all(is_left), "the step should have encoded everything, but something is still in flight"
        samples = result.samples
        self._queue.charge_outputs(samples, self._open)
        unsampled = result.unsampled
        block_size = self.config.block_size
        for window in plan.windows:
            request_id = window.request_id
            end = window.end
            seq = self._open.get(request_id)
            if seq is None:
                continue  # it ended with its image, or before an async decode step
            seq.num_computed = end
            if not end % block_size and end > seq.num_cached_blocks * block_size:
                seq.cache_blocks(self._kv_cache, end)  # async decode: its tokens were not known
            if self.config.reach is not None:
                seq.give_back_unread(self._kv_cache, self.config.reach)
            if seq.has_images_ahead:
                seq.unpin_computed(self._encoder_cache)
            if request_id in unsampled:
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
        return TokenEvent.going_on(seq.request_id, token, logprobs, of_prompt)

    def _end_failed(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        caches = (self._encoder_cache, self._kv_cache)
        affected = affected_requests(result.failed, plan, self._open, self._encoder, *caches)
        failing = [(self._open[name], error) for name, error in affected.items() if name in self._open]
        return [self._finish(seq, "error", now, error=error) for seq, error in failing]

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
            self._running.release(seq)
        return seq.last_event(reason, now, sample, error)

    # --- reporting ------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        pool = self._kv_cache.stats()
        return {
            "steps": self._num_steps,
            "running": len(self._running.in_order),
            "waiting": self._queue.num_waiting,
            "preemptions": self._preemption.count,
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
        check_running(self._open.values(), self._running.in_order, self.config.max_num_seqs)
