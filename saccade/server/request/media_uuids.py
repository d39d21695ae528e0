"""An LRU cache of media bytes by owner and uuid, so that clients need not send an image again."""

from __future__ import annotations

import threading
from collections import OrderedDict

MAX_UUID_CHARS = 256
_ENTRY_BYTES = 512  # overhead of an entry, which dominates with tiny images
_CHAR_BYTES = 4  # the maximum per character of a uuid


class UuidCache:
    """A uuid names bytes but does not identify an image: the bytes are hashed whenever they are used.

    An owner is the digest of a tenant and a salt (see `salt_of`). Other owners do not find its entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[bytes, str], bytes] = OrderedDict()
        self._lock = threading.Lock()  # prompts are built in threads

    def put(self, owner: bytes, uuid: str, data: bytes) -> None:
        """Replaces an entry of the same name. Bytes larger than the whole cache are not stored."""
        with self._lock:
            if (owner, uuid) in self._kept:
                self._bytes -= _cost(uuid, self._kept.pop((owner, uuid)))
            if _cost(uuid, data) > self._max_bytes:
                return
            self._kept[owner, uuid] = data
            self._bytes += _cost(uuid, data)
            while self._bytes > self._max_bytes:
                (_, oldest), dropped = self._kept.popitem(last=False)
                self._bytes -= _cost(oldest, dropped)

    def get(self, owner: bytes, uuid: str) -> bytes | None:
        with self._lock:
            data = self._kept.get((owner, uuid))
            if data is not None:
                self._kept.move_to_end((owner, uuid))
            return data


def _cost(uuid: str, data: bytes) -> int:
    return len(data) + len(uuid) * _CHAR_BYTES + _ENTRY_BYTES
