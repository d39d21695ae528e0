"""Block tables on the device: one row per running request, updated in place.

The host has a mirror and knows which part of a row changed since the last step; each row takes one copy:

    rows of requests      [ 7  2  5  .  . ]   A
                          [ 9  .  .  .  . ]   B        B gets block 4 at index 1
    one spare row         [ .  .  .  .  . ]            for padding

A decode step writes the block of its new token itself, so that block is taken out of the changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from saccade.runner.cuda.staging import Metadata, PinnedStaging

_STAGED_ROWS = 16  # whole rows that fit in the staging buffer: the prefills of a step


class BlockTables:
    def __init__(self, max_requests: int, max_blocks: int, device: torch.device) -> None:
        self.blocks = torch.zeros(max_requests + 1, max_blocks, dtype=torch.int32, device=device)
        # The token sampled last, by row.
        self.last_tokens = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)
        self.spare = max_requests  # the row for padding
        self._mirror = np.zeros(self.blocks.shape, np.int32)  # the same blocks on the host
        self._free = list(range(max_requests - 1, -1, -1))
        self._rows: dict[str, int] = {}
        self._changes: dict[int, range] = {}  # by row: indices whose values are not yet on the device
        self._staging = PinnedStaging(_STAGED_ROWS * max_blocks, device)

    def row(self, request_id: str) -> int:
        return self._rows[request_id]

    def rows(self, request_ids: Sequence[str]) -> Metadata:
        return np.array([self._rows[request_id] for request_id in request_ids], np.int32)

    def slots(self, rows: Metadata | int, tokens: npt.NDArray[np.integer[Any]], block_size: int) -> Metadata:
        """KV slots of the requests' tokens with these indices: block * block_size + offset."""
        slots: Metadata = self._mirror[rows, tokens // block_size] * block_size + tokens % block_size
        return slots

    def open(self, request_id: str, blocks: Sequence[int]) -> None:
        """Add a request, or replace its table."""
        if request_id not in self._rows:
            self._rows[request_id] = self._free.pop()
        self.extend(request_id, 0, blocks)

    def extend(self, request_id: str, count: int, blocks: Sequence[int]) -> None:
        """Append blocks to the `count` ones it has."""
        row = self._rows[request_id]
        self._mirror[row, count : count + len(blocks)] = blocks
        before = self._changes.get(row, range(count, count))
        self._changes[row] = range(min(before.start, count), max(before.stop, count + len(blocks)))

    def set_by_device(self, row: int, index: int) -> None:
        """The decode pass writes this block by itself."""
        indices = self._changes.get(row, range(0))
        if index in indices[-1:]:
            self._changes[row] = indices[:-1]

    def close(self, request_id: str) -> int | None:
        """The row that it had, if it had one."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def clear(self) -> None:
        for request_id in list(self._rows):
            self.close(request_id)
        self._changes.clear()

    def flush(self) -> None:
        """Copy the changes to the device, in stream order."""
        changes = [(row, indices) for row, indices in self._changes.items() if indices]
        self._changes.clear()
        for chunk in self._chunks(changes):
            staged = self._staging.open()
            offset = 0
            for row, indices in chunk:
                staged[offset : offset + len(indices)] = self._mirror[row, indices.start : indices.stop]
                self._staging.send(self.blocks[row, indices.start : indices.stop], offset)
                offset += len(indices)

    def _chunks(self, changes: Sequence[tuple[int, range]]) -> Iterator[list[tuple[int, range]]]:
        """As many changes at a time as the staging buffer holds."""
        chunk: list[tuple[int, range]] = []
        size = 0
        for row, indices in changes:
            if size + len(indices) > self._staging.size:
                yield chunk
                chunk = []
                size = 0
            chunk.append((row, indices))
            size += len(indices)
        if chunk:
            yield chunk
