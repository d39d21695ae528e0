"""What both caches gain and lose, noted for the front door of several engines, which routes requests by it.

An entry is the first bytes of a block's digest or of an image's content key: both are SHA-256, so one set of
entries describes both caches. It is a hint: a wrong entry costs a request some speed and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

_ENTRY_BYTES = 8
MAX_CHANGES = 4096  # of one batch


def entry_of(digest: bytes) -> bytes:
    return digest[:_ENTRY_BYTES]


class CacheChanges(NamedTuple):
    is_reset: bool  # forget all earlier entries: they are gone, or there was too much to tell
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class CacheLog:
    """Changes since the last `take`; of an entry that came and went only the latest."""

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._max_changes = max_changes
        self._is_held: dict[bytes, bool] = {}
        self._is_reset = False

    def add(self, digest: bytes) -> None:
        self._note(digest, True)

    def remove(self, digest: bytes) -> None:
        self._note(digest, False)

    def reset(self) -> None:
        """All is gone."""
        self._is_held.clear()
        self._is_reset = True

    def _note(self, digest: bytes, is_held: bool) -> None:
        if len(self._is_held) >= self._max_changes:
            self.reset()
        self._is_held[entry_of(digest)] = is_held

    def take(self) -> CacheChanges | None:
        """None: nothing has changed."""
        if not self._is_held and not self._is_reset:
            return None
        added = tuple(entry for entry, is_held in self._is_held.items() if is_held)
        removed = tuple(entry for entry, is_held in self._is_held.items() if not is_held)
        changes = CacheChanges(self._is_reset, added, removed)
        self._is_held = {}
        self._is_reset = False
        return changes
