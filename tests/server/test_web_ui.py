"""The page at `/`, in a real Chromium, against `saccade serve` with the built-in model."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Page, expect

from tests.helpers.media.images import make_photo, png
from tests.helpers.servers.browser import (
    CUT_NUMBERS,
    DROP_VIDEO,
    HAS_KEY,
    NAMELESS,
    SQUARE,
    OpenPage,
    add_sample,
    answer,
    ask,
    damaged,
    drop_photo,
    give,
    held_back,
    tab_to,
)
from tests.helpers.servers.serving import RunningServer, as_url, image_part

pytestmark = pytest.mark.browser

RECEIPT = ["shop", "date", "total"]

# In the page: what stands in the latest answer, each time it changes.
WATCH_ANSWER = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const text = document.querySelector(".turn:last-child .said")?.textContent;
    if (text && text !== window.seen.at(-1)) window.seen.push(text);
  }).observe(document.getElementById("log"), { subtree: true, childList: true, characterData: true });
}"""


def wide(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth"))


# --- the bill -----------------------------------------------------------------------------------------------------


def test_a_sample_shows_its_tokens_and_the_grid_over_the_image(page: Page) -> None:
    add_sample(page)
    expect(page.locator("#caption")).to_contain_text("20 × 15 = 300 tokens")
    assert page.locator("#grid").get_attribute("viewBox") == "0 0 20 15"
    assert page.locator("#seen").get_attribute("aria-label") == "shapes.png as the model sees it, 320 × 240 pixels"


def test_another_sample_takes_the_place_of_the_last_and_leaves_own_pictures(page: Page) -> None:
    page.get_by_role("button", name="Pair").click()
    expect(page.locator("#bill-total")).to_contain_text("160 picture")
    page.get_by_role("button", name="Clip").click()
    expect(page.locator("#caption")).to_contain_text("8 frames of 192 × 160")
    expect(page.locator(".thumb")).to_have_count(1)
    drop_photo(page, 160, 160)
    page.get_by_role("button", name="Landscape").click()
    expect(page.locator(".thumb")).to_have_count(3)


def test_of_two_samples_clicked_in_a_row_the_latter_comes(page: Page) -> None:
    receipts = held_back(page, "**/static/receipt.png")
    with page.expect_request("**/static/receipt.png"):
        page.get_by_role("button", name="Receipt").click()
    page.get_by_role("button", name="Shapes").click()
    expect(page.locator("#bill-total")).to_contain_text("300 picture")
    with page.expect_response("**/static/receipt.png"):
        receipts[0].continue_()
    drop_photo(page, 160, 160, "own.png")
    expect(page.locator("#bill-total")).to_contain_text("400 picture")
    expect(page.locator(".thumb")).to_have_count(2)


def test_a_sample_that_cannot_be_loaded_gets_a_sentence(page: Page) -> None:
    page.route("**/static/receipt.png", lambda route: route.abort())
    page.get_by_role("button", name="Receipt").click()
    expect(page.locator("#pictures-problem")).to_contain_text("The server does not answer")


def test_a_dropped_image_costs_what_the_server_says(page: Page, page_server: RunningServer) -> None:
    drop_photo(page, 640, 480)
    part = image_part(as_url(png(make_photo(640, 480))))
    bill = page_server.post("/v1/bill", {"messages": [{"role": "user", "content": [part]}]}).json()
    total = f"{bill['prompt_tokens']} tokens = {bill['image_tokens']} picture + {bill['text_tokens']} text"
    expect(page.locator("#bill-total")).to_contain_text(total)
    expect(page.locator("#bill tbody")).to_contain_text("640 × 480")


def test_a_prompt_that_does_not_fit_is_told_before_it_is_asked(page: Page) -> None:
    page.get_by_label("Your question").fill("word " * 3000)
    expect(page.locator(".share.over")).to_contain_text("of the context: too long")


def test_a_pasted_image_is_added(page: Page) -> None:
    give(page, "paste", ("image.png", "image/png", png(make_photo(160, 160))))
    expect(page.locator("#bill-total")).to_contain_text("100 picture")


def test_fewer_pixels_are_fewer_tokens(page: Page) -> None:
    add_sample(page)
    page.get_by_label("Max pixels").fill("160")
    expect(page.locator("#pixels-value")).to_have_text("25,600")
    expect(page.locator("#bill-total")).to_contain_text("88 picture")
    expect(page.locator("#caption")).to_contain_text("11 × 8 = 88 tokens")


def test_the_chosen_detail_is_sent(page: Page) -> None:
    add_sample(page)
    with page.expect_request("**/v1/bill") as sent:
        page.get_by_label("Detail").select_option("low")
    assert sent.value.post_data_json["messages"][0]["content"][0]["image_url"]["detail"] == "low"


def test_a_removed_image_is_off_the_bill(page: Page) -> None:
    drop_photo(page, 160, 160, "one.png", seed=1)
    drop_photo(page, 160, 160, "two.png", seed=2)
    expect(page.locator("#bill-total")).to_contain_text("200 picture")
    page.get_by_role("button", name="Remove one.png").click()
    expect(page.locator("#bill-total")).to_contain_text("100 picture")


def test_a_video_is_shown_and_sent_as_a_video(page: Page) -> None:
    page.evaluate(DROP_VIDEO)
    expect(page.locator("#bill-total")).to_contain_text("video +")
    expect(page.locator("#clip")).to_have_attribute("src", re.compile("^blob:"))
    expect(page.locator("#caption")).to_contain_text(re.compile(r"\d+ frames of 160 × 128"))
    with page.expect_request("**/v1/bill") as sent:
        page.get_by_label("Most frames").fill("2")
    assert sent.value.post_data_json["mm_processor_kwargs"] == {"max_frames": 2}
    (part,) = sent.value.post_data_json["messages"][0]["content"]
    assert part["video_url"]["url"].startswith("data:video/webm")
    expect(page.locator("#caption")).to_contain_text("2 frames of 160 × 128")


def test_a_model_without_videos_gets_frames(open_one: OpenPage, page_server: RunningServer) -> None:
    models = page_server.get("/v1/models").json()
    models["data"][0]["multimodal"].update(video=None, limit_per_prompt={"image": 3, "video": 0})
    with open_one() as page:
        page.route("**/v1/models", lambda route: route.fulfill(json=models))
        page.evaluate(HAS_KEY)
        page.get_by_label("frames taken from a video").fill("2")
        page.get_by_role("button", name="Clip").click()
        expect(page.get_by_role("button", name="Show clip.webm")).to_have_count(2)
        expect(page.locator("#suggestions button")).to_have_count(3)
        expect(page.locator("#hint")).to_be_hidden()
        page.get_by_role("button", name="Shapes", exact=True).click()
        expect(page.locator(".thumb")).to_have_count(1)
        page.evaluate(DROP_VIDEO)
        expect(page.get_by_role("button", name="Show clip.webm")).to_have_count(2)


# --- asking -------------------------------------------------------------------------------------------------------


def test_the_answer_streams_and_is_right(page: Page) -> None:
    add_sample(page)
    page.evaluate(WATCH_ANSWER)
    ask(page, SQUARE)
    assert "blue" in answer(page)
    assert len(page.evaluate("window.seen")) > 2


def test_the_way_to_the_first_token_is_shown_in_parts(page: Page) -> None:
    add_sample(page)
    ask(page, SQUARE)
    cost = page.locator(".cost").last
    for stage in ("fetch", "queue", "decode", "encode", "prefill"):
        expect(cost.locator(".legend")).to_contain_text(re.compile(rf"{stage} [\d.]+ (ms|s)"))
    expect(cost).to_contain_text(re.compile(r"First token after [\d.]+ (ms|s)"))


def test_a_new_image_is_encoded_and_at_the_second_question_it_is_not(page: Page) -> None:
    drop_photo(page, 192, 160, seed=99)
    ask(page, "What is this?")
    expect(page.locator(".cost").first).to_contain_text("picture: decoded and encoded")
    ask(page, "And now?")
    second = page.locator(".cost").last
    expect(second).to_contain_text("picture: not decoded, not encoded again")
    expect(second).to_contain_text("prompt tokens from the prefix cache")


def test_a_suggested_question_is_asked_with_a_click(page: Page) -> None:
    add_sample(page)
    page.get_by_role("button", name="How many circles are there?").click()
    page.locator(".cost").wait_for()
    assert "2" in answer(page)


def test_the_engine_strip_shows_the_steps_of_an_answer(page: Page) -> None:
    add_sample(page)
    ask(page, SQUARE)
    expect(page.locator("#steps .answer").first).to_be_attached()
    expect(page.locator("#kv")).to_contain_text("cached of")
    expect(page.locator("#running")).to_have_text("0")


def test_starting_over_forgets_the_answers_and_keeps_the_image(page: Page) -> None:
    add_sample(page)
    ask(page, SQUARE)
    page.get_by_role("button", name="Start over").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#bill-total")).to_contain_text("300 picture")


def test_what_the_built_in_model_can_do_is_told_where_one_looks(page: Page) -> None:
    expect(page.locator("#welcome")).to_contain_text("It cannot recognise photographs")
    expect(page.locator("#sample")).to_have_class("primary")
    add_sample(page)
    expect(page.locator("#suggestions button")).to_have_count(3)
    drop_photo(page)
    expect(page.locator("#hint")).to_contain_text("About photographs it can only say")
    expect(page.locator("#suggestions")).to_be_hidden()


def test_settings_are_sent_and_kept_and_a_cut_answer_is_marked(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Length, tokens").fill("2")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("JSON schema of answers").fill('{"type": "object"}')
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello")
    body = sent.value.post_data_json
    assert (body["temperature"], body["max_tokens"]) == (0.5, 2)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    expect(page.locator(".cut")).to_have_text(
        "Cut off after 2 tokens: the length set. A larger one is in the settings."
    )
    page.reload()
    page.get_by_role("button", name="Settings (4)").click()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    page.get_by_label("JSON schema of answers").fill("[1]")
    expect(page.get_by_label("JSON schema of answers")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Your question").fill("Hello")
    page.keyboard.press("Enter")
    expect(page.locator("#talk-problem")).to_have_text("The JSON schema in the settings is no JSON object.")
    expect(page.get_by_label("Your question")).to_have_value("Hello")
    expect(page.locator(".turn")).to_have_count(0)


def streamed(*deltas: dict[str, str]) -> str:
    events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def test_a_receipt_is_asked_for_as_json_under_a_schema_that_is_shown(page: Page) -> None:
    body = streamed({"content": '{"shop": "Corner Shop"}'})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=damaged()), times=1)
    page.get_by_role("button", name="Receipt").click()
    page.get_by_role("button", name="Extract the data as JSON.").click()
    expect(page.locator("#talk-problem")).to_have_text("The picture is damaged.")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")  # the question that came back, under its schema
    asked = sent.value.post_data_json["response_format"]
    assert asked["type"] == "json_schema" and list(asked["json_schema"]["schema"]["properties"]) == RECEIPT
    expect(page.locator(".said.json")).to_have_text('{"shop": "Corner Shop"}')
    page.get_by_text("answered as JSON: shop, date, total").click()
    expect(page.locator(".asked pre")).to_contain_text('"total": {')
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="What is the total?").click()
    assert "response_format" not in sent.value.post_data_json


