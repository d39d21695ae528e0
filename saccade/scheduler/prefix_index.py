"""Finds cached KV blocks: by digest, or as what followed the block before, which takes no hash."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from saccade.scheduler.block_hashes import BlockHashes


class CachedBlock(NamedTuple):
    """A full block that can be found by its digest."""

    block: int  # on the device, or in host memory
    parent: bytes  # digest of the block before it
    digest: bytes
    records: bytes


Lookup = Callable[[bytes], CachedBlock | None]


class BlockIndex:
    """Blocks of the device, or of host memory."""

    def __init__(self) -> None:
        self.by_digest: OrderedDict[bytes, CachedBlock] = OrderedDict()  # in host memory in LRU order
        self._successors: dict[bytes, CachedBlock] = {}  # by digest of a block: its latest cached successor

    def add(self, cached: CachedBlock) -> None:
        self.by_digest[cached.digest] = self._successors[cached.parent] = cached

    def remove(self, cached: CachedBlock) -> None:
        del self.by_digest[cached.digest]
        if self._successors.get(cached.parent) is cached:
            del self._successors[cached.parent]

    def match(self, hashes: BlockHashes, first: int, end: int, lookup: Lookup | None = None) -> list[int]:
        """Blocks of a request that are here, from number `first` on, without a gap and before `end`."""
        lookup = lookup or self.by_digest.get
        parent = hashes.digest(first - 1)
        matched: list[CachedBlock] = []
        for records in hashes.iter_records(first, end):
            cached = self._successors.get(parent)
            if cached is None or cached.records != records:  # not the latest successor: look it up by hash
                hashes.extend(first, [cached.digest for cached in matched])
                cached = lookup(hashes.digest(first + len(matched)))
                if cached is None or cached.records != records:
                    break
            matched.append(cached)
            parent = cached.digest
        hashes.extend(first, [cached.digest for cached in matched])
        return [cached.block for cached in matched]

    def check(self) -> None:
        for parent, cached in self._successors.items():
            assert self.by_digest.get(cached.digest) is cached, "a successor is stale"
            assert cached.parent == parent, "a successor of another block"


class _PendingBlocks(NamedTuple):
    """Blocks of a request that are cached from now on, but not all hashed yet."""

    blocks: tuple[int, ...]
    hashes: BlockHashes
    first: int  # number of the first one in its request


class PrefixIndex:
    """The index of the device. It hashes late.

    Hashing a long prompt takes as long as launching it, so of the blocks that a step caches only the first is
    hashed at once. The others are pending under its digest:

        cached       |0|1|2|3|4|       a lookup of 0 enters all five into the index
        in the index  .

    They are entered when a lookup finds the first one, when blocks are released, or when there is time
    (`enter_all`). A lookup comes through the blocks before, so the result is as if all were hashed at once.
    """

    def __init__(self, num_blocks: int, on_enter: Callable[[CachedBlock, BlockHashes, int], None]) -> None:
        """`on_enter` hears of each block that enters, with its number in its request."""
        self.by_block: list[CachedBlock | None] = [None] * num_blocks
        self._entered = BlockIndex()
        self._pending: dict[bytes, list[_PendingBlocks]] = {}  # by digest of the first
        self._on_enter = on_enter

    @property
    def by_digest(self) -> OrderedDict[bytes, CachedBlock]:
        """What is not pending."""
        return self._entered.by_digest

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def get(self, digest: bytes) -> CachedBlock | None:
        if digest in self._pending:
            self._enter(digest)
        return self.by_digest.get(digest)

    def match(self, hashes: BlockHashes, first: int, end: int) -> list[int]:
        return self._entered.match(hashes, first, end, self.get)

    def add(self, blocks: Sequence[int], hashes: BlockHashes, first: int) -> None:
        """A request's blocks from number `first` on. Equal blocks that are here already stay."""
        end = first + len(blocks)
        index = next((i for i in range(first, end) if hashes.digest(i) not in self.by_digest), end)
        if index < end:
            pending = _PendingBlocks(tuple(blocks[index - first :]), hashes, index)
            self._pending.setdefault(hashes.digest(index), []).append(pending)

    def enter_all(self) -> None:
        """Hash all pending blocks."""
        for digest in tuple(self._pending):
            self._enter(digest)

    def _enter(self, digest: bytes) -> None:
        """Pending blocks that begin with this one, and those that begin with one of theirs."""
        pending = self._pending.pop(digest, [])
        for blocks, hashes, first in pending:  # grows meanwhile
            parent = hashes.digest(first - 1)
            for index, block in enumerate(blocks, first):
                digest, records = hashes.content(index)
                if digest not in self.by_digest:  # the first of two equal blocks stays the one that is found
                    cached = CachedBlock(block, parent, digest, records)
                    self._entered.add(cached)
                    self.by_block[block] = cached
                    self._on_enter(cached, hashes, index)
                pending += self._pending.pop(digest, ())
                parent = digest

    def remove(self, cached: CachedBlock) -> None:
        self._entered.remove(cached)
        self.by_block[cached.block] = None

    def check(self) -> None:
        self._entered.check()
        blocks = {block: cached for block, cached in enumerate(self.by_block) if cached is not None}
        assert blocks == {cached.block: cached for cached in self.by_digest.values()}, (
            "blocks and index disagree"
        )
        assert not self._pending.keys() & self.by_digest.keys(), "a pending block is in the index"
