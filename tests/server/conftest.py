"""What the tests of the page share: a browser, and a server with a key, each for one module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.helpers.servers.serving import RunningServer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one module: while Playwright runs, no other test of the process can start an event loop."""
    from tests.helpers.servers.browser import running_browser

    with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
def page_server() -> Iterator[RunningServer]:
    """With the built-in model. Tests of the page may hurt it."""
    from tests.helpers.servers.browser import KEY
    from tests.helpers.servers.serving import running_builtin

    with running_builtin("--api-key", KEY, "--limit-mm-per-prompt", "image=3", key=KEY) as running:
        yield running
