"""Block tables on the device: one row per running request, changed in place by a few numbers a step.

The host has the same table and knows which part of a row changed since the last step; one copy a row brings it over:

    rows of requests      [ 7  2  5  .  . ]   A
                          [ 9  .  .  .  . ]   B        B gets block 4:  place 1
    one row to spare      [ .  .  .  .  . ]            for rows of padding

A decode step enters the block of its new token itself: that block is taken out of the changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.runner.cuda.staging import Metadata, PinnedStaging, to_device

_MAIL_ROWS = 16  # whole rows that may change at a time before one waits for another's copy: the prompts of a step


class BlockTables:
    def __init__(self, max_requests: int, max_blocks: int, device: torch.device) -> None:
        self.blocks = torch.zeros(max_requests + 1, max_blocks, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(
            max_requests + 1, dtype=torch.int64, device=device
        )  # by row: the token given last
        self.spare = max_requests  # row of no request
        self._known = np.zeros(self.blocks.shape, np.int32)  # the same blocks on the host
        self._free = list(range(max_requests - 1, -1, -1))
        self._rows: dict[str, int] = {}
        self._changes: dict[int, range] = {}  # by row: places whose values are not yet on the device
        self._mailbox = PinnedStaging(_MAIL_ROWS * max_blocks, device)

    def row(self, request_id: str) -> int:
        return self._rows[request_id]

    def rows(self, request_ids: Sequence[str]) -> Metadata:
        return np.array([self._rows[request_id] for request_id in request_ids], np.int32)

    def slots(self, rows: Metadata | int, places: npt.NDArray[np.integer[Any]], block_size: int) -> Metadata:
        """Where the tokens at these places of requests lie: block * block_size + offset."""
        found: Metadata = self._known[rows, places // block_size] * block_size + places % block_size
        return found

    def blocks_of(self, rows: Sequence[int], counts: Sequence[int]) -> Tensor:
        """The first blocks of these rows, as many as each counts, in one list on the device."""
        parts = [self._known[row, :count] for row, count in zip(rows, counts, strict=True)]
        return to_device(np.concatenate([np.zeros(0, np.int32), *parts]), self.blocks.device)

    def open(self, request_id: str, blocks: Sequence[int]) -> None:
        """A request comes, or comes again with another table."""
        if request_id not in self._rows:
            self._rows[request_id] = self._free.pop()
        self.extend(request_id, 0, blocks)

    def extend(self, request_id: str, held: int, blocks: Sequence[int]) -> None:
        """Blocks behind the `held` ones it has."""
        row = self._rows[request_id]
        self._known[row, held : held + len(blocks)] = blocks
        before = self._changes.get(row, range(held, held))
        self._changes[row] = range(min(before.start, held), max(before.stop, held + len(blocks)))

    def set_by_device(self, row: int, index: int) -> None:
        """The device enters this block by itself."""
        places = self._changes.get(row)
        if places and places[-1] == index:
            self._changes[row] = places[:-1]

    def close(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def clear(self) -> None:
        for request_id in list(self._rows):
            self.close(request_id)
        self._changes.clear()

    def flush(self) -> None:
        """Bring the changes to the device, in the order of its stream."""
        changes = [(row, places) for row, places in self._changes.items() if places]
        self._changes.clear()
        for few in self._chunks(changes):
            metadata, done = self._mailbox.open(), 0
            for row, places in few:
                metadata[done : done + len(places)] = self._known[row, places.start : places.stop]
                self._mailbox.send(self.blocks[row, places.start : places.stop], done)
                done += len(places)

    def _chunks(self, changes: Sequence[tuple[int, range]]) -> Iterator[list[tuple[int, range]]]:
        """As many changes at a time as the mailbox holds."""
        few, room = list[tuple[int, range]](), self._mailbox.size
        for row, places in changes:
            if len(places) > room:
                yield few
                few, room = [], self._mailbox.size
            few.append((row, places))
            room -= len(places)
        if few:
            yield few
