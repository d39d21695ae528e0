"""Block tables on the device: one row per running request, changed in place by a few numbers a step.

The host says what changed since the last step; one copy and one scatter bring it over:

    rows of requests      [ 7  2  5  .  . ]   A
                          [ 9  .  .  .  . ]   B        B gets block 4:  place 1 * width + 1, value 4
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class BlockTables:
    def __init__(self, max_requests: int, max_blocks: int, device: torch.device) -> None:
        self.blocks = torch.zeros(max_requests, max_blocks, dtype=torch.int32, device=device)
        self._free = list(range(max_requests - 1, -1, -1))
        self._rows: dict[str, int] = {}
        self._places: list[int] = []  # of the flattened table, not yet on the device
        self._values: list[int] = []

    def row(self, request_id: str) -> int:
        return self._rows[request_id]

    def open(self, request_id: str, blocks: Sequence[int]) -> None:
        """A request comes, or comes again with another table."""
        if request_id not in self._rows:
            self._rows[request_id] = self._free.pop()
        self.extend(request_id, 0, blocks)

    def extend(self, request_id: str, held: int, blocks: Sequence[int]) -> None:
        """Blocks behind the `held` ones it has."""
        first = self._rows[request_id] * self.blocks.shape[1] + held
        self._places.extend(range(first, first + len(blocks)))
        self._values.extend(blocks)

    def close(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def clear(self) -> None:
        for request_id in list(self._rows):
            self.close(request_id)
        self._places.clear()
        self._values.clear()

    def flush(self) -> None:
        """Bring the changes to the device, in the order of its stream."""
        if not self._places:
            return
        # A row may have changed hands since the last flush: of two values for one place the later one counts.
        latest = dict(zip(self._places, self._values, strict=True))
        changes = to_device(np.array([*latest, *latest.values()], np.int32), self.blocks.device)
        places, values = changes[: len(latest)], changes[len(latest) :]
        self.blocks.view(-1).index_copy_(0, places.long(), values)
        self._places.clear()
        self._values.clear()


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Without waiting for the device: the memory is pinned, and kept until the copy is done."""
    host = torch.from_numpy(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
