"""Which states of a model's recurrent layers are kept for prompts that begin alike, and in which row. Numbers only.

Keys and values of a prefix can be taken over at any block; a state only where one was kept. So a hit in the block pool
is cut back to the longest beginning behind which a state lies:

    blocks found     |0|1|2|3|4|5|6|
    states kept           ^       ^        behind blocks 2 and 6: seven blocks are used, or three when 3 to 6 are gone

A state is kept behind the last block of a prompt's window, and behind the last block of the pictures in it. The longest
unused one makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from saccade.scheduler.kv_cache import BlockHashes
from saccade.scheduler.request import ScheduledRequest
from saccade.types import ScheduledWindow, StateCheckpoint


class StateCache:
    """`rows` is None for models whose layers all keep keys and values: they may go on anywhere."""

    def __init__(self, rows: int | None, block_size: int) -> None:
        self.is_needed = rows is not None
        self._block_size = block_size
        self._num_rows = rows or 0
        self.reset()

    def reset(self) -> None:
        self._free = list(range(self._num_rows))
        self._kept: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # by the digest of the block before it, longest unused first
        self._planned: dict[int, bytes] = {}  # rows that a step under way writes

    # --- finding ------------------------------------------------------------------------------------------------------

    def usable(self, chain: BlockHashes, found: list[int]) -> list[int]:
        """As many of the found blocks as a request can go on behind."""
        if not self.is_needed:
            return found
        ends = range(len(found), 0, -1)
        return found[: next((end for end in ends if chain.digest(end - 1) in self._kept), 0)]

    def behind(self, chain: BlockHashes, num_blocks: int) -> StateCheckpoint | None:
        """What a request that takes over so many blocks begins with; None: with nothing."""
        if not self.is_needed or not num_blocks:
            return None
        digest = chain.digest(num_blocks - 1)
        self._kept.move_to_end(digest)
        return StateCheckpoint(num_blocks * self._block_size, self._kept[digest])

    # --- keeping ------------------------------------------------------------------------------------------------------

    def plan(self, seq: ScheduledRequest, start: int, end: int) -> tuple[StateCheckpoint, ...]:
        """States to keep while the window [start, end) is computed."""
        if not self._num_rows or start >= len(seq.request.prompt):
            return ()
        places = ((place, self._row_for(seq.chain, place)) for place in self._places(seq, start, end))
        return tuple(StateCheckpoint(place, row) for place, row in places if row is not None)

    def _places(self, seq: ScheduledRequest, start: int, end: int) -> list[int]:
        # The last token of a prompt is always computed, so a state behind it would not serve the same prompt again.
        ends = [min(end, len(seq.request.prompt) - 1)]
        ends += [span.end for span in seq.spans if start < span.end <= end][-1:]
        return sorted({place for e in ends if (place := e // self._block_size * self._block_size) > start})

    def _row_for(self, chain: BlockHashes, place: int) -> int | None:
        """None where the state is there already, or every row is being written."""
        digest = chain.digest(place // self._block_size - 1)
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return None
        if digest in self._planned.values() or not (self._free or self._kept):
            return None
        row = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
        self._planned[row] = digest
        return row

    def commit(self, windows: Iterable[ScheduledWindow], open_requests: Container[str]) -> None:
        """A step is done. What it kept for requests that failed in it may never have been computed."""
        for work in windows if self._planned else ():
            for _, row in work.checkpoints:
                digest = self._planned.pop(row)
                if work.request_id in open_requests:
                    self._kept[digest] = row
                else:
                    self._free.append(row)

    def check(self) -> None:
        rows = [*self._free, *self._kept.values(), *self._planned]
        assert sorted(rows) == list(range(self._num_rows)), "rows of states were lost or given twice"
