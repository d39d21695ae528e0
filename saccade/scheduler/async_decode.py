"""Asynchronous scheduling: plan the next decode step before the current one's tokens are known.

step 7 runs:    A computes token 40    B ends its prompt at 12    their next tokens are on the device alone
async decode:   A computes token 41    B computes 13              one that ends with step 7 decodes in vain

Every request that samples now decodes next. Prefill and images are planned beside it, once tokens are known.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.request import OpenRequests, ScheduledRequest
from saccade.types.step import ScheduledWindow, StepPlan


def can_fuse(
    decoding: frozenset[str], running: Iterable[ScheduledRequest], newcomers: Iterable[ScheduledRequest]
) -> bool:
    """Whether prefill may be fused with the next decode step: only `decoding` decode, all on the device."""
    if not decoding:
        return False
    if any(seq.is_decoding for seq in running if seq.request_id not in decoding):
        return False
    return all(seq.samples_on_device and not seq.is_decoding for seq in newcomers)


def async_decode_windows(
    pool: BlockPool, plans: Iterable[StepPlan], open_requests: OpenRequests
) -> tuple[ScheduledWindow, ...]:
    """A token for each request that samples in a plan and may go on; nothing if a block is missing."""
    windows: list[ScheduledWindow] = []
    lacking: list[tuple[int, ScheduledRequest]] = []  # by index in `windows`: requests that need a block
    size = pool.block_size
    for window in chain.from_iterable(plan.windows for plan in plans):
        end = window.end
        seq = open_requests.get(window.request_id)
        if seq is None or not window.samples or not seq.is_running:
            continue
        if seq.images_end > end or seq.num_tokens + 1 >= seq.max_total_tokens:
            continue
        if end == len(seq.blocks) * size:
            lacking.append((len(windows), seq))
        windows.append(ScheduledWindow(window.request_id, end, end + 1, (), True))
    if not pool.can_allocate(len(lacking)):
        return ()
    for (index, seq), block in zip(lacking, pool.allocate(len(lacking)), strict=True):
        seq.blocks.append(block)
        windows[index] = windows[index]._replace(new_blocks=(block,))
    return tuple(windows)
