"""Tiers of embeddings of width 8 on the CPU, without measurements: everything pays."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.runner.embedding_tiers.entry import Buffer, Namespace
from saccade.runner.embedding_tiers.host import HostTier
from saccade.runner.embedding_tiers.rates import EmbeddingTime
from saccade.runner.embedding_tiers.store import Store, StoreError
from saccade.runner.embedding_tiers.tiers import EmbeddingTiers
from saccade.runner.embedding_tiers.valkey import ValkeyStore
from saccade.types.media import Geometry, Grid, Header, MediaItem, Size

WIDTH = 8
SLOW = EmbeddingTime(1.0, 0.0)
FREE = EmbeddingTime(0.0, 0.0)
CPU = torch.device("cpu")


def item(slots: int = 4, key: bytes | None = None, cells: Size | None = None) -> MediaItem:
    geometry = Geometry(Size(8, 8), Grid(1, 4, 4), slots, slots, cells=cells)
    header = Header("rgb", Size(8, 8), 1, 1, "RGB")
    return MediaItem(key or secrets.token_bytes(32), "image", b"", header, geometry)


def embedding(slots: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(slots, WIDTH, generator=torch.Generator().manual_seed(seed))


def joined(parts: Sequence[Tensor], size: int) -> Tensor:
    return torch.cat(tuple(parts))


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an answer counts, however busy the machine is."""
    monkeypatch.setattr(EmbeddingTiers, "read_seconds", 60.0)
    monkeypatch.setattr(EmbeddingTiers, "close_seconds", 60.0)
    monkeypatch.setattr(ValkeyStore, "seconds", 60.0)


@contextmanager
def open_tiers(
    store: Store | None = None,
    host_bytes: int = 1 << 16,
    weights: bytes = b"w",
    is_open: bool = True,
    **how: Any,
) -> Iterator[EmbeddingTiers]:
    host = HostTier(host_bytes, CPU, page_bytes=64)
    tiers = EmbeddingTiers(host, store, Namespace(WIDTH, "float32", weights), **how)
    if is_open:
        tiers.open(SLOW, FREE, FREE)
    yield tiers
    tiers.close()
    host.check()


class MemoryStore:
    """A store in memory that does as it is told."""

    label = "fake"
    where = "memory"
    evictions = used_bytes = 0

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.fails = False
        self.before_read: Callable[[], object] = lambda: None
        self.before_write: Callable[[], object] = lambda: None

    def read(self, name: str, header: bytearray, buffers: Sequence[Buffer]) -> bool:
        self.before_read()
        self._may_fail()
        if name not in self.entries:
            return False
        data = self.entries[name]
        for target in (memoryview(header), *buffers):
            target[:] = data[: len(target)]
            data = data[len(target) :]
        return True

    def write(self, name: str, header: bytes, buffers: Sequence[Buffer]) -> None:
        self.before_write()
        self._may_fail()
        self.entries[name] = b"".join([header, *buffers])

    def remove(self, name: str) -> None:
        self._may_fail()
        self.entries.pop(name, None)

    def tidy(self) -> None: ...

    def make_cold(self, name: str) -> None: ...

    def advice(self) -> str | None:
        return None

    def close(self) -> None: ...

    def _may_fail(self) -> None:
        if self.fails:
            raise StoreError("it failed")
