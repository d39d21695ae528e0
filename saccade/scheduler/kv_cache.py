"""The KV cache manager: which blocks of the device are used, idle or free, and which a new request can share.

Owns block ids and counts of users. `prefix_index.py` finds blocks again by what they hold.

    used:  in at least one block table          free + idle + used = all blocks
    idle:  in none, but cached; evicted last, least recently used first
    free:  in none, not cached

Where host memory has blocks too (`kv_host_cache.py`), evicted ones are copied there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from saccade.options.engine import SchedulerConfig
from saccade.scheduler.block_hashes import BlockHashes
from saccade.scheduler.cache_log import CacheLog
from saccade.scheduler.kv_event_log import KVEventLog
from saccade.scheduler.kv_host_cache import HostCache
from saccade.scheduler.prefix_index import CachedBlock, PrefixIndex
from saccade.types.step import KVCopy

_COPIED_AHEAD = 32  # blocks a plan, beside as many as it takes


class CachedPrefix(NamedTuple):
    """What a request need not compute, from some block on."""

    blocks: list[int]  # on the device
    num_restored: int = 0  # blocks after those that this step copies from host memory
    is_cut: bool = False  # more are there, for the next steps: until then it computes nothing

    @property
    def num_blocks(self) -> int:
        return len(self.blocks) + self.num_restored


class BlockPool:
    """Allocates blocks, counts their users and finds full blocks again."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool, host: HostCache) -> None:
        self.num_blocks = num_blocks
        self.host = host
        self.block_size = block_size
        self._enable_caching = enable_caching
        self._users = [0] * num_blocks
        self.prefixes = PrefixIndex(num_blocks, self._log_gain)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._uncopied: OrderedDict[int, None] = OrderedDict()  # idle, not in host memory; as ordered
        self._num_taken = 0  # since the last plan
        self._num_uncached = 0
        self._queries = self._hits = self._evictions = 0
        self.log: CacheLog | None = None
        self.events: KVEventLog | None = None

    @classmethod
    def of(cls, config: SchedulerConfig) -> BlockPool:
        host = HostCache.of(config)
        return cls(config.num_blocks, config.block_size, config.enable_prefix_caching, host)

    @property
    def num_available(self) -> int:
        """Blocks that can be given out: free ones, then idle ones."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- lookup ---------------------------------------------------------------------------------------------

    def find(self, hashes: BlockHashes, num_tokens: int, first: int = 0) -> list[int]:
        """Cached blocks, from number `first` on, of a request of `num_tokens`. Takes nothing.

        The last token is always left to compute, because the next one is sampled from it.
        """
        if not self._may_find(hashes):
            return []
        end = (num_tokens - 1) // self.block_size
        if first:  # in the middle, after the first block of what others may have pending
            self.prefixes.enter_all()
            return self.prefixes.match(hashes, first, end)
        if hashes.match_version != self._num_uncached:
            hashes.match = []
            hashes.match_version = self._num_uncached
        hashes.match += self.prefixes.match(hashes, len(hashes.match), end)  # in every step while it waits
        return hashes.match[:end]

    def _may_find(self, hashes: BlockHashes) -> bool:
        return self._enable_caching and hashes.may_find

    def has_prefix(self, hashes: BlockHashes, end: int, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` would probably find all positions before `end`.

        Goes on where it was last looked up, and stops at the first block that is missing: hashes no further.
        """
        last = (end - 1) // self.block_size
        if not self._may_find(hashes) or last >= (num_tokens - 1) // self.block_size:
            return False
        first = min(max(hashes.num_known - 1, 0), last)
        digests = map(hashes.digest, range(first, last + 1))
        return all(self.prefixes.get(digest) or digest in self.host.index.by_digest for digest in digests)

    def find_prefix(self, hashes: BlockHashes, num_tokens: int, first: int = 0) -> CachedPrefix:
        """As `find`, and what host memory has after that, as far as this step may restore it."""
        blocks = self.find(hashes, num_tokens, first)
        count = self.count_offloaded(hashes, num_tokens, first + len(blocks))
        now = self.host.restorable(count)
        return CachedPrefix(blocks) if now is None else CachedPrefix(blocks, now, is_cut=now < count)

    def count_offloaded(self, hashes: BlockHashes, num_tokens: int, first: int) -> int:
        """Blocks from number `first` on that can be restored from host memory."""
        if not self.host.num_blocks or not hashes.may_find:
            return 0
        end = (num_tokens - 1) // self.block_size
        return len(self.host.index.match(hashes, first, end))

    def count_lookup(self, num_tokens: int, num_cached: int) -> None:
        """Once per admission, so that a request tried at every step counts once."""
        self._queries += num_tokens
        self._hits += num_cached

    def cache_blocks(self, blocks: Sequence[int], hashes: BlockHashes, first: int) -> None:
        """Cache a request's blocks from number `first` on, when the window that fills them is planned.

        So requests of one step share them: the runner writes a layer's KV of all windows before any attends.
        """
        if self._enable_caching:
            self.prefixes.add(blocks, hashes, first)

    def evict(self, block: int) -> None:
        """Remove a block from the cache: its content never became valid."""
        self.prefixes.enter_all()
        self._uncache(block)

    def _uncache(self, block: int) -> None:
        cached = self.prefixes.by_block[block]
        if cached is None:
            return
        self.prefixes.remove(cached)
        self._log_loss(cached.digest)
        if self.events is not None:
            self.events.removed("GPU", cached.digest)
        self._num_uncached += 1
        if block in self._idle:
            del self._idle[block]
            self._uncopied.pop(block, None)
            self._free.append(block)

    # --- logs -----------------------------------------------------------------------------------------------

    def log_changes(self) -> CacheLog:
        """From now on, the digests that are gained and lost, on the device and in host memory together."""
        log = self.log = CacheLog()
        self.host.on_evict = self._log_loss
        return log

    def log_events(self) -> KVEventLog:
        """From now on, every block that is stored or removed, with its tokens."""
        log = self.events = self.host.events = KVEventLog()
        return log

    def _log_gain(self, cached: CachedBlock, hashes: BlockHashes, index: int) -> None:
        if self.log is not None:
            self.log.add(cached.digest)
        if self.events is not None:
            parent = cached.parent if index else None
            self.events.stored(parent, cached.digest, hashes.token_ids(index), cached.records)

    def _log_loss(self, digest: bytes) -> None:
        if self.log is None or digest in self.prefixes.by_digest or digest in self.host.index.by_digest:
            return
        self.log.remove(digest)

    # --- allocation -----------------------------------------------------------------------------------------

    def can_allocate(self, count: int, shared: Sequence[int] = ()) -> bool:
        """Whether `count` blocks can be allocated beside cached ones, which are shared then."""
        spare = self.num_available - count
        return spare >= len(shared) or spare >= sum(not self._users[block] for block in shared)

    def share(self, blocks: Sequence[int]) -> None:
        """One more user of cached blocks."""
        for block in blocks:
            if not self._users[block]:
                del self._idle[block]
                self._uncopied.pop(block, None)
            self._users[block] += 1

    def allocate(self, count: int) -> tuple[int, ...]:
        assert count <= self.num_available, f"{count} blocks asked for, {self.num_available} available"
        return tuple([self._take() for _ in range(count)])

    def release(self, blocks: Sequence[int]) -> None:
        """One user less. The tail goes idle before the head, so a prefix outlives what followed it."""
        self.prefixes.enter_all()
        users = self._users
        for block in reversed(blocks):
            users[block] -= 1
            if users[block]:
                continue
            cached = self.prefixes.by_block[block]
            if cached is None:
                self._free.append(block)
                continue
            self._idle[block] = None
            if self.host.num_blocks and cached.digest not in self.host.index.by_digest:
                self._uncopied[block] = None

    def restore(self, hashes: BlockHashes, first: int, count: int) -> tuple[int, ...]:
        """Allocate blocks that the next plan fills from host memory, and cache them."""
        digests = [hashes.digest(index) for index in range(first, first + count)]
        self.host.pin(digests)
        blocks = self.allocate(count)
        self.host.restore(digests, blocks)
        self.cache_blocks(blocks, hashes, first)
        return blocks

    def drain_copies(self) -> tuple[tuple[KVCopy, ...], tuple[KVCopy, ...]]:
        """Blocks that the plan being made copies to host memory, and from there.

        Blocks that are evicted next are copied ahead, a few in each step that restores none. So a long prompt
        finds blocks that it may overwrite at once.
        """
        if not self.host.num_blocks:
            return (), ()
        num_copied = self.num_available - len(self._uncopied)
        count = min(self.host.num_ahead - num_copied, self._num_taken + _COPIED_AHEAD)
        if count > 0 and not self.host.is_restoring:
            for block in tuple(islice(self._uncopied, count)):
                self._offload(block)
        self._num_taken = 0
        return self.host.drain()

    def _offload(self, block: int) -> None:
        cached = self.prefixes.by_block[block]
        assert cached is not None, "a block is idle that is not cached"
        self._uncopied.pop(block, None)
        self.host.offload(cached)

    def reset(self) -> None:
        """Empty the cache, and what host memory has of it."""
        for block in range(self.num_blocks):
            self.evict(block)
        self.host.reset()
        if self.log is not None:
            self.log.reset()
        if self.events is not None:
            self.events.clear()

    def _take(self) -> int:
        if not self._free:
            block = next(iter(self._idle))
            self._offload(block)
            self._uncache(block)
            self._evictions += 1
        self._num_taken += 1
        block = self._free.pop()
        self.host.cancel(block)
        self._users[block] = 1
        return block

    # --- reporting ------------------------------------------------------------------------------------------

    def users(self) -> dict[int, int]:
        """Counts by block, of those that have any."""
        return {block: users for block, users in enumerate(self._users) if users}

    def stats(self) -> dict[str, int]:
        return {
            "total": self.num_blocks,
            "used": self.num_blocks - self.num_available,
            "idle": len(self._idle),
            "free": len(self._free),
            "queries": self._queries,
            "hits": self._hits,
            "evictions": self._evictions,
        }

    def check(self) -> None:
        """The invariants."""
        self.host.check()
        self.prefixes.check()
        free = set(self._free)
        idle = set(self._idle)
        in_use = self.users().keys()
        assert len(free) == len(self._free), "a block is free twice"
        count = len(free) + len(idle) + len(in_use)
        assert count == len(free | idle | in_use), "a block is in two states"
        assert count == self.num_blocks, "a block is lost"
        assert min(self._users, default=0) >= 0, "a block has fewer than no users"
        findable = {cached.block for cached in self.prefixes.by_digest.values()}
        assert idle <= findable, "an idle block cannot be found"
        assert not free & findable, "a free block can be found"
        assert self._uncopied.keys() <= idle, "a block waits for its copy that is not idle"
