"""Resident embeddings in one piece of device memory, taken at the start. The scheduler decides which keys are here.

    rows of the slab     [ a a a b b . . a a c c . ]      a picture's rows need not lie side by side

Whatever comes and goes, nothing is allocated and nothing is fragmented but the order of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.runner.cuda.staging import to_device
from saccade.types import Key

_REHEARSED = 512  # rows; for a few the library has other kernels


class _Place(NamedTuple):
    rows: npt.NDArray[np.int64]
    on_device: Tensor  # the same on the device


class EmbeddingSlab(MutableMapping[Key, Tensor]):
    """Behaves like a dict of tensors [slots, width]; what is read is a copy."""

    def __init__(self, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.zeros(slots, width, dtype=dtype, device=device)
        self._free = np.arange(slots)  # the first `_left` of them
        self._left = slots
        self._places: dict[Key, _Place] = {}
        self._outside: dict[Key, Tensor] = {}  # what the slab had no room for

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Write, read and splice as for a picture: the library loads its kernels now, not while answers wait."""
        some = self.memory.new_zeros(min(_REHEARSED, self._left), self.memory.shape[1])
        self[b""] = some
        some[1:] = self[b""][1:]
        del self[b""]

    def __setitem__(self, key: Key, embeddings: Tensor) -> None:
        if key in self:
            del self[key]
        if len(embeddings) > self._left:  # the scheduler counts the same slots, so this is only ever a moment's overlap
            self._outside[key] = embeddings
            return
        self._left -= len(embeddings)
        rows = self._free[self._left : self._left + len(embeddings)].copy()
        place = _Place(rows, to_device(rows, self.memory.device))
        self.memory.index_copy_(0, place.on_device, embeddings)
        self._places[key] = place

    def __getitem__(self, key: Key) -> Tensor:
        outside = self._outside.get(key)
        return outside if outside is not None else self.memory.index_select(0, self._places[key].on_device)

    def __delitem__(self, key: Key) -> None:
        if self._outside.pop(key, None) is not None:
            return
        rows = self._places.pop(key).rows
        self._free[self._left : self._left + len(rows)] = rows
        self._left += len(rows)

    def __contains__(self, key: object) -> bool:  # without reading what is there
        return key in self._places or key in self._outside

    def __iter__(self) -> Iterator[Key]:
        yield from self._places
        yield from self._outside

    def __len__(self) -> int:
        return len(self._places) + len(self._outside)
