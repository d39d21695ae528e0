"""Block tables on the device: one row per running request, changed in place by a few numbers a step.

The host says what changed since the last step; one copy and one scatter bring it over:

    rows of requests      [ 7  2  5  .  . ]   A
                          [ 9  .  .  .  . ]   B        B gets block 4:  place 1 * width + 1, value 4
    one row to spare      [ .  .  .  .  . ]            for rows of padding

A decode step enters the block of its new token itself: that block is taken out of the changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Numbers = npt.NDArray[np.int32]


class BlockTables:
    def __init__(self, max_requests: int, max_blocks: int, device: torch.device) -> None:
        self.blocks = torch.zeros(max_requests + 1, max_blocks, dtype=torch.int32, device=device)
        self.latest = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)  # by row: the token given last
        self.spare = max_requests  # row of no request
        self._known = np.zeros(self.blocks.shape, np.int32)  # the same blocks on the host
        self._free = list(range(max_requests - 1, -1, -1))
        self._rows: dict[str, int] = {}
        self._changes: dict[int, int] = {}  # places of the flattened table whose values are not yet on the device

    def row(self, request_id: str) -> int:
        return self._rows[request_id]

    def rows(self, request_ids: Sequence[str]) -> Numbers:
        return np.array([self._rows[request_id] for request_id in request_ids], np.int32)

    def slots(self, rows: Numbers | int, places: npt.NDArray[np.integer[Any]], block_size: int) -> Numbers:
        """Where the tokens at these places of requests lie: block * block_size + offset."""
        found: Numbers = self._known[rows, places // block_size] * block_size + places % block_size
        return found

    def open(self, request_id: str, blocks: Sequence[int]) -> None:
        """A request comes, or comes again with another table."""
        if request_id not in self._rows:
            self._rows[request_id] = self._free.pop()
        self.extend(request_id, 0, blocks)

    def extend(self, request_id: str, held: int, blocks: Sequence[int]) -> None:
        """Blocks behind the `held` ones it has."""
        row = self._rows[request_id]
        self._known[row, held : held + len(blocks)] = blocks
        first = row * self.blocks.shape[1] + held
        # A row may have changed hands since the last flush: of two values for one place the later one counts.
        self._changes.update(zip(range(first, first + len(blocks)), blocks, strict=True))

    def entered(self, row: int, index: int) -> None:
        """The device enters this block by itself."""
        self._changes.pop(row * self.blocks.shape[1] + index, None)

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
        if not self._changes:
            return
        count = len(self._changes)
        flat = np.empty(2 * count, np.int64)
        flat[:count], flat[count:] = list(self._changes), list(self._changes.values())
        changes = to_device(flat, self.blocks.device)
        self.blocks.view(-1).index_copy_(0, changes[:count], changes[count:].int())
        self._changes.clear()


class Mailbox:
    """Pinned memory in which a step's numbers are written; two pieces, for one may still be on its way."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]

    def open(self) -> Numbers:
        """The piece to write next, as it was left; waits until its last copy is done."""
        self._hosts.reverse()
        self._sent.reverse()
        sent = self._sent[0]
        if sent is not None:
            sent.synchronize()
        found: Numbers = self._hosts[0].numpy()
        return found

    def send(self, target: Tensor) -> None:
        """As much of the piece as `target` holds, in the order of the device's stream."""
        target.copy_(self._hosts[0][: target.numel()].view(target.shape), non_blocking=True)
        if self._is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self._sent[0] = done


class Returns:
    """Pinned memory for tokens on their way to the host. They are read before the third run after theirs."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._hosts = [torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(3)]

    def fetch(self, tokens: Tensor) -> Tensor:
        self._hosts.append(self._hosts.pop(0))
        return self._hosts[-1][: len(tokens)].copy_(tokens, non_blocking=True)


def to_device(numbers: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Without waiting for the device: the memory is pinned, and kept until the copy is done."""
    host = torch.from_numpy(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