def test_thinking_is_folded_above_the_answer(page: Page) -> None:
    body = streamed(
        {"reasoning_content": "It is <b>blue</b>,"}, {"reasoning_content": " I think."}, {"content": "Blue."}
    )
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.get_by_label("Your question").fill(SQUARE)
    page.keyboard.press("Enter")
    expect(page.locator(".said")).to_have_text("Blue.")
    thinking = page.locator(".thinking p")
    expect(thinking).to_be_hidden()
    page.get_by_text(re.compile("^Thought for")).click()
    expect(thinking).to_have_text("It is <b>blue</b>, I think.")


def test_conversations_are_kept_as_texts_and_can_be_cleared(page: Page) -> None:
    add_sample(page)
    ask(page, SQUARE)
    page.reload()
    page.get_by_role("button", name="History").click()
    page.locator("#history-list .kept").click()
    expect(page.locator(".said")).to_contain_text("blue")
    expect(page.locator(".asked img")).to_have_count(1)
    add_sample(page)
    expect(page.locator(".said")).to_contain_text("blue")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And now?")
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == ["user", "assistant", "user"]
    page.get_by_role("button", name="History").click()
    expect(page.locator("#history-list .kept")).to_contain_text("2 questions")
    page.get_by_role("button", name="Clear all").click()
    expect(page.locator("#history-list")).to_contain_text("Nothing yet")
    assert page.evaluate("localStorage.getItem('saccade-history')") == "[]"


