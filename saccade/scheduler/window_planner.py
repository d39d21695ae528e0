"""A request's window of a step: how far it may go, and which blocks, pins and checkpoints it takes."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.scheduler.budget import StepBuilder
from saccade.scheduler.encoder_cache import EncoderCache
from saccade.scheduler.encoder_scheduler import EncoderScheduler, WindowLimit
from saccade.scheduler.fair_queue import FairQueue
from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.request import ScheduledRequest
from saccade.scheduler.state_cache import StateCache
from saccade.types.step import Admission, ScheduledWindow


@dataclass(slots=True, eq=False)
class WindowPlanner:
    _kv_cache: BlockPool
    _state_cache: StateCache
    _encoder_cache: EncoderCache
    _encoder: EncoderScheduler
    _queue: FairQueue

    def limit(self, seq: ScheduledRequest, start: int, draft: StepBuilder) -> WindowLimit:
        """How far the tokens and the encoder of this step let it go. Takes nothing."""
        left = draft.budget.left_for(seq, start)
        end = min(seq.num_tokens, start + left)
        if left > 0:
            end = seq.uncut(start, end)
        if not seq.has_images_ahead:
            return WindowLimit(end, ())
        limit = self._encoder.window_limit(seq, start, end)
        if limit.end < end:
            return limit._replace(end=seq.before_whole(start, limit.end))
        return limit

    def waits_for_blocks(self, seq: ScheduledRequest, draft: StepBuilder) -> bool:
        """Take what others with the same prefix have filled since it was admitted.

        True where more of that comes from host memory in the next steps: until then it computes nothing.
        """
        if self._state_cache.is_needed:
            return False
        prefix = seq.rematch_prefix(self._kv_cache)
        if prefix.num_blocks:
            seq.unpin_computed(self._encoder_cache)
            self.tell_runner(seq, draft)
        return prefix.is_cut

    def tell_runner(self, seq: ScheduledRequest, draft: StepBuilder) -> None:
        """It is admitted, or its table of blocks is another one."""
        state = self._state_cache.checkpoint_after(seq.hashes, len(seq.blocks))
        draft.admitted.append(Admission(seq.request, tuple(seq.output), tuple(seq.blocks), state))

    def advance(self, seq: ScheduledRequest, start: int, limit: WindowLimit, draft: StepBuilder) -> None:
        """A window; or some images alone, where one token attends to more than a step may encode."""
        if limit.spans:
            self._encoder.enter(seq, limit.spans)
        if limit.end > start:
            self._add_window(seq, start, limit.end, draft)

    def _add_window(self, seq: ScheduledRequest, start: int, end: int, draft: StepBuilder) -> None:
        block_size = self._kv_cache.block_size
        new_blocks: tuple[int, ...] = ()
        if end > len(seq.blocks) * block_size:
            new_blocks = self._kv_cache.allocate(self._kv_cache.blocks_for(end) - len(seq.blocks))
            seq.blocks.extend(new_blocks)
        if end >= (seq.num_cached_blocks + 1) * block_size:
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
