"""An embedding outside the process: its name, and its bytes as a safetensors file. What is read is checked.

    | length of the header | JSON header | coordinates int64 [2, slots], if pruned | embedding [slots, width]

Slots, width and dtype are known before an entry is read. So size and header are known too, except for the
checksum, and anything else under the name is refused before a byte of it is used.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from saccade.costs import dtype_bytes
from saccade.media.hashing import digest_of
from saccade.types.media import Key, MediaItem, Size
from saccade.types.step import MediaTimes

EPOCH = 1
"""To be raised whenever the encoder computes other embeddings from the same image and weights."""

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ALIGNMENT = 8  # of the header
_CRC_DIGITS = 8

Ints = npt.NDArray[np.int64]
Buffer = memoryview  # of bytes


class Restored(NamedTuple):
    """An embedding that was made elsewhere, on the device."""

    embedding: Tensor  # [slots, width]
    coordinates: Ints | None  # [2, slots] of a pruned frame group
    times: MediaTimes | None = None  # None: a tier had it; else a worker has just encoded it


@dataclass(frozen=True, slots=True)
class Namespace:
    """What all embeddings of an engine have in common. Names of another model's entries are others."""

    width: int
    dtype: str
    weights: bytes  # digest of all tensors that encoding reads

    def name(self, key: Key) -> str:
        """The name of an image's entry. The content key has the tenant, the policy and the image's bytes."""
        fields = (b"embedding", str(EPOCH).encode(), self.dtype.encode(), self.weights, key)
        return digest_of(*fields).hex()

    def form(self, item: MediaItem) -> EntryForm:
        return EntryForm(item.geometry.slots, self.width, self.dtype, item.geometry.cells)


@dataclass(frozen=True, slots=True)
class EntryForm:
    """Size and header of one entry."""

    slots: int
    width: int
    dtype: str
    cells: Size | None = None  # columns and rows that a pruned frame group's coordinates lie in

    @property
    def embedding_bytes(self) -> int:
        return self.slots * self.width * dtype_bytes(self.dtype)

    @property
    def coordinate_bytes(self) -> int:
        return 0 if self.cells is None else 2 * self.slots * 8

    @property
    def header_bytes(self) -> int:
        return len(self.header("0" * 64, 0))

    @property
    def size(self) -> int:
        return self.header_bytes + self.coordinate_bytes + self.embedding_bytes

    def header(self, name: str, checksum: int) -> bytes:
        tensors = {}
        start = self.coordinate_bytes
        if start:
            tensors["coordinates"] = _tensor("I64", [2, self.slots], 0, start)
        shape = [self.slots, self.width]
        tensors["embedding"] = _tensor(_DTYPES[self.dtype], shape, start, start + self.embedding_bytes)
        metadata = {"format": "saccade-embedding", "name": name, "crc32": f"{checksum:0{_CRC_DIGITS}x}"}
        text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def is_valid(self, header: bytes, name: str, buffers: Iterable[Buffer]) -> bool:
        """Whether it is the header of this form and name, and the bytes are those that were written."""
        return header == self.header(name, checksum(buffers))

    def fits(self, coordinates: Ints | None) -> bool:
        """Whether all coordinates are cells of the frame group."""
        if self.cells is None:
            return coordinates is None
        if coordinates is None:
            return False
        limits = np.array([[self.cells.height], [self.cells.width]])
        return bool(((coordinates >= 0) & (coordinates < limits)).all())


def checksum(buffers: Iterable[Buffer]) -> int:
    """CRC-32: against damage, not against forgery. SHA-256 would take longer than some tiers take to read."""
    crc = 0
    for buffer in buffers:
        crc = zlib.crc32(buffer, crc)
    return crc


def _tensor(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