def test_operators_see_version_failures_and_hit_rates(page: Page, page_server: RunningServer) -> None:
    add_sample(page)
    ask(page, SQUARE)
    page_server.post("/v1/chat/completions", {"messages": []})
    page.get_by_role("link", name="Server").click()
    version = page_server.get("/version").json()["version"]
    expect(page.get_by_role("table", name="Server")).to_contain_text(f"version{version}")
    expect(page.get_by_role("table", name="Requests by reason")).to_contain_text(re.compile(r"failed\d"))
    expect(page.get_by_role("table", name="Caches")).to_contain_text(re.compile(r"prefix cache[\d.]+ %"))
    expect(page.locator("#server-workers-card")).to_be_hidden()  # an operator's key is told of workers, this is none
    page.set_viewport_size({"width": 390, "height": 844})
    assert wide(page) <= 390


# --- for everybody ------------------------------------------------------------------------------------------------


def test_it_can_be_used_with_the_keyboard_alone(page: Page) -> None:
    tab_to(page, "sample")
    page.keyboard.press("Enter")
    expect(page.locator("#bill-total")).to_contain_text("300 picture")
    tab_to(page, "question")
    page.keyboard.type(SQUARE)
    page.keyboard.press("Enter")
    page.locator(".cost").wait_for()
    assert "blue" in answer(page)


