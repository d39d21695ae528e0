"""The page's files and the engine's view as any client gets them; no browser, no model worth asking."""

from __future__ import annotations

import re

import pytest

from tests.helpers.servers.serving import RunningServer, chat_body, events_of, photo_part, until


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), ("/static/main.js", "text/javascript"), ("/static/page.css", "text/css")],
)
def test_each_file_has_its_type_and_a_policy_that_allows_nothing_from_outside(
    server: RunningServer, path: str, kind: str
) -> None:
    headers = server.get(path).headers
    assert headers["content-type"].startswith(kind)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "http" not in policy and "*" not in policy


def test_answers_of_the_api_keep_a_policy_that_allows_nothing(server: RunningServer) -> None:
    assert "script-src" not in server.get("/v1/models").headers["content-security-policy"]


def test_every_file_that_the_page_names_is_served(server: RunningServer) -> None:
    waiting, seen = ["index.html"], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        text = server.get(f"/static/{name}").text
        named = re.findall(r'(?:from "\./|(?:src|href)="static/)([\w.]+)"', text)
        waiting += [other for other in named if other not in seen]
    assert {"main.js", "page.css", "icon.svg", "frames.js"} <= seen


def test_the_page_has_no_inline_script_and_no_inline_style(server: RunningServer) -> None:
    html = server.get("/").text
    assert re.findall(r"<script(?![^>]*src=)", html) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", html) == []


@pytest.mark.parametrize("name", ["nothing.js", "..%2fweb_ui.py", "%2e%2e/web_ui.py", "web_ui.py"])
def test_nothing_but_the_pages_files_is_under_static(server: RunningServer, name: str) -> None:
    assert server.get(f"/static/{name}").status_code == 404


def test_watching_the_engine_does_not_fill_the_log(server: RunningServer) -> None:
    server.get("/v1/engine")
    server.get("/version")
    assert until(lambda: any(" GET /version 200" in line for line in server.log))
    assert not any("/v1/engine 200" in line for line in server.log)


def test_the_engine_view_tells_what_the_latest_steps_did(server: RunningServer) -> None:
    server.chat([photo_part(224, 224, seed=70)], max_tokens=4, ignore_eos=True)
    view = server.get("/v1/engine").json()
    assert view["state"] == "ready" and view["stats"]["running"] == 0 and view["tokens"]["answer"] >= 4
    assert "encoder_cache" in view["stats"] and "encoder_cache_tenants" not in view["stats"], "every key may read it"
    steps = view["recent_steps"]
    assert sum(step["image_tokens"] for step in steps) >= 64 and any(step["encodes"] for step in steps)
    assert sum(step["decode_tokens"] for step in steps) >= 3


def test_the_engine_view_counts_requests_by_how_they_ended(server: RunningServer) -> None:
    before = server.get("/v1/engine").json()["requests"]
    server.chat("Hello", max_tokens=2, ignore_eos=True)
    server.chat("Hello", max_tokens=-1)
    view = server.get("/v1/engine").json()
    assert view["version"] == server.get("/version").json()["version"] and view["uptime_s"] >= 0
    assert view["requests"]["answered"]["length"] == before["answered"].get("length", 0) + 1
    assert sum(view["requests"]["failed"].values()) == sum(before["failed"].values()) + 1


def test_only_the_built_in_model_is_described(server: RunningServer) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert card["about"] is None, "the fixture's model is a random one"


def test_a_streamed_bill_comes_with_the_last_chunk(server: RunningServer) -> None:
    body = chat_body([photo_part(seed=71)], stream=True, include_bill=True)
    *chunks, last, _ = events_of(server.post("/v1/chat/completions", body).text.split("\n"))
    assert last["bill"]["image_tokens"] > 0 and not any("bill" in chunk for chunk in chunks)


def test_the_parts_of_the_first_token_time_add_up_to_it(server: RunningServer) -> None:
    times = server.chat([photo_part(448, 448, seed=72)], include_bill=True).json()["bill"]["times_ms"]
    assert times["encode"] > 0 and times["prefill"] > 0
    parts = sum(times[name] for name in ("queue", "decode", "encode", "prefill"))
    assert parts == pytest.approx(times["first_token"], abs=0.01)


def test_the_bill_says_which_images_were_at_hand(server: RunningServer) -> None:
    def cached(*seeds: int) -> list[bool]:
        bill = server.chat([photo_part(seed=seed) for seed in seeds], include_bill=True).json()["bill"]
        return [item["cached"] for item in bill["items"]]

    assert cached(73) == [False]
    assert cached(73, 74) == [True, False]


def test_a_bill_that_nothing_was_run_for_does_not_guess_about_caches(server: RunningServer) -> None:
    (item,) = server.post("/v1/bill", chat_body([photo_part(640, 480)])).json()["items"]
    assert item["cached"] is None and item["grid"] == [1, 34, 46]
