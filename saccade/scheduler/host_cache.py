"""Copies of KV blocks in host memory: which prefix-cache blocks have one, and where. Ids only.

    device    | evicted |    | restored |      a plan names both; what it evicts is copied out first
                   ▼              ▲
    host      | 0 | 1 | 2 | 3 | 4 | ...        the least recently used one is evicted

A restored block keeps its host copy, so that evicting it again copies nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from saccade.types import KVCopy


class _HostCopy(NamedTuple):
    host_block: int
    records: bytes  # compared on a hit, as on the device


class HostCache:
    """With 0 blocks nothing is kept, and nothing is found."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_out = self._num_in = self._hits = self._evictions = 0
        self.reset()

    def reset(self) -> None:
        """Empty the cache."""
        self._free = list(range(self.num_blocks - 1, -1, -1))  # a stack: neighbours are filled together
        self._copies: OrderedDict[bytes, _HostCopy] = OrderedDict()  # by digest; LRU order
        self._out: dict[int, int] = {}  # of the next plan: device block by host block
        self._in: dict[int, int] = {}  # of the next plan: host block by device block
        self._pinned: set[bytes] = set()  # digests that the next plan restores: their host blocks stay

    @property
    def is_restoring(self) -> bool:
        """Whether the next plan copies blocks in."""
        return bool(self._in)

    def has(self, digest: bytes, records: bytes) -> bool:
        found = self._copies.get(digest)
        return found is not None and found.records == records

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._copies

    def offload(self, block: int, digest: bytes, records: bytes) -> None:
        """Copy a device block out in the next plan, unless it has a copy or all host blocks are pinned."""
        if digest in self._copies:
            self._copies.move_to_end(digest)
        elif self._free or self._evict():
            host_block = self._free.pop()
            self._copies[digest] = _HostCopy(host_block, records)
            self._out[host_block] = block
            self._num_out += 1

    def _evict(self) -> bool:
        """Free the least recently used host block; False if all are pinned."""
        digest = next((digest for digest in self._copies if digest not in self._pinned), None)
        if digest is None:
            return False
        host_block = self._copies.pop(digest).host_block
        self._free.append(host_block)
        self._num_out -= self._out.pop(host_block, None) is not None  # it would be overwritten at once
        self._evictions += 1
        return True

    def pin(self, digests: list[bytes]) -> None:
        """Keep these until the next plan: blocks that are allocated for them may evict others."""
        for digest in reversed(digests):  # the tail is evicted before the head
            self._copies.move_to_end(digest)
        self._pinned.update(digests)

    def restore(self, digests: list[bytes], blocks: tuple[int, ...]) -> None:
        """Copy pinned blocks in, in the next plan."""
        for digest, block in zip(digests, blocks, strict=True):
            self._in[block] = self._copies[digest].host_block
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
            "used": len(self._copies),
            "blocks_out": self._num_out,
            "blocks_in": self._num_in,
            "hits": self._hits,
            "evictions": self._evictions,
        }

    def check(self) -> None:
        blocks = [*self._free, *(copy.host_block for copy in self._copies.values())]
        assert sorted(blocks) == list(range(self.num_blocks)), "host blocks were lost or given twice"
        assert self._pinned <= self._copies.keys(), "a pinned host block is gone"
        pinned = {self._copies[digest].host_block for digest in self._pinned}
        assert set(self._in.values()) <= pinned, "a host block to be restored is not pinned"
        assert self._out.keys() <= {copy.host_block for copy in self._copies.values()}, "a copy is lost"
