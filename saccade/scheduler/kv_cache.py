"""Paged KV memory by the block: who uses which block, and which blocks can be found again by what they hold.

Owns numbers and hashes only. A position's record says what stands there; that some come from pictures is unknown here.

    used:  in at least one request's table        free + idle + used = all blocks
    idle:  in no table, content still findable; reused last, the longest unused first
    free:  in no table, content worthless
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from saccade.types import RECORD_BYTES

_TEXT_RECORD = "32xQ"  # zeros where a media record has its content key, then the token id


def text_records(token_ids: Sequence[int]) -> bytes:
    """The records of generated tokens, in the layout of `Prompt.identity`."""
    return struct.pack("<" + _TEXT_RECORD * len(token_ids), *token_ids)


class BlockHashes:
    """The digests of one request's blocks: digest i covers every position up to the end of block i.

    Hashed on demand and once: a prompt that misses early is not hashed to its end, and a decode step hashes only when a
    block fills.
    """

    def __init__(self, identity: bytes, salt: bytes, block_size: int, generated: Sequence[int]) -> None:
        self._identity = identity
        self._generated = generated  # the request's own list, which grows as it decodes
        self._width = block_size * RECORD_BYTES
        self._digests = [hashlib.sha256(salt).digest()]  # the root: other salts share nothing
        self.found: list[int] = []  # what the pool found of it last
        self.found_at = 0  # how many blocks the pool had forgotten by then: as long as that is so, these stay found

    @property
    def num_known(self) -> int:
        """Blocks that are hashed."""
        return len(self._digests) - 1

    def digest(self, index: int) -> bytes:
        """Of block `index`; of -1 the root."""
        for i in range(len(self._digests) - 1, index + 1):
            self.content(i)
        return self._digests[index + 1]

    def content(self, index: int) -> tuple[bytes, bytes]:
        """Digest and records of block `index`, where that of the block before it is known."""
        digests, records = self._digests, self.records(index)
        if index + 1 == len(digests):
            digests.append(hashlib.sha256(digests[index] + records).digest())
        return digests[index + 1], records

    def know(self, first: int, digests: Sequence[bytes]) -> None:
        """Digests from block `first` on, from those who hashed the same records behind the same blocks before."""
        self._digests += digests[self.num_known - first :]

    def walk(self, first: int, end: int) -> Iterator[bytes]:
        """What stands in the blocks from `first` to `end`, one after the other."""
        identity, width = self._identity, self._width
        inside = min(end, len(identity) // width)
        for start in range(first * width, inside * width, width):
            yield identity[start : start + width]
        for index in range(max(first, inside), end):
            yield self.records(index)

    def records(self, index: int) -> bytes:
        """What stands in block `index`; the block must be full."""
        start, end = index * self._width, (index + 1) * self._width
        records = self._identity[start:end]
        if len(records) == self._width:
            return records
        first = max(0, start - len(self._identity)) // RECORD_BYTES
        return records + text_records(self._generated[first : (end - len(self._identity)) // RECORD_BYTES])


class _CachedBlock(NamedTuple):
    """What can be found in a block."""

    block: int
    before: bytes  # digest of the block before it
    digest: bytes
    records: bytes


class _PendingBlocks(NamedTuple):
    """Blocks of a request that can be found from now on, though they are in no index yet."""

    blocks: tuple[int, ...]
    chain: BlockHashes
    first: int  # number of the first one in its request


class BlockPool:
    """Gives out blocks, counts their users and finds full blocks again by digest.

    Hashing a long prompt takes as long as launching it, so of what is published only the first block is hashed at once:

        published     |0|1|2|3|4|       an offer under the digest of 0; whoever looks for 0 has all five entered
        in the index   .

    The others follow when someone comes upon the first one, when blocks are given back, or when there is time for it
    (`index`). Whoever looks for one of them looks for those before it, so nobody can tell the difference.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._enable_caching = enable_caching
        self._users = [0] * num_blocks
        self._labels: list[_CachedBlock | None] = [None] * num_blocks  # of findable blocks
        self._by_digest: dict[bytes, _CachedBlock] = {}
        self._behind: dict[
            bytes, _CachedBlock
        ] = {}  # by digest of a block: of those that follow it, the one published last
        self._offers: dict[bytes, list[_PendingBlocks]] = {}  # not yet in the two above; by digest of their first block
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._num_forgotten = 0
        self._queries = self._hits = self._evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be given out: free ones, then idle ones."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- finding ------------------------------------------------------------------------------------------------------

    def find(self, chain: BlockHashes, num_tokens: int, first: int = 0) -> list[int]:
        """Blocks, from number `first` on, that already hold the beginning of a request of `num_tokens`. Takes nothing.

        The last token is always left to compute, because the next one is sampled from it.
        """
        if not self._enable_caching:
            return []
        end = (num_tokens - 1) // self.block_size
        if first:  # in the middle, behind the first block of what others may have published
            self.index()
            return self._walk(chain, first, end)
        if chain.found_at != self._num_forgotten:
            chain.found, chain.found_at = [], self._num_forgotten
        chain.found += self._walk(chain, len(chain.found), end)  # asked in every step while it waits
        return chain.found[:end]

    def _walk(self, chain: BlockHashes, first: int, end: int) -> list[int]:
        before, labels = chain.digest(first - 1), list[_CachedBlock]()
        for records in chain.walk(first, end):
            label = self._behind.get(before)
            if label is None or label.records != records:  # it is not the one that came last: ask by hash
                chain.know(first, [label.digest for label in labels])
                label = self._labelled(chain.digest(first + len(labels)))
                if label is None or label.records != records:
                    break
            labels.append(label)
            before = label.digest
        chain.know(first, [label.digest for label in labels])
        return [label.block for label in labels]

    def has_prefix(self, chain: BlockHashes, end: int, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` would probably find all positions before `end`.

        Goes on where its chain was last looked at, and stops at the first block that is missing: hashes no more of it.
        """
        last = (end - 1) // self.block_size
        if not self._enable_caching or last >= (num_tokens - 1) // self.block_size:
            return False
        first = min(max(chain.num_known - 1, 0), last)
        return all(self._labelled(chain.digest(index)) is not None for index in range(first, last + 1))

    def _labelled(self, digest: bytes) -> _CachedBlock | None:
        if digest in self._offers:
            self._enter(digest)
        return self._by_digest.get(digest)

    def count_lookup(self, num_tokens: int, num_found: int) -> None:
        """Once per admission, so that a request tried at every step counts once."""
        self._queries += num_tokens
        self._hits += num_found

    def cache_blocks(self, blocks: Sequence[int], chain: BlockHashes, first: int) -> None:
        """Make a request's blocks findable, from its number `first` on: done when the window that fills them is
        planned, so that requests of one step share them. The runner writes a layer's keys and values for all windows
        before any of them attends.
        """
        if not self._enable_caching:
            return
        index, end = first, first + len(blocks)
        while index < end and chain.digest(index) in self._by_digest:  # equal ones were there before, and stay
            index += 1
        if index < end:
            offer = _PendingBlocks(tuple(blocks[index - first :]), chain, index)
            self._offers.setdefault(chain.digest(index), []).append(offer)

    def index(self) -> None:
        """Enter all that was published into the index."""
        for digest in tuple(self._offers):
            self._enter(digest)

    def _enter(self, digest: bytes) -> None:
        """The offers that begin with this block, and those that begin with one of theirs."""
        offers = self._offers.pop(digest, [])
        for blocks, chain, first in offers:  # grows meanwhile
            before = chain.digest(first - 1)
            for index, block in enumerate(blocks, first):
                digest, records = chain.content(index)
                if digest not in self._by_digest:  # the first of two equal blocks stays the one that is found
                    label = _CachedBlock(block, before, digest, records)
                    self._by_digest[digest] = self._behind[before] = self._labels[block] = label
                offers += self._offers.pop(digest, ())
                before = digest

    def evict(self, block: int) -> None:
        """Make a block unfindable: its content never became valid."""
        self.index()
        self._forget(block)

    def _forget(self, block: int) -> None:
        label = self._labels[block]
        if label is None:
            return
        del self._by_digest[label.digest]
        if self._behind.get(label.before) is label:
            del self._behind[label.before]
        self._labels[block] = None
        self._num_forgotten += 1
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    # --- giving out ---------------------------------------------------------------------------------------------------

    def can_allocate(self, count: int, shared: Sequence[int] = ()) -> bool:
        """Whether `count` blocks can be given out beside `shared` ones that were found."""
        left = self.num_available - count
        return left >= len(shared) or left >= sum(not self._users[block] for block in shared)

    def share(self, blocks: Sequence[int]) -> None:
        """One more user for blocks that were found."""
        users, idle = self._users, self._idle
        for block in blocks:
            if not users[block]:
                del idle[block]
            users[block] += 1

    def allocate(self, count: int) -> tuple[int, ...]:
        assert count <= self.num_available, f"{count} blocks asked for, {self.num_available} available"
        return tuple([self._take() for _ in range(count)])

    def release(self, blocks: Sequence[int]) -> None:
        """One user less. The tail goes idle before the head, so a prefix outlives what followed it."""
        self.index()
        users, labels = self._users, self._labels
        for block in reversed(blocks):
            users[block] -= 1
            if users[block]:
                continue
            if labels[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def reset(self) -> None:
        """Nothing can be found any more."""
        for block in range(self.num_blocks):
            self.evict(block)

    def _take(self) -> int:
        if not self._free:
            self._forget(next(iter(self._idle)))
            self._evictions += 1
        block = self._free.pop()
        self._users[block] = 1
        return block

    # --- telling ------------------------------------------------------------------------------------------------------

    def users(self, block: int) -> int:
        return self._users[block]

    def stats(self) -> dict[str, int]:
        free, idle = len(self._free), len(self._idle)
        return {
            "total": self.num_blocks,
            "used": self.num_blocks - free - idle,
            "idle": idle,
            "free": free,
            "queries": self._queries,
            "hits": self._hits,
            "evictions": self._evictions,
        }

    def check(self) -> None:
        """The conservation laws."""
        free, idle = set(self._free), set(self._idle)
        used = {block for block, users in enumerate(self._users) if users}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & idle or free & used or idle & used), "a block is in two states"
        assert len(free) + len(idle) + len(used) == self.num_blocks, "a block is lost"
        assert min(self._users, default=0) >= 0, "a block has fewer than no users"
        labelled = {block: label for block, label in enumerate(self._labels) if label is not None}
        assert labelled == {label.block: label for label in self._by_digest.values()}, "labels and index disagree"
        assert all(self._by_digest.get(label.digest) is label for label in self._behind.values()), "a label is stale"
        assert all(label.before == before for before, label in self._behind.items()), "a block follows what it does not"
        assert not self._offers.keys() & self._by_digest.keys(), "an offer begins with a block that is found without it"
        assert idle <= labelled.keys(), "an idle block cannot be found"
        assert not free & labelled.keys(), "a free block can be found"
