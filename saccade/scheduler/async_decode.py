"""What follows the plans that run can be foreseen before their tokens are known: whoever is given a token computes it.

step 7 runs:    A computes its token 40     B ends its prompt at 12      their next tokens are on the device alone
planned ahead:  A computes its token 41     B computes 13                whoever ends with step 7 computed one in vain

Prompts and pictures are not foreseen. They are planned beside it, when the tokens of step 7 are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.request import ScheduledRequest as Running
from saccade.types import ScheduledWindow, StepPlan


def samples_on_device(plans: Sequence[StepPlan], running: Iterable[Running]) -> bool:
    """Whether the device chooses tokens by itself, for all who run."""
    return bool(plans) and all(seq.samples_on_device for seq in running)


def can_fuse(ahead: frozenset[str], running: Iterable[Running], coming: Iterable[Running]) -> bool:
    """Whether prompts may ride along with the next decode step: it will be planned ahead, as far as can be said, and
    nobody is given a token beside the step that was."""
    served = all(seq.request_id in ahead or not seq.is_decoding for seq in running)
    return bool(ahead) and served and all(seq.samples_on_device and not seq.is_decoding for seq in coming)


def async_decode_windows(
    pool: BlockPool, plans: Iterable[StepPlan], open_requests: Mapping[str, Running]
) -> tuple[ScheduledWindow, ...]:
    """One more token for each request that a plan gives one and that does not surely end with it.

    Nothing if a block is missing.
    """
    windows: list[ScheduledWindow] = []
    lacking: list[tuple[int, Running]] = []  # who needs a block for it, and which work that is
    new, size = tuple.__new__, pool.block_size  # for many rows: a NamedTuple's own constructor takes twice as long
    for request_id, _, end, _, is_sampled, _ in chain.from_iterable([plan.windows for plan in plans]):
        seq = open_requests.get(request_id)
        if seq is None or not is_sampled or not seq.is_running:
            continue
        if seq.images_end > end or seq.num_tokens + 1 >= seq.max_total_tokens:
            continue
        if not end % size and end == len(seq.blocks) * size:
            lacking.append((len(windows), seq))
        windows.append(new(ScheduledWindow, (request_id, end, end + 1, (), True, ())))
    if not pool.can_allocate(len(lacking)):
        return ()
    for (index, seq), block in zip(lacking, pool.allocate(len(lacking)), strict=True):
        seq.blocks.append(block)
        request_id, start, end, *_ = windows[index]
        windows[index] = ScheduledWindow(request_id, start, end, (block,), True)
    return tuple(windows)
