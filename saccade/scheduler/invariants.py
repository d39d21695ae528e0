"""Invariants between requests and the two caches, asserted after every step of random workloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from saccade.scheduler.encoder_cache import EncoderCache
from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.request import OpenRequests, ScheduledRequest

Queue = Sequence[ScheduledRequest]


def check_holdings(open_requests: OpenRequests, pool: BlockPool, encoder: EncoderCache) -> None:
    """Each cache counts as many users as there are."""
    users = Counter(block for seq in open_requests.values() for block in seq.blocks)
    assert all(pool.users(block) == users[block] for block in range(pool.num_blocks)), "users miscounted"
    holders = {seq.holder(index) for seq in open_requests.values() for index in seq.held}
    assert holders == encoder.holders(), "pins miscounted"


def check_queues(open_requests: OpenRequests, running: Queue, waiting: Queue, block_size: int) -> None:
    """Each open request is in one queue. Waiting ones hold nothing, running ones the blocks they need."""
    in_queues = sorted((*running, *waiting), key=lambda seq: seq.order)
    assert sorted(open_requests.values(), key=lambda seq: seq.order) == in_queues
    assert not any(seq.blocks or seq.held for seq in waiting), "a waiting request holds something"
    needed = (seq.spans[index].pinned_until > seq.num_computed for seq in running for index in seq.held)
    assert all(needed), "embeddings are pinned that no window will read"
    has_blocks = (seq.num_computed <= len(seq.blocks) * block_size for seq in running)
    assert all(has_blocks), "computed without a block"
