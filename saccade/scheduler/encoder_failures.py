"""When encoding an image fails: which requests fail with it, and which cached blocks must be evicted."""

from __future__ import annotations

from collections.abc import Mapping

from saccade.errors import RequestError
from saccade.scheduler.encoder_cache import EncoderCache
from saccade.scheduler.encoder_scheduler import EncoderScheduler
from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.request import OpenRequests
from saccade.types.media import Key
from saccade.types.step import StepPlan

Affected = dict[str, RequestError]


def affected_requests(
    failed: Mapping[Key, RequestError],
    plan: StepPlan,
    open_requests: OpenRequests,
    encoder_scheduler: EncoderScheduler,
    encoder: EncoderCache,
    pool: BlockPool,
) -> Affected:
    """The requests that asked for a failed image, entered it, or share blocks with one that entered it."""
    affected: Affected = {}
    bad_from: dict[str, int] = {}  # position from which a request's window holds nothing valid
    for key, reason in failed.items():
        error = RequestError(reason.message, code=reason.code, param=reason.param, key=key)
        affected.setdefault(encoder_scheduler.pop_requester(key), error)
        for request_id, index in encoder.failed(key):
            affected.setdefault(request_id, error)
            seq = open_requests[request_id]
            seq.pins.remove(index)
            bad_from[request_id] = min(bad_from.get(request_id, seq.num_tokens), seq.spans[index].start)
    _evict_unwritten(plan, open_requests, pool, affected, bad_from)
    return affected


def _evict_unwritten(
    plan: StepPlan, open_requests: OpenRequests, pool: BlockPool, affected: Affected, bad_from: dict[str, int]
) -> None:
    """Evict what this plan cached and never wrote; a request that found it in the same step fails as well."""
    unwritten: dict[int, RequestError] = {}
    for window in plan.windows:  # a request that shares a block comes after the one that was to fill it
        seq = open_requests.get(window.request_id)
        if seq is None:
            continue  # ended with the step before, when this one was planned already
        shared = next((block for block in seq.held_blocks if block in unwritten), None)
        if shared is not None:
            affected.setdefault(window.request_id, unwritten[shared])
            bad_from[window.request_id] = window.start
        if window.request_id in bad_from:
            first = max(window.start, bad_from[window.request_id]) // pool.block_size
            for block in seq.blocks[first:]:
                pool.evict(block)
                unwritten[block] = affected[window.request_id]
