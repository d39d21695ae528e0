"""Prefix caching for recurrent layers: which state checkpoints are kept, and in which row. Ids only.

KV blocks of a prefix can be reused up to any block, a recurrent state only where a checkpoint was kept. So a
prefix hit is cut back to the last block that has one:

    cached blocks    |0|1|2|3|4|5|6|
    checkpoints           ^       ^        after 2 and 6: seven blocks are used, or three when 3 to 6 are gone

A checkpoint is kept after the last block of a prompt's window, and after the last block of the images in it.
The least recently used one is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from saccade.scheduler.block_hashes import BlockHashes
from saccade.scheduler.kv_cache import CachedPrefix
from saccade.scheduler.request import ScheduledRequest
from saccade.types.step import ScheduledWindow, StateCheckpoint


class StateCache:
    """`rows` is None for models whose layers all have KV: they may go on after any block."""

    def __init__(self, rows: int | None, block_size: int) -> None:
        self.is_needed = rows is not None
        self._block_size = block_size
        self._num_rows = rows or 0
        self.reset()

    def reset(self) -> None:
        self._free = list(range(self._num_rows))
        self._states: OrderedDict[bytes, int] = OrderedDict()  # by digest of the last block; LRU order
        self._planned: dict[int, bytes] = {}  # rows that a step under way writes

    def usable(self, hashes: BlockHashes, prefix: CachedPrefix) -> CachedPrefix:
        """The prefix blocks up to the last one with a checkpoint."""
        if not self.is_needed:
            return prefix
        ends = range(len(prefix.blocks), 0, -1)
        end = next((end for end in ends if hashes.digest(end - 1) in self._states), 0)
        return CachedPrefix(prefix.blocks[:end])

    def checkpoint_after(self, hashes: BlockHashes, num_blocks: int) -> StateCheckpoint | None:
        """The state that a request with so many cached blocks begins with; None: an empty one."""
        if not self.is_needed or not num_blocks:
            return None
        digest = hashes.digest(num_blocks - 1)
        self._states.move_to_end(digest)
        return StateCheckpoint(num_blocks * self._block_size, self._states[digest])

    def plan(self, seq: ScheduledRequest, start: int, end: int) -> tuple[StateCheckpoint, ...]:
        """States to keep while the window [start, end) is computed."""
        if not self._num_rows or start >= len(seq.request.prompt):
            return ()
        ends = self._positions(seq, start, end)
        rows = {position: self._row_for(seq.hashes, position) for position in ends}
        return tuple(StateCheckpoint(position, row) for position, row in rows.items() if row is not None)

    def _positions(self, seq: ScheduledRequest, start: int, end: int) -> list[int]:
        # The last token of a prompt is always computed: a state after it would not serve that prompt again.
        ends = [min(end, len(seq.request.prompt) - 1)]
        ends += [span.end for span in seq.spans if start < span.end <= end][-1:]
        positions = {end // self._block_size * self._block_size for end in ends}
        return sorted(position for position in positions if position > start)

    def _row_for(self, hashes: BlockHashes, position: int) -> int | None:
        """None where the state is there already, or every row is being written."""
        digest = hashes.digest(position // self._block_size - 1)
        if digest in self._states:
            self._states.move_to_end(digest)
            return None
        if digest in self._planned.values() or not (self._free or self._states):
            return None
        row = self._free.pop() if self._free else self._states.popitem(last=False)[1]
        self._planned[row] = digest
        return row

    def commit(self, windows: Iterable[ScheduledWindow], open_requests: Container[str]) -> None:
        """A step is done. Checkpoints of requests that failed in it may never have been computed."""
        for window in windows if self._planned else ():
            for _, row in window.checkpoints:
                digest = self._planned.pop(row)
                if window.request_id in open_requests:
                    self._states[digest] = row
                else:
                    self._free.append(row)

    def check(self) -> None:
        rows = [*self._free, *self._states.values(), *self._planned]
        assert sorted(rows) == list(range(self._num_rows)), "rows of states were lost or given twice"
