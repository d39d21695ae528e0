"""Resident embeddings in one slab of device memory. The scheduler decides which keys are resident.

    rows of the slab     [ a a a b b . . a a c c . ]      an image's rows need not be contiguous

A row is one slot, or with cross-attention the slots of one state: its keys and values in every layer.

Nothing is allocated after start, so memory does not fragment.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.runner.cuda.staging import to_device
from saccade.types.media import Key

_WARM_UP_ROWS = 512  # PyTorch has other kernels for only a few


class _SlabRows(NamedTuple):
    host: npt.NDArray[np.int64]
    device: Tensor  # the same


class EmbeddingSlab(MutableMapping[Key, Tensor]):
    """A dict of tensors [slots, width]; reading copies. `slots_per_row` divides all numbers of slots."""

    def __init__(
        self, slots: int, width: int, dtype: torch.dtype, device: torch.device, slots_per_row: int = 1
    ) -> None:
        rows = slots // slots_per_row
        self.width = width
        self.memory = torch.zeros(rows, slots_per_row * width, dtype=dtype, device=device)
        self._free = np.arange(rows)  # the first `_left` of them
        self._left = rows
        self._rows: dict[Key, _SlabRows] = {}
        self._outside: dict[Key, Tensor] = {}  # what did not fit

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Write, read and splice as for an image, so that PyTorch loads its kernels now."""
        rows = self.memory.new_zeros(min(_WARM_UP_ROWS, self._left), self.memory.shape[1])
        rows = rows.view(-1, self.width)
        self[b""] = rows
        rows[1:] = self[b""][1:]
        del self[b""]

    def __setitem__(self, key: Key, embeddings: Tensor) -> None:
        if key in self:
            del self[key]
        packed = embeddings.reshape(-1, self.memory.shape[1])
        if len(packed) > self._left:  # the scheduler counts the same slots, so this is only for a moment
            self._outside[key] = embeddings
            return
        self._left -= len(packed)
        host = self._free[self._left : self._left + len(packed)].copy()
        rows = _SlabRows(host, to_device(host, self.memory.device))
        self.memory.index_copy_(0, rows.device, packed)
        self._rows[key] = rows

    def __getitem__(self, key: Key) -> Tensor:
        outside = self._outside.get(key)
        if outside is not None:
            return outside
        return self.memory.index_select(0, self._rows[key].device).view(-1, self.width)

    def rows(self, key: Key) -> Tensor:
        """Where an image's rows lie in `memory`: int64, on the device."""
        outside = self._outside.get(key)
        if outside is not None:
            self[key] = outside
        assert key in self._rows, "an image that is attended to is among those the scheduler has room for"
        return self._rows[key].device

    def __delitem__(self, key: Key) -> None:
        if self._outside.pop(key, None) is not None:
            return
        rows = self._rows.pop(key).host
        self._free[self._left : self._left + len(rows)] = rows
        self._left += len(rows)

    def __contains__(self, key: object) -> bool:  # the default would copy
        return key in self._rows or key in self._outside

    def __iter__(self) -> Iterator[Key]:
        yield from self._rows
        yield from self._outside

    def __len__(self) -> int:
        return len(self._rows) + len(self._outside)
