"""A real Chromium for the page's tests and its screenshot: found on this machine, driven by Playwright."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.helpers.media.images import make_photo, png

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "no Chromium is on the PATH; run tools/browser.sh, or install the package chromium, and run again"
PATIENCE_MS = 20_000  # only keeps a broken page from hanging the tests

# In the page: files made of base64, given to it as a drop or a paste would.
GIVE = """([kind, files]) => {
  const data = new DataTransfer();
  for (const [name, type, content] of files) {
    const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
  }
  const how = { bubbles: true, cancelable: true };
  const event = kind === "drop"
    ? new DragEvent("drop", { ...how, dataTransfer: data })
    : new ClipboardEvent("paste", { ...how, clipboardData: data });
  document.body.dispatchEvent(event);
}"""

# In the page: half a second of a canvas that turns from red to blue, recorded and dropped as a video.
DROP_VIDEO = """async () => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 160, height: 120 });
  const pen = canvas.getContext("2d");
  const recorder = new MediaRecorder(canvas.captureStream(30), { mimeType: "video/webm" });
  const parts = [];
  recorder.ondataavailable = (event) => parts.push(event.data);
  const stopped = new Promise((resolve) => { recorder.onstop = resolve; });
  recorder.start();
  for (let i = 0; i < 15; i += 1) {
    pen.fillStyle = i < 8 ? "red" : "blue";
    pen.fillRect(0, 0, 160, 120);
    await new Promise((resolve) => setTimeout(resolve, 33));
  }
  recorder.stop();
  await stopped;
  const data = new DataTransfer();
  data.items.add(new File(parts, "clip.webm", { type: "video/webm" }));
  document.body.dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: data }));
}"""

# In the page: controls that a screen reader would have no name for.
NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, [role=img], [tabindex]")]
  .filter((e) => e.offsetParent !== null)
  .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length || e.getAttribute("aria-labelledby")))
  .map((e) => e.outerHTML)"""

# In the page: numbers of the bill that stand outside its card.
CUT_NUMBERS = """() => {
  const right = (element) => element.getBoundingClientRect().right;
  const edge = right(document.getElementById("bill")) + 1;
  return [...document.querySelectorAll("#bill td")].filter((c) => right(c) > edge).map((c) => c.textContent);
}"""


KEY = "key-for-the-page"
SQUARE = "What colour is the square?"
HAS_KEY = f"sessionStorage.setItem('saccade-key', '{KEY}')"  # as if it had been typed in this tab before
OpenPage = Callable[..., AbstractContextManager[Page]]


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


def give(page: Page, kind: str, *files: tuple[str, str, bytes]) -> None:
    page.evaluate(GIVE, [kind, [(name, mime, base64.b64encode(data).decode()) for name, mime, data in files]])


def drop_photo(page: Page, width: int = 320, height: int = 240, name: str = "photo.png", seed: int = 0) -> None:
    give(page, "drop", (name, "image/png", png(make_photo(width, height, seed))))


def tab_to(page: Page, element: str) -> None:
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == element:
            return
    raise AssertionError(f"{element} is not reached with the Tab key")


def add_sample(page: Page) -> None:
    page.get_by_role("button", name="Try a sample").click()
    expect(page.locator("#bill-total")).to_contain_text("300 picture", timeout=PATIENCE_MS)


def ask(page: Page, question: str) -> None:
    """And wait for the answer's end."""
    number = page.locator(".cost").count()
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")
    page.locator(".cost").nth(number).wait_for()


def answer(page: Page) -> str:
    return page.locator(".said").last.inner_text()


def damaged(param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": "the picture is damaged", "param": param, "code": "image_parse_error"}}


def held_back(page: Page, path: str) -> list[Route]:
    """Requests for a path from now on, each waiting for what the test makes of it."""
    routes: list[Route] = []
    page.route(path, lambda route: routes.append(route))
    return routes
