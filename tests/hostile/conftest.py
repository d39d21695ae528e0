"""A server that several of these tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.servers.serving import RunningServer


@pytest.fixture(scope="session")
def apart(qwen2_vl_folder: Path) -> Iterator[RunningServer]:
    """Two keys, whose caches are apart; few schemas may wait for a check."""
    from tests.helpers.servers.hostile import ALICE, KEYS, MAX_SCHEMA_CHECKS
    from tests.helpers.servers.serving import running_server

    limits = ("--max-body-mb", "32", "--max-inflight-mb", "32", "--max-client-share", "1")
    limits += ("--max-schema-checks", str(MAX_SCHEMA_CHECKS))
    with running_server(qwen2_vl_folder, *KEYS, *limits, key=ALICE) as server:
        yield server
