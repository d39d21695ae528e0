"""The step after one that only decodes can be planned before its tokens are known: everyone computes one more.

step 7 runs:     A computes its token 40      B computes 12       their next tokens are on the device alone
planned ahead:   A computes its token 41      B computes 13       whoever ends with step 7 computed one in vain
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saccade.scheduler.blocks import BlockPool
from saccade.scheduler.sequence import Sequence as Running
from saccade.types import StepPlan, Work


def only_decodes(plan: StepPlan, running: Sequence[Running]) -> bool:
    """Whether a plan has one token of every running request and nothing else, each to be the likeliest one."""
    if plan.encode or len(plan.works) < len(running):
        return False
    return all(seq.request.params.is_plain and not seq.has_pictures_ahead for seq in running) and all(
        work.samples and work.end - work.start == 1 for work in plan.works
    )


def works_ahead(pool: BlockPool, plan: StepPlan, open_requests: Mapping[str, Running]) -> tuple[Work, ...]:
    """One more token for each request of the plan that does not surely end with it. Nothing if a block is missing."""
    going_on = [
        (work, seq)
        for work in plan.works
        if (seq := open_requests.get(work.request_id)) and len(seq.output) + 1 < seq.request.max_tokens
    ]
    lacking = [seq for work, seq in going_on if work.end >= len(seq.blocks) * pool.block_size]
    if not going_on or not pool.can_give(len(lacking)):
        return ()
    return tuple(_next(pool, work, seq) for work, seq in going_on)


def _next(pool: BlockPool, work: Work, seq: Running) -> Work:
    new_blocks: tuple[int, ...] = ()
    if work.end >= len(seq.blocks) * pool.block_size:
        new_blocks = pool.allocate(1)
        seq.blocks.extend(new_blocks)
    return Work(work.request_id, work.end, work.end + 1, new_blocks, samples=True)
