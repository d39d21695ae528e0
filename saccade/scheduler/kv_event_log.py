"""What the prefix cache stores and evicts, in order, for routers outside of the server (`--kv-events`).

Unlike `cache_log.py`, which sums up, this keeps every change with the tokens of its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Medium = Literal["GPU", "CPU"]  # the device, whichever it is, and host memory: words of vLLM


@dataclass(slots=True)
class BlocksStored:
    """Blocks that follow each other."""

    medium: Medium
    parent: bytes | None  # digest of the block before the first one; None: that one begins a prompt
    digests: list[bytes]
    token_ids: list[int]  # of all blocks; none in host memory: the device had them before
    records: list[bytes]  # of each block, as in `Prompt.identity`; none in host memory


@dataclass(slots=True)
class BlocksRemoved:
    medium: Medium
    digests: list[bytes]


@dataclass(slots=True)
class BlocksCleared:
    """Of both media."""


KVEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KVEventLog:
    """Events since the last `take`. A step adds no more than it computes, restores and evicts."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = [BlocksCleared()]  # whatever an engine before this one had

    def stored(self, parent: bytes | None, digest: bytes, token_ids: list[int], records: bytes) -> None:
        match self._events:
            case [*_, BlocksStored(medium="GPU") as last] if last.digests[-1] == parent:
                last.digests.append(digest)
                last.token_ids += token_ids
                last.records.append(records)
            case _:
                self._events.append(BlocksStored("GPU", parent, [digest], token_ids, [records]))

    def offloaded(self, digest: bytes) -> None:
        match self._events:
            case [*_, BlocksStored(medium="CPU") as last]:
                last.digests.append(digest)
            case _:
                self._events.append(BlocksStored("CPU", None, [digest], [], []))

    def removed(self, medium: Medium, digest: bytes) -> None:
        match self._events:
            case [*_, BlocksRemoved() as last] if last.medium == medium:
                last.digests.append(digest)
            case _:
                self._events.append(BlocksRemoved(medium, [digest]))

    def clear(self) -> None:
        """All blocks are gone, and with them what was to be told."""
        self._events = [BlocksCleared()]

    def take(self) -> list[KVEvent]:
        events = self._events
        self._events = []
        return events
