"""How one request gives its blocks to others and takes over theirs. Between a sequence and the block pool alone."""

from __future__ import annotations

from saccade.scheduler.blocks import BlockPool
from saccade.scheduler.sequence import Sequence


def adopt(pool: BlockPool, seq: Sequence, found: list[int]) -> None:
    """Blocks that were found behind a request's own become its own, computed already."""
    pool.share(found)
    seq.blocks += found
    seq.num_published = len(seq.blocks)
    seq.num_computed = len(seq.blocks) * pool.block_size


def catch_up(pool: BlockPool, seq: Sequence) -> None:
    """Take over blocks that someone with the same beginning has filled since this request was admitted.

    Two requests that prefill the same picture side by side so compute it once, each going on where the other is.
    """
    if seq.num_computed != len(seq.blocks) * pool.block_size:
        return
    found = pool.find(seq.chain, seq.num_tokens, first=len(seq.blocks))
    if not found:
        return
    adopt(pool, seq, found)
    seq.untold += found
    num_found = len(found) * pool.block_size
    pool.count_lookup(0, num_found)
    if not seq.num_preemptions:
        seq.cached_tokens += num_found


def publish(pool: BlockPool, seq: Sequence, end: int) -> None:
    """Offer the blocks that a window up to `end` fills to requests that begin alike."""
    num_full = end // pool.block_size
    for index in range(seq.num_published, num_full):
        pool.publish(seq.blocks[index], seq.chain, index)
    seq.num_published = num_full
