"""The tab "Plan" of the page at `/`, in a real Chromium, against `saccade serve` with the built-in model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.helpers.media.images import make_photo, png
from tests.helpers.servers.browser import (
    HAS_KEY,
    KEY,
    NAMELESS,
    PATIENCE_MS,
    OpenPage,
    drop_photo,
    give,
    open_page,
    tab_to,
)
from tests.helpers.servers.serving import RunningServer, chat_body, photo_part, text_part

pytestmark = pytest.mark.browser


@pytest.fixture
def open_one(page_server: RunningServer, browser: Browser) -> OpenPage:
    return partial(open_page, browser, f"{page_server.url}/#plan")


@pytest.fixture
def page(open_one: OpenPage) -> Iterator[Page]:
    with open_one(script=HAS_KEY) as page:
        has_plan(page)
        yield page


def has_plan(page: Page) -> None:
    expect(page.locator("#plan-words")).to_contain_text("requests/s", timeout=PATIENCE_MS)


def asks(page: Page, change: Callable[[], Any]) -> dict[str, Any]:
    """The body of the plan that is asked for after a change."""
    with page.expect_request("**/v1/plan") as sent:
        change()
    return dict(sent.value.post_data_json)


def field(page: Page, label: str) -> Any:
    return page.locator("#plan-part").get_by_label(label)


# --- the plan -----------------------------------------------------------------------------------------------------


def test_a_plan_is_there_without_a_click(page: Page) -> None:
    expect(page.locator("#plan-words")).to_contain_text(
        re.compile(r"^One H200 sustains [\d,.]+ requests/s; the limit is")
    )
    expect(page.locator("#chat-part")).to_be_hidden()
    expect(page.get_by_role("link", name="Plan")).to_have_attribute("aria-current", "page")


def test_dropped_images_are_read_for_their_sizes_and_not_sent(page: Page) -> None:
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.post_data or ""))
    sizes = [(640, 480), (640, 480), (320, 240)]
    photos = [(f"{i}.png", "image/png", png(make_photo(*size, seed=i))) for i, size in enumerate(sizes)]
    body = asks(page, lambda: give(page, "drop", *photos))
    assert body["image"] == ["640x480:2", "320x240:1"]
    expect(page.locator("#sizes")).to_contain_text("640 × 480 · 2 images")
    expect(page.get_by_role("table", name="Sizes of images")).to_contain_text("67 %")
    assert sent and all(len(data) < 1000 for data in sent)
    expect(page.locator("#thumbs li")).to_have_count(0)


def test_it_shows_what_the_server_says(page: Page, page_server: RunningServer) -> None:
    asks(page, lambda: field(page, "Requests/s").fill("5000"))
    body = asks(page, lambda: field(page, "GPU").first.select_option("l4"))
    plan = page_server.post("/v1/plan", body).json()
    assert plan["gpus"] > 1
    expect(page.locator(".lead")).to_contain_text(f"{plan['gpus']} × L4")
    changes = page.get_by_role("table", name="What would change")
    expect(changes.locator("tbody tr")).to_have_count(len(plan["alternatives"]))
    expect(changes).to_contain_text("Half the pixels")


def test_memory_and_first_token_are_bars_with_their_parts_in_words(page: Page) -> None:
    memory = page.get_by_role("img", name=re.compile("^Memory"))
    assert "KV cache" in (memory.get_attribute("aria-label") or "")
    first = page.get_by_role("img", name=re.compile("^First token")).get_attribute("aria-label") or ""
    assert all(stage in first for stage in ("wait", "decode and resize", "encode", "prefill"))


def test_a_gpu_may_be_given_by_numbers(page: Page) -> None:
    page.get_by_text("GPU by numbers").click()
    assert asks(page, lambda: field(page, "Memory, GiB").fill("40"))["gpu_memory_gib"] == 40
    expect(page.locator("#plan-figures")).to_contain_text("of 40.0 GiB")


def test_a_size_may_be_typed_and_removed(page: Page) -> None:
    field(page, "Or a size").fill("800 x 600")
    assert asks(page, lambda: page.keyboard.press("Enter"))["image"] == ["800x600:1"]
    assert asks(page, page.get_by_role("button", name="Remove 800x600").click)["image"] == []


# --- when something is wrong --------------------------------------------------------------------------------------


def test_what_the_server_refuses_is_a_sentence_and_marks_the_field(page: Page) -> None:
    images = field(page, "Images a request")
    images.fill("9")
    expect(page.locator("#plan-problem")).to_contain_text("Images 9 is above limit_mm_per_prompt image=3")
    expect(images).to_have_attribute("aria-invalid", "true")
    images.fill("2")
    expect(page.locator("#plan-problem")).to_be_hidden()
    expect(images).not_to_have_attribute("aria-invalid", "true")


def test_a_value_out_of_range_is_named_by_its_label(page: Page) -> None:
    field(page, "Images seen before, %").fill("300")
    expect(page.locator("#plan-problem")).to_contain_text("Images seen before, %: ")


def test_a_file_that_is_no_image_gets_a_sentence(page: Page) -> None:
    give(page, "drop", ("notes.txt", "text/plain", b"hello"))
    expect(page.locator("#size-problem")).to_contain_text("notes.txt is no image that this browser can read")


def test_a_size_that_is_none_gets_a_sentence(page: Page) -> None:
    field(page, "Or a size").fill("large")
    page.keyboard.press("Enter")
    expect(page.locator("#size-problem")).to_contain_text("“large” is no size. Write width x height")


def test_the_plan_comes_once_the_key_is_given(open_one: OpenPage) -> None:
    with open_one() as page:
        page.get_by_placeholder("API key").fill(KEY)
        page.keyboard.press("Enter")
        has_plan(page)


# --- the last hour ------------------------------------------------------------------------------------------------


def test_the_last_hour_stands_beside_the_plan_and_can_be_planned_for(
    open_one: OpenPage, page_server: RunningServer
) -> None:
    body = chat_body([photo_part(seed=1), photo_part(seed=2), text_part("?")], max_tokens=7, ignore_eos=True)
    assert page_server.post("/v1/chat/completions", {**body, "model": None}).status_code == 200
    measured = page_server.get("/v1/plan/measured").json()
    with open_one(script=HAS_KEY) as page:
        has_plan(page)
        expect(page.locator("#hour-words")).to_contain_text(re.compile("requests? ended in the"))
        row = page.get_by_role("table", name="The plan and the last hour").get_by_role(
            "row", name=re.compile("^tokens out")
        )
        expect(row).to_contain_text("128")
        asked = asks(page, page.get_by_role("button", name="Plan for this load").click)
    typical = {name: int(mean + 0.5) for name, mean in measured["per_request"].items()}  # others use this server, too
    assert asked["images"] == typical["images"] > 0 and asked["output_tokens"] == typical["output_tokens"] > 0
    assert asked["input_tokens"] == typical["text_tokens"]
    assert asked["rate"] == pytest.approx(measured["max_requests_per_s"], rel=0.01)


# --- for everybody ------------------------------------------------------------------------------------------------


def test_the_tabs_are_reached_with_the_keyboard_and_the_chat_stays_as_it_was(page: Page) -> None:
    tab_to(page, "to-chat")
    page.keyboard.press("Enter")
    expect(page.locator("#chat-part")).to_be_visible()
    drop_photo(page, 160, 160, "one.png")
    expect(page.locator("#bill-total")).to_contain_text("100 picture")
    tab_to(page, "to-plan")
    page.keyboard.press("Enter")
    has_plan(page)
    expect(page.locator("#chat-part")).to_be_hidden()
    page.go_back()
    expect(page.locator("#bill-total")).to_contain_text("100 picture")


def test_every_control_of_the_plan_has_a_name(page: Page) -> None:
    drop_photo(page)
    page.get_by_text("GPU by numbers").click()
    expect(page.get_by_role("button", name="Remove 320x240")).to_be_visible()
    assert page.evaluate(NAMELESS) == []


def test_no_part_of_the_plan_is_wider_than_the_screen(page: Page) -> None:
    drop_photo(page, 1280, 720)
    page.get_by_text("GPU by numbers").click()
    for width in (390, 820, 1366, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
