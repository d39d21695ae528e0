"""What tests of a server share: what each leaves behind, the page at `/`, a browser and a server with a key."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.helpers.servers.browser import OpenPage
    from tests.helpers.servers.serving import RunningServer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one module: while Playwright runs, no other test of the process can start an event loop."""
    from tests.helpers.servers.browser import running_browser

    with running_browser() as running:
        yield running


@pytest.fixture(scope="session")
def page_server() -> Iterator[RunningServer]:
    """With the built-in model. A test that hurts it waits until it is well again."""
    from tests.helpers.servers.browser import KEY
    from tests.helpers.servers.serving import running_builtin

    with running_builtin("--api-key", KEY, "--limit-mm-per-prompt", "image=3", key=KEY) as running:
        yield running


@pytest.fixture
def open_one(page_server: RunningServer, browser: Browser) -> OpenPage:
    from tests.helpers.servers.browser import open_page

    return partial(open_page, browser, page_server.url)


@pytest.fixture
def page(open_one: OpenPage) -> Iterator[Page]:
    from playwright.sync_api import expect

    from tests.helpers.servers.browser import HAS_KEY, PATIENCE_MS

    with open_one(script=HAS_KEY) as page:
        expect(page.locator("#model")).not_to_be_empty(timeout=PATIENCE_MS)
        yield page


@pytest.fixture
def unharmed(server: RunningServer) -> Iterator[None]:
    """Whatever a test sends, the next request is answered and the engine holds nothing."""
    yield
    assert server.answers()
    assert server.stats("saccade:kv_blocks_used") == 0
