"""The KV cache manager: block allocation, reference counts and prefix caching by chained block hashes.

Owns block ids and hashes only. A position's record says which token or image row stands there.

    used:  in at least one block table          free + idle + used = all blocks
    idle:  in none, but cached; evicted last, least recently used first
    free:  in none, not cached

Where host memory has blocks too (`kv_host_cache.py`), evicted ones are copied there.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from saccade.options.engine import SchedulerConfig
from saccade.scheduler.cache_log import CacheLog
from saccade.scheduler.kv_event_log import KVEventLog
from saccade.scheduler.kv_host_cache import HostCache
from saccade.types.prompt import RECORD_BYTES
from saccade.types.step import KVCopy

_COPIED_AHEAD = 32  # blocks a plan, beside as many as it takes
_TEXT_RECORD = "32xQ"  # zeros where a media record has its content key, then the token id


def text_records(token_ids: Sequence[int]) -> bytes:
    """The records of generated tokens, in the layout of `Prompt.identity`."""
    return struct.pack("<" + _TEXT_RECORD * len(token_ids), *token_ids)


class BlockHashes:
    """The digests of one request's blocks: digest i covers every position up to the end of block i.

    Hashed on demand and once: a prompt that misses early is not hashed to its end, and a decode step hashes
    only when a block fills.
    """

    def __init__(
        self,
        identity: bytes,
        salt: bytes,
        block_size: int,
        generated: Sequence[int],
        prompt_ids: Sequence[int] = (),
        *,
        may_find: bool = True,  # False: every prompt token is to be computed, so nothing cached is found
    ) -> None:
        self._identity = identity
        self._prompt_ids = prompt_ids  # only `token_ids` needs them
        self._generated = generated  # the request's own list, which grows as it decodes
        self._may_find = may_find
        self._width = block_size * RECORD_BYTES
        self._digests = [hashlib.sha256(salt).digest()]  # the root: other salts share nothing
        self.found: list[int] = []  # the latest lookup, kept by the pool
        self.found_at = 0  # evictions of the pool by then: the lookup is valid until the next one

    @property
    def may_find(self) -> bool:
        """After the first token, one that was preempted finds what it has computed."""
        return self._may_find or bool(self._generated)

    @property
    def num_known(self) -> int:
        """Blocks that are hashed."""
        return len(self._digests) - 1

    def digest(self, index: int) -> bytes:
        """Of block `index`; of -1 the root."""
        digests = self._digests
        if index + 1 >= len(digests):
            digest = digests[-1]
            for records in self.iter_records(len(digests) - 1, index + 1):
                digest = hashlib.sha256(digest + records).digest()
                digests.append(digest)
        return digests[index + 1]

    def all_digests(self, count: int) -> list[bytes]:
        """Of the first `count` blocks."""
        self.digest(count - 1)
        return self._digests[1 : count + 1]

    def content(self, index: int) -> tuple[bytes, bytes]:
        """Digest and records of block `index`, where that of the block before it is known."""
        digests = self._digests
        records = self.records(index)
        if index + 1 == len(digests):
            digests.append(hashlib.sha256(digests[index] + records).digest())
        return digests[index + 1], records

    def extend(self, first: int, digests: Sequence[bytes]) -> None:
        """Digests from block `first` on, known from cached blocks with the same records and parents."""
        self._digests += digests[self.num_known - first :]

    def iter_records(self, first: int, end: int) -> Iterator[bytes]:
        """The records of blocks `first` to `end`, one after the other."""
        identity = self._identity
        width = self._width
        inside = min(end, len(identity) // width)
        for start in range(first * width, inside * width, width):
            yield identity[start : start + width]
        for index in range(max(first, inside), end):
            yield self.records(index)

    def records(self, index: int) -> bytes:
        """The records of block `index`, which must be full."""
        start = index * self._width
        end = start + self._width
        records = self._identity[start:end]
        if len(records) == self._width:
            return records
        first = max(0, start - len(self._identity)) // RECORD_BYTES
        return records + text_records(self._generated[first : (end - len(self._identity)) // RECORD_BYTES])

    def token_ids(self, index: int) -> list[int]:
        """Of block `index`, which must be full; an image's are placeholders."""
        block_size = self._width // RECORD_BYTES
        start = index * block_size
        ids = list(self._prompt_ids[start : start + block_size])
        if len(ids) < block_size:
            first = max(0, start - len(self._prompt_ids))
            ids += self._generated[first : first + block_size - len(ids)]
        return ids


