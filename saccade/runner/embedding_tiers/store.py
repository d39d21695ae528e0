"""What the tiers need of a place that outlives the process: a folder or a Valkey server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from saccade.runner.embedding_tiers.entry import Buffer


class BadEntry(Exception):
    """There is something under the name that no engine wrote in this form."""


class StoreError(Exception):
    """The store cannot be used now; one sentence says why, without secrets."""


class Store(Protocol):
    """Names are 64 hex digits. Every method may be called in several threads, and raise StoreError."""

    label: str  # of metrics
    where: str  # for the log
    evictions: int

    @property
    def used_bytes(self) -> int:
        """About; 0 where only the store itself knows."""

    def read(self, name: str, header: bytearray, buffers: Sequence[Buffer]) -> bool:
        """Fill header and buffers. False: there is no such entry. BadEntry: it has another size."""

    def write(self, name: str, header: bytes, buffers: Sequence[Buffer]) -> None:
        """Write the whole entry or nothing; another process may write the same entry."""

    def remove(self, name: str) -> None: ...

    def tidy(self) -> None:
        """Keep the limits, if the store does not do so itself."""

    def make_cold(self, name: str) -> None:
        """Let the next read come from where it lies, not from a cache of the system. For measurements."""

    def advice(self) -> str | None:
        """What the operator should know, for the log."""

    def close(self) -> None: ...
