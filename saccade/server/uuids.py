"""Pictures that clients may name again: bytes by tenant and uuid, the least recently used going first."""

from __future__ import annotations

import threading
from collections import OrderedDict

MAX_UUID_CHARS = 256


class UuidCache:
    """A uuid is a name for bytes, never an identity: the bytes are hashed again whenever they are used."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()  # prompts are built in threads

    def put(self, tenant: str, uuid: str, data: bytes) -> None:
        """Keep the bytes, replacing what had the same name. What is larger than the whole cache is not kept."""
        with self._lock:
            self._bytes -= len(self._kept.pop((tenant, uuid), b""))
            if len(data) > self._max_bytes:
                return
            self._kept[tenant, uuid] = data
            self._bytes += len(data)
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._kept.popitem(last=False)[1])

    def get(self, tenant: str, uuid: str) -> bytes | None:
        with self._lock:
            data = self._kept.get((tenant, uuid))
            if data is not None:
                self._kept.move_to_end((tenant, uuid))
            return data