class CachedBlock(NamedTuple):
    """A full block that can be found by its digest."""

    block: int  # on the device, or in host memory
    parent: bytes  # digest of the block before it
    digest: bytes
    records: bytes


Index = Mapping[bytes, CachedBlock]
Lookup = Callable[[bytes], CachedBlock | None]


class CachedPrefix(NamedTuple):
    """What a request need not compute, from some block on."""

    blocks: list[int]  # on the device
    num_restored: int = 0  # blocks after those that this step copies from host memory
    is_cut: bool = False  # more are there, for the next steps: until then it computes nothing

    @property
    def num_blocks(self) -> int:
        return len(self.blocks) + self.num_restored


class _PendingBlocks(NamedTuple):
    """Blocks of a request that are cached from now on, but not all hashed yet."""

    blocks: tuple[int, ...]
    hashes: BlockHashes
    first: int  # number of the first one in its request


class BlockPool:
    """Allocates blocks, counts their users and finds full blocks again by digest.

    Hashing a long prompt takes as long as launching it, so of the blocks that a step caches only the first is
    hashed at once. The others are pending under its digest:

        cached       |0|1|2|3|4|       a lookup of 0 enters all five into the index
        in the index  .

    They are entered when a lookup finds the first one, when blocks are released, or when there is time
    (`index`). A lookup comes through the blocks before, so the result is as if all were hashed at once.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_caching: bool, host: HostCache | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.host = host or HostCache(0)
        self.block_size = block_size
        self._enable_caching = enable_caching
        self._users = [0] * num_blocks
        self._cached: list[CachedBlock | None] = [None] * num_blocks  # by block
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._successor: dict[bytes, CachedBlock] = {}  # by digest of a block: its latest cached successor
        self._pending: dict[bytes, list[_PendingBlocks]] = {}  # not in the two above yet; by first digest
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
        if not self._enable_caching or not hashes.may_find:
            return []
        end = (num_tokens - 1) // self.block_size
        if first:  # in the middle, after the first block of what others may have pending
            self.index()
            return self._match(hashes, first, end, self._successor, self._lookup)
        if hashes.found_at != self._num_uncached:
            hashes.found = []
            hashes.found_at = self._num_uncached
        # Asked in every step while it waits.
        hashes.found += self._match(hashes, len(hashes.found), end, self._successor, self._lookup)
        return hashes.found[:end]

    def _match(
        self, hashes: BlockHashes, first: int, end: int, successor: Index, lookup: Lookup
    ) -> list[int]:
        """Blocks from number `first` on that an index has: by the latest successor of each, or by digest."""
        parent = hashes.digest(first - 1)
        matched: list[CachedBlock] = []
        for records in hashes.iter_records(first, end):
            cached = successor.get(parent)
            if cached is None or cached.records != records:  # not the latest successor: look it up by hash
                hashes.extend(first, [cached.digest for cached in matched])
                cached = lookup(hashes.digest(first + len(matched)))
                if cached is None or cached.records != records:
                    break
            matched.append(cached)
            parent = cached.digest
        hashes.extend(first, [cached.digest for cached in matched])
        return [cached.block for cached in matched]

    def has_prefix(self, hashes: BlockHashes, end: int, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` would probably find all positions before `end`.

        Goes on where it was last looked up, and stops at the first block that is missing: hashes no further.
        """
        last = (end - 1) // self.block_size
        is_possible = self._enable_caching and hashes.may_find
        if not is_possible or last >= (num_tokens - 1) // self.block_size:
            return False
        first = min(max(hashes.num_known - 1, 0), last)
        digests = map(hashes.digest, range(first, last + 1))
        return all(self._lookup(digest) is not None or digest in self.host.by_digest for digest in digests)

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
        return len(self._match(hashes, first, end, self.host.successor, self.host.by_digest.get))

    def _lookup(self, digest: bytes) -> CachedBlock | None:
        if digest in self._pending:
            self._enter(digest)
        return self._by_digest.get(digest)

    def count_lookup(self, num_tokens: int, num_found: int) -> None:
        """Once per admission, so that a request tried at every step counts once."""
        self._queries += num_tokens
        self._hits += num_found

    def cache_blocks(self, blocks: Sequence[int], hashes: BlockHashes, first: int) -> None:
        """Cache a request's blocks from number `first` on, when the window that fills them is planned.

        So requests of one step share them: the runner writes a layer's KV of all windows before any attends.
        """
        if not self._enable_caching:
            return
        index = first
        end = first + len(blocks)
        while index < end and hashes.digest(index) in self._by_digest:  # equal blocks are cached, and stay
            index += 1
        if index < end:
            pending = _PendingBlocks(tuple(blocks[index - first :]), hashes, index)
            self._pending.setdefault(hashes.digest(index), []).append(pending)

    def index(self) -> None:
        """Hash all pending blocks and enter them into the index."""
        for digest in tuple(self._pending):
            self._enter(digest)

    def _enter(self, digest: bytes) -> None:
        """Pending blocks that begin with this one, and those that begin with one of theirs."""
        pending = self._pending.pop(digest, [])
        for blocks, hashes, first in pending:  # grows meanwhile
            parent = hashes.digest(first - 1)
            for index, block in enumerate(blocks, first):
                digest, records = hashes.content(index)
                if digest not in self._by_digest:  # the first of two equal blocks stays the one that is found
                    cached = CachedBlock(block, parent, digest, records)
                    self._by_digest[digest] = self._successor[parent] = self._cached[block] = cached
                    if self.log is not None:
                        self.log.add(digest)
                    if self.events is not None:
                        before = parent if index else None
                        self.events.stored(before, digest, hashes.token_ids(index), records)
                pending += self._pending.pop(digest, ())
                parent = digest

    def evict(self, block: int) -> None:
        """Remove a block from the cache: its content never became valid."""
        self.index()
        self._uncache(block)

    def _uncache(self, block: int) -> None:
        cached = self._cached[block]
        if cached is None:
            return
        del self._by_digest[cached.digest]
        self._log_loss(cached.digest)
        if self.events is not None:
            self.events.removed("GPU", cached.digest)
        if self._successor.get(cached.parent) is cached:
            del self._successor[cached.parent]
        self._cached[block] = None
        self._num_uncached += 1
        if block in self._idle:
            del self._idle[block]
            self._uncopied.pop(block, None)
            self._free.append(block)

    def log_changes(self) -> CacheLog:
        """From now on, the digests that are gained and lost, on the device and in host memory together."""
        log = self.log = CacheLog()
        self.host.on_evict = self._log_loss
        return log

    def log_events(self) -> KVEventLog:
        """From now on, every block that is stored or removed, with its tokens."""
        log = self.events = self.host.events = KVEventLog()
        return log

    def _log_loss(self, digest: bytes) -> None:
        if self.log is not None and digest not in self._by_digest and digest not in self.host.by_digest:
            self.log.remove(digest)

    # --- allocation -----------------------------------------------------------------------------------------

    def can_allocate(self, count: int, shared: Sequence[int] = ()) -> bool:
        """Whether `count` blocks can be allocated beside `shared` ones that were found."""
        left = self.num_available - count
        return left >= len(shared) or left >= sum(not self._users[block] for block in shared)

    def share(self, blocks: Sequence[int]) -> None:
        """One more user of blocks that were found."""
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
        self.index()
        users = self._users
        for block in reversed(blocks):
            users[block] -= 1
            if users[block]:
                continue
            cached = self._cached[block]
            if cached is None:
                self._free.append(block)
                continue
            self._idle[block] = None
            if self.host.num_blocks and cached.digest not in self.host.by_digest:
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
        cached = self._cached[block]
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
        """By block, of those that have any."""
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
        free = set(self._free)
        idle = set(self._idle)
        used = self.users().keys()
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & idle or free & used or idle & used), "a block is in two states"
        assert len(free) + len(idle) + len(used) == self.num_blocks, "a block is lost"
        assert min(self._users, default=0) >= 0, "a block has fewer than no users"
        findable = {block: cached for block, cached in enumerate(self._cached) if cached is not None}
        indexed = {cached.block: cached for cached in self._by_digest.values()}
        assert findable == indexed, "blocks and index disagree"
        for parent, cached in self._successor.items():
            assert self._by_digest.get(cached.digest) is cached, "a successor is stale"
            assert cached.parent == parent, "a successor of another block"
        assert not self._pending.keys() & self._by_digest.keys(), "a pending block is in the index"
        assert idle <= findable.keys(), "an idle block cannot be found"
        assert not free & findable.keys(), "a free block can be found"
        assert self._uncopied.keys() <= idle, "a block waits for its copy that is not idle"
