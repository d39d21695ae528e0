"""Copies of KV blocks in host memory: which prefix-cache blocks have one, and where. Ids only.

    device    | evicted |    | restored |      a plan names both; what it evicts is copied out first
                   ▼              ▲
    host      | 0 | 1 | 2 | 3 | 4 | ...        the least recently used one is evicted

A restored block keeps its host copy, so that evicting it again copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from saccade.options.engine import SchedulerConfig
from saccade.scheduler.kv_event_log import KVEventLog
from saccade.scheduler.prefix_index import BlockIndex, CachedBlock
from saccade.types.step import KVCopy

_MAX_AHEAD = 4  # a quarter of the blocks, on the device or here


class HostCache:
    """With 0 blocks nothing is kept, and nothing is found."""

    def __init__(self, num_blocks: int, min_restored: int = 1, num_ahead: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_ahead = num_ahead  # so many blocks of the device should be free to take without a copy
        self._max_restored: int | None = None  # blocks that the next plan may still restore; None: any number
        self._min_restored = min_restored  # fewer are computed
        self._num_out = self._num_in = self._hits = self._evictions = 0
        self.on_evict: Callable[[bytes], None] | None = None  # gets the digest
        self.events: KVEventLog | None = None
        self.reset()

    @classmethod
    def of(cls, config: SchedulerConfig) -> HostCache:
        """Copies ahead for the longest request, and at most for a quarter of the blocks."""
        longest = -(-config.max_model_len // config.block_size)
        share = min(config.num_blocks, config.host_blocks) // _MAX_AHEAD
        return cls(config.host_blocks, config.min_restored_blocks, min(longest, share))

    def reset(self) -> None:
        """Empty the cache."""
        self._free = list(range(self.num_blocks - 1, -1, -1))  # a stack: neighbours are filled together
        self.index = BlockIndex()
        self._out: dict[int, int] = {}  # of the next plan: device block by host block
        self._in: dict[int, int] = {}  # of the next plan: host block by device block
        self._pinned: set[bytes] = set()  # digests that the next plan restores: their host blocks stay

    def begin_step(self, max_restored: int | None) -> None:
        """So many blocks may the next plan restore; None: any number."""
        self._max_restored = max_restored

    @property
    def is_restoring(self) -> bool:
        """Whether the next plan copies blocks in."""
        return bool(self._in)

    def restorable(self, count: int) -> int | None:
        """How many of `count` blocks the next plan may restore; None: too few to be worth it."""
        if count < self._min_restored:
            return None
        return count if self._max_restored is None else min(count, self._max_restored)

    def offload(self, cached: CachedBlock) -> None:
        """Copy a device block out in the next plan, unless it has a copy or all host blocks are pinned."""
        if cached.digest in self.index.by_digest:
            self.index.by_digest.move_to_end(cached.digest)
        elif self._free or self._evict():
            copy = cached._replace(block=self._free.pop())
            self.index.add(copy)
            self._out[copy.block] = cached.block
            self._num_out += 1
            if self.events is not None:
                self.events.offloaded(copy.digest)

    def _evict(self) -> bool:
        """Free the least recently used host block; False if all are pinned."""
        copies = self.index.by_digest.items()
        copy = next((copy for digest, copy in copies if digest not in self._pinned), None)
        if copy is None:
            return False
        self.index.remove(copy)
        self._free.append(copy.block)
        self._num_out -= self._out.pop(copy.block, None) is not None  # it would be overwritten at once
        self._evictions += 1
        if self.on_evict is not None:
            self.on_evict(copy.digest)
        if self.events is not None:
            self.events.removed("CPU", copy.digest)
        return True

    def pin(self, digests: list[bytes]) -> None:
        """Keep these until the next plan: blocks that are allocated for them may evict others."""
        for digest in reversed(digests):  # the tail is evicted before the head
            self.index.by_digest.move_to_end(digest)
        self._pinned.update(digests)

    def restore(self, digests: list[bytes], blocks: tuple[int, ...]) -> None:
        """Copy pinned blocks in, in the next plan."""
        for digest, block in zip(digests, blocks, strict=True):
            self._in[block] = self.index.by_digest[digest].block
        if self._max_restored is not None:
            self._max_restored -= len(blocks)
        self._num_in += len(blocks)
        self._hits += 1

    def cancel(self, block: int) -> None:
        """A device block that was to be restored is given to another request in the same plan."""
        if self._in.pop(block, None) is not None:
            self._num_in -= 1

    def drain(self) -> tuple[tuple[KVCopy, ...], tuple[KVCopy, ...]]:
        """Copies out and in for the plan that is being made."""
        out = tuple([KVCopy(block, host_block) for host_block, block in self._out.items()])
        back = tuple([KVCopy(block, host_block) for block, host_block in self._in.items()])
        self._out = {}
        self._in = {}
        self._pinned.clear()
        return out, back

    def stats(self) -> dict[str, int]:
        return {
            "total": self.num_blocks,
            "used": len(self.index.by_digest),
            "blocks_out": self._num_out,
            "blocks_in": self._num_in,
            "hits": self._hits,
            "evictions": self._evictions,
        }

    def check(self) -> None:
        self.index.check()
        copies = self.index.by_digest
        blocks = [*self._free, *(copy.block for copy in copies.values())]
        assert sorted(blocks) == list(range(self.num_blocks)), "host blocks were lost or given twice"
        assert self._pinned <= copies.keys(), "a pinned host block is gone"
        pinned = {copies[digest].block for digest in self._pinned}
        assert set(self._in.values()) <= pinned, "a host block to be restored is not pinned"
        assert self._out.keys() <= {copy.block for copy in copies.values()}, "a copy is lost"