def test_the_focus_can_be_seen(page: Page) -> None:
    tab_to(page, "sample")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_shift_enter_begins_a_new_line(page: Page) -> None:
    question = page.get_by_label("Your question")
    question.focus()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(question).to_have_value("one\ntwo")
    assert page.locator(".turn").count() == 0


def test_escape_stops_and_gives_an_unanswered_question_back(page: Page) -> None:
    drop_photo(page, 320, 320, seed=5)
    page.route("**/v1/chat/completions", lambda route: None)  # an answer that does not come
    page.get_by_label("Your question").fill(SQUARE)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Ask")).to_be_visible()
    expect(page.get_by_label("Your question")).to_have_value(SQUARE)


def test_it_fits_small_and_large_screens(page: Page) -> None:
    ask(page, "Hello")
    drop_photo(page, 1280, 960, "a very long name of a picture from the mountains in the summer of 2026.png")
    expect(page.locator("#bill tbody")).to_contain_text("1,280 × 960")
    page.get_by_role("button", name="Settings").click()
    for width, height in [(360, 640), (390, 844), (820, 1180), (1366, 650), (1440, 900), (1920, 1080)]:
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate("scrollTo(0, 0)")
        assert wide(page) <= width, "nothing is wider than the screen"
        assert page.evaluate(CUT_NUMBERS) == [], f"at {width} pixels"
        bottom = page.evaluate("document.getElementById('question').getBoundingClientRect().bottom")
        assert bottom <= height, f"the question box is in sight at {width} x {height}"
        if width > 900:
            assert page.evaluate("document.documentElement.scrollHeight") <= height, "only the parts scroll"


def test_dark_follows_the_system_and_the_button_changes_it(open_one: OpenPage) -> None:
    with open_one(color_scheme="dark") as page:
        assert brightness(page) < 60
        page.get_by_role("button", name="Switch to light colours").click()
        assert brightness(page) > 200
        page.reload()
        assert brightness(page) > 200


def brightness(page: Page) -> float:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3


def test_every_control_has_a_name(page: Page) -> None:
    add_sample(page)
    ask(page, SQUARE)
    assert page.evaluate(NAMELESS) == []
