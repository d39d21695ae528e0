"""What follows the plans that run can be foreseen before their tokens are known: whoever is given a token computes it.

step 7 runs:    A computes its token 40     B ends its prompt at 12      their next tokens are on the device alone
planned ahead:  A computes its token 41     B computes 13                whoever ends with step 7 computed one in vain

Prompts and pictures are not foreseen. They are planned beside it, when the tokens of step 7 are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from saccade.scheduler.blocks import BlockPool
from saccade.scheduler.sequence import Sequence as Running
from saccade.types import StepPlan, Work


def is_foreseeable(plans: Sequence[StepPlan], running: Iterable[Running]) -> bool:
    """Whether the device chooses tokens by itself, for all who run."""
    return bool(plans) and all(seq.request.params.is_foreseeable for seq in running)


def works_ahead(pool: BlockPool, plans: Iterable[StepPlan], open_requests: Mapping[str, Running]) -> tuple[Work, ...]:
    """One more token for each request that a plan gives one and that does not surely end with it.

    Nothing if a block is missing.
    """
    going_on = [
        (work, seq)
        for plan in plans
        for work in plan.works
        if work.samples and (seq := open_requests.get(work.request_id)) and _goes_on(work, seq)
    ]
    lacking = [seq for work, seq in going_on if work.end >= len(seq.blocks) * pool.block_size]
    if not going_on or not pool.can_give(len(lacking)):
        return ()
    return tuple(_next(pool, work, seq) for work, seq in going_on)


def _goes_on(work: Work, seq: Running) -> bool:
    is_done_with_pictures = not seq.spans or seq.spans[-1].needed_to <= work.end
    return seq.is_running and is_done_with_pictures and len(seq.output) + 1 < seq.request.max_tokens


def _next(pool: BlockPool, work: Work, seq: Running) -> Work:
    new_blocks: tuple[int, ...] = ()
    if work.end >= len(seq.blocks) * pool.block_size:
        new_blocks = pool.allocate(1)
        seq.blocks.extend(new_blocks)
    return Work(work.request_id, work.end, work.end + 1, new_blocks, samples=True)
