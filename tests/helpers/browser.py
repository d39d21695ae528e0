"""A real Chromium for the page's tests and its screenshot: found on this machine, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "no Chromium is on the PATH; run tools/browser.sh, or install the package chromium, and run again"
PATIENCE_MS = 20_000  # only keeps a broken page from hanging the tests


def executable() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found is not None, MISSING
    return found


@contextmanager
def running_browser(*flags: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Root has no sandbox in Chromium; nothing but pages of our own is opened here.
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox", *flags])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser: Browser, url: str, script: str = "", **how: Any) -> Iterator[Page]:
    """The page in a profile of its own, after `script`. What its scripts throw or its policy forbids is a failure."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **how})
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(script)
    page = context.new_page()
    thrown: list[str] = []
    page.on("pageerror", lambda error: thrown.append(str(error)))
    page.on("console", lambda line: thrown.append(line.text) if "Content Security Policy" in line.text else None)
    try:
        page.goto(url)
        yield page
        assert not thrown, thrown
    finally:
        context.close()
