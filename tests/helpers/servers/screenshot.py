"""Makes the README's image of the page.

python -m tests.helpers.servers.screenshot docs/page.png [--dark] [--width 1400]
"""

from __future__ import annotations

import argparse

from playwright.sync_api import Page

from tests.helpers.servers.browser import open_page, running_browser
from tests.helpers.servers.serving import running_builtin

QUESTIONS = ("Extract the data as JSON.", "What is the total?")


def talk(page: Page) -> None:
    """A receipt, two questions about it, and the engine's strip with their steps."""
    page.locator("#state", has_text="ready").wait_for()
    page.get_by_role("button", name="Receipt").click()
    page.locator("#bill-total").wait_for()
    for number, question in enumerate(QUESTIONS, start=1):
        page.get_by_role("button", name=question).click()
        page.locator(".cost").nth(number - 1).wait_for()
    page.mouse.move(0, 0)
    page.wait_for_timeout(1500)  # the engine tells its steps twice a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, default=1000)
    given = parser.parse_args()
    how = {
        "viewport": {"width": given.width, "height": given.height},
        "device_scale_factor": 1.5,
        "color_scheme": "dark" if given.dark else "light",
    }
    with running_builtin() as server, running_browser() as browser, open_page(browser, server.url, **how) as page:
        talk(page)
        page.screenshot(path=given.file, full_page=given.width < 800)


if __name__ == "__main__":
    main()
