"""The page at `/` when something is wrong: each trouble is told in a sentence, and what was typed stays."""

from __future__ import annotations

import os
import re
import signal

import pytest
from playwright.sync_api import Page, expect

from tests.helpers.media.images import make_photo, png
from tests.helpers.servers.browser import (
    KEY,
    PATIENCE_MS,
    SQUARE,
    OpenPage,
    add_sample,
    answer,
    ask,
    damaged,
    drop_photo,
    give,
    held_back,
)
from tests.helpers.servers.serving import RunningServer

pytestmark = pytest.mark.browser


def test_a_file_that_is_no_image_gets_a_sentence(page: Page) -> None:
    give(page, "drop", ("notes.txt", "text/plain", b"hello"))
    problem = page.locator("#pictures-problem")
    expect(problem).to_contain_text("notes.txt is neither a picture nor a video. Pictures may be JPEG, PNG")


def test_a_broken_image_gets_the_servers_sentence_beside_it(page: Page) -> None:
    add_sample(page)
    give(page, "drop", ("broken.png", "image/png", b"\x89PNG\r\n\x1a\nnothing"))
    expect(page.locator("#pictures-problem")).to_contain_text(re.compile(r"^broken\.png: \w.*\.$"))
    expect(page.locator("#thumbs .bad")).to_have_attribute("title", "broken.png")


def test_a_broken_image_does_not_hold_the_others_up(page: Page) -> None:
    add_sample(page)
    give(page, "drop", ("broken.png", "image/png", b"\x89PNG\r\n\x1a\nnothing"))
    expect(page.locator("#thumbs .bad")).to_have_count(1)
    ask(page, SQUARE)
    assert "blue" in answer(page)
    page.get_by_role("button", name="Remove broken.png").click()
    expect(page.locator("#pictures-problem")).to_be_hidden()


def test_more_images_than_the_server_takes_get_a_sentence(page: Page) -> None:
    photos = [(f"{i}.png", "image/png", png(make_photo(64, 64, seed=i))) for i in range(4)]
    give(page, "drop", *photos)
    expect(page.locator("#pictures-problem")).to_contain_text("At most 3 pictures fit into one prompt here; 3.png")
    expect(page.locator(".thumb")).to_have_count(3)


def test_a_server_that_is_gone_is_told_and_the_question_stays(page: Page) -> None:
    add_sample(page)
    page.context.set_offline(True)
    expect(page.locator("#notice")).to_contain_text("The server does not answer")
    page.get_by_label("Your question").fill(SQUARE)
    page.keyboard.press("Enter")
    expect(page.locator("#talk-problem")).to_contain_text("The server does not answer. Nothing is lost")
    expect(page.get_by_label("Your question")).to_have_value(SQUARE)
    page.context.set_offline(False)
    expect(page.locator("#notice")).to_be_hidden()
    page.keyboard.press("Enter")
    page.locator(".cost").wait_for()
    assert "blue" in answer(page)


def test_an_error_of_the_server_is_a_sentence_and_the_question_stays(page: Page) -> None:
    words = "word " * 3000
    page.get_by_label("Your question").fill(words)
    page.keyboard.press("Enter")
    expect(page.locator("#talk-problem")).to_contain_text(re.compile(r"^The prompt has \d+ tokens.*\.$"))
    expect(page.get_by_label("Your question")).to_have_value(words.strip())


def test_a_late_bill_does_not_wipe_an_error_away(page: Page) -> None:
    add_sample(page)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=damaged()))
    bills = held_back(page, "**/v1/bill")
    page.get_by_label("Your question").fill(SQUARE)
    page.keyboard.press("Enter")  # the bill is asked for a moment after the last key, so it comes after this
    expect(page.locator("#talk-problem")).to_have_text("The picture is damaged.")
    page.unroute("**/v1/bill")
    for route in bills:
        route.continue_()
    expect(page.locator("#bill:not(.old)")).to_be_attached()
    expect(page.locator("#talk-problem")).to_have_text("The picture is damaged.")


def test_a_new_question_wipes_an_error_away(page: Page) -> None:
    add_sample(page)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=damaged()), times=1)
    page.get_by_label("Your question").fill(SQUARE)
    page.keyboard.press("Enter")
    expect(page.locator("#talk-problem")).to_have_text("The picture is damaged.")
    ask(page, SQUARE)
    expect(page.locator("#talk-problem")).to_be_hidden()


def test_an_error_is_not_blamed_on_a_image_that_was_not_sent(page: Page) -> None:
    drop_photo(page, 160, 160, "one.png", seed=1)
    drop_photo(page, 160, 160, "two.png", seed=2)
    expect(page.locator("#bill-total")).to_contain_text("200 picture")
    sent = held_back(page, "**/v1/chat/completions")
    page.get_by_label("Your question").fill(SQUARE)
    with page.expect_request("**/v1/chat/completions"):
        page.keyboard.press("Enter")
    page.get_by_role("button", name="Remove one.png").click()
    expect(page.locator("#bill-total")).to_contain_text("100 picture")
    sent[0].fulfill(status=400, json=damaged("messages[0].content[0].image_url"))
    expect(page.locator("#talk-problem")).to_have_text("The picture is damaged.")
    expect(page.locator("#thumbs .bad")).to_have_count(0)


def test_a_wrong_key_is_asked_for_again(open_one: OpenPage) -> None:
    with open_one() as page:
        page.get_by_placeholder("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-note")).to_contain_text("does not know this key")
        page.get_by_placeholder("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_contain_text("saccade-builtin")


def test_an_engine_that_dies_is_told_and_works_again(page: Page, page_server: RunningServer) -> None:
    add_sample(page)
    os.kill(page_server.children()[0], signal.SIGKILL)
    expect(page.locator("#state")).to_have_text("restarting")
    expect(page.locator("#notice")).to_contain_text("being started again")
    page.get_by_label("Your question").fill(SQUARE)
    page.keyboard.press("Enter")
    expect(page.locator("#talk-problem")).to_contain_text("The engine is restarting")
    expect(page.get_by_label("Your question")).to_have_value(SQUARE)
    expect(page.locator("#state")).to_have_text("ready", timeout=3 * PATIENCE_MS)
    page.keyboard.press("Enter")
    page.locator(".cost").wait_for()
    assert "blue" in answer(page)
