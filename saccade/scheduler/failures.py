"""Whom a picture that cannot be had takes along, and what must not be found in the prefix cache after it."""

from __future__ import annotations

from collections.abc import Mapping

from saccade.errors import RequestError
from saccade.scheduler.encoder_cache import EncoderCache
from saccade.scheduler.encoder_scheduler import EncoderScheduler
from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.request import ScheduledRequest
from saccade.types import Key, StepPlan

Affected = dict[str, RequestError]


def affected_requests(
    failed: Mapping[Key, RequestError],
    plan: StepPlan,
    open_requests: Mapping[str, ScheduledRequest],
    encoder_scheduler: EncoderScheduler,
    encoder: EncoderCache,
    pool: BlockPool,
) -> Affected:
    """The requests that asked for a failed picture, entered it, or share blocks with one that entered it."""
    doomed: Affected = {}
    bad_from: dict[str, int] = {}  # position from which a request's window holds nothing valid
    for key, reason in failed.items():
        error = RequestError(reason.message, code=reason.code, param=reason.param, key=key)
        doomed.setdefault(encoder_scheduler.pop_requester(key), error)
        for request_id, index in encoder.failed(key):
            doomed.setdefault(request_id, error)
            seq = open_requests[request_id]
            seq.held.remove(index)
            bad_from[request_id] = min(bad_from.get(request_id, seq.num_tokens), seq.spans[index].start)
    _uncache_spoiled(plan, open_requests, pool, doomed, bad_from)
    return doomed


def _uncache_spoiled(
    plan: StepPlan,
    open_requests: Mapping[str, ScheduledRequest],
    pool: BlockPool,
    doomed: Affected,
    bad_from: dict[str, int],
) -> None:
    """Make unfindable what this plan published and never wrote; who found it in the same step is doomed as well."""
    spoiled: dict[int, RequestError] = {}
    for work in plan.windows:  # who shares a block comes after the one that was to fill it
        seq = open_requests.get(work.request_id)
        if seq is None:
            continue  # ended with the step before, when this one was planned already
        shared = next((block for block in seq.blocks if block in spoiled), None)
        if shared is not None:
            doomed.setdefault(work.request_id, spoiled[shared])
            bad_from[work.request_id] = work.start
        if work.request_id in bad_from:
            first = max(work.start, bad_from[work.request_id]) // pool.block_size
            for block in seq.blocks[first:]:
                pool.evict(block)
                spoiled[block] = doomed[work.request_id]
