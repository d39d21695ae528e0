"""What tests of KV events share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from saccade.engine.ipc.kv_event_publisher import KVEventEndpoints


@pytest.fixture
def endpoints() -> Iterator[KVEventEndpoints]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        yield KVEventEndpoints(f"ipc://{folder}/events", f"ipc://{folder}/replay")
