"""How a request comes by blocks, gives its own to others and takes over theirs. Knows a sequence and the pool alone."""

from __future__ import annotations

from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.request import ScheduledRequest


def has_blocks(pool: BlockPool, seq: ScheduledRequest, end: int) -> bool:
    """Whether a running request has blocks up to `end` or can be given them."""
    num_held = len(seq.blocks)
    return end <= num_held * pool.block_size or pool.can_allocate(pool.blocks_for(end) - num_held)


def attach_cached_blocks(pool: BlockPool, seq: ScheduledRequest, found: list[int]) -> None:
    """Blocks that were found behind a request's own become its own, computed already."""
    pool.share(found)
    seq.blocks += found
    seq.num_published = len(seq.blocks)
    seq.num_computed = len(seq.blocks) * pool.block_size


def rematch_prefix(pool: BlockPool, seq: ScheduledRequest) -> bool:
    """Take over blocks that someone with the same beginning has filled since this request was admitted.

    Two requests that prefill the same picture side by side so compute it once, each going on where the other is. A
    block that this request had filled in part is exchanged for the full one, so its table must be told anew.
    """
    first = seq.num_computed // pool.block_size
    found = pool.find(seq.chain, seq.num_tokens, first=first)
    if not found:
        return False
    pool.release(seq.blocks[first:])
    del seq.blocks[first:]
    num_before = seq.num_computed
    attach_cached_blocks(pool, seq, found)
    pool.count_lookup(0, seq.num_computed - num_before)
    if not seq.num_preemptions:
        seq.cached_tokens += seq.num_computed - num_before
    return True


def cache_blocks(pool: BlockPool, seq: ScheduledRequest, end: int) -> None:
    """Offer the blocks that a window up to `end` fills to requests that begin alike."""
    num_full = end // pool.block_size
    pool.cache_blocks(seq.blocks[seq.num_published : num_full], seq.chain, seq.num_published)
    seq.num_published = num_full
