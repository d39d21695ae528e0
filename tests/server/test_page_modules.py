"""Modules of the page, each alone in a real Chromium: no server runs."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from playwright.sync_api import Page, Route

from saccade.server.web_ui import page_file
from tests.helpers.servers.browser import open_page, running_browser

pytestmark = pytest.mark.browser

HOME = "http://page.test/"
NAME = "it's $(a)\\.png"
DATA = b"what a file has"
URL = "data:image/png;base64," + base64.b64encode(DATA).decode()
BODY = {
    "model": "m",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": URL}},
                {"type": "text", "text": 'What\'s `this` \\ $HOME "here"?\nEOF\n'},
            ],
        }
    ],
    "mm_processor_kwargs": {"max_pixels": 100},
    "temperature": 0.5,
    "response_format": {"schema": {"$defs": {}, "properties": {"a`b": {}, "$(id)": True}}},
}

# In the page: two files given at once where one fits, and all removed while a third is being read.
ADD_AT_ONCE = """async (m) => {
  const file = (name) => new File(["x"], name, { type: "image/png" });
  const taken = (image) => ({ most: { image, video: 0 }, maxBytes: { image: 9, video: 9 } });
  const pictures = new m.Pictures();
  const seen = [pictures.isSample];
  seen.push(await Promise.all(["a", "b"].map((name) => pictures.add([file(name)], taken(1)))));
  const third = pictures.add([file("c")], taken(2));
  for (let turn = 0; turn < 20; turn += 1) await null; // until the file is being read
  pictures.clear();
  await third;
  return [...seen, pictures.list.map(({ name }) => name)];
}"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    def answer(route: Route) -> None:
        if route.request.url == HOME:
            route.fulfill(
                body="<button id='history-clear'></button><ul id='history-list'></ul>", content_type="text/html"
            )
            return
        response = page_file(route.request.url.rpartition("/")[2])
        kind = response.headers["content-type"]
        route.fulfill(body=response.body, content_type=kind)  # type: ignore[arg-type]

    with running_browser() as browser, open_page(browser, "about:blank") as page:
        page.route("http://page.test/**", answer)
        page.goto(HOME)
        yield page


def call(page: Page, module: str, expression: str, given: Any = None) -> Any:
    """`expression` of what a module exports, as `m`, and of `given`."""
    return page.evaluate(
        f"async (given) => {{ const m = await import('/static/{module}'); return {expression} }}", given
    )


def program(page: Page, kind: str, name: str = NAME) -> str:
    given = {"body": BODY, "files": {URL: name}, "base": "http://h/v1", "hasKey": True}
    expression = f"m.{kind}({{ ...given, files: new Map(Object.entries(given.files)) }})"
    return str(call(page, "snippets.js", expression, given))


def piped(shell: str, folder: Path) -> str:
    """What the shell would hand to curl."""
    run = subprocess.run(["sh"], input=f"curl() {{ cat; }}\n{shell}", cwd=folder, capture_output=True, text=True)
    return run.stdout


def test_a_request_as_curl_sends_the_same_body(page: Page, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    shell = program(page, "asCurl")
    assert json.loads(piped(shell, tmp_path)) == BODY
    assert '"Authorization: Bearer $SACCADE_API_KEY"' in shell


def test_a_file_name_cannot_end_the_text_for_the_shell(page: Page, tmp_path: Path) -> None:
    piped(program(page, "asCurl", "x'\nEOF\ntouch made\n"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_request_as_python_sends_the_same_body(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SACCADE_API_KEY", "k")
    client = MagicMock()
    monkeypatch.setitem(sys.modules, "openai", Mock(OpenAI=client))
    exec(program(page, "asPython"), {})
    assert client.call_args.kwargs == {"base_url": "http://h/v1", "api_key": "k"}
    sent = dict(client.return_value.chat.completions.create.call_args.kwargs)
    assert {**sent.pop("extra_body"), **sent} == BODY


def test_pictures_that_are_added_at_once_are_all_counted_and_none_comes_back(page: Page) -> None:
    is_sample, problems, names = call(page, "pictures.js", f"({ADD_AT_ONCE})(m)")
    assert not is_sample
    assert problems == [[], ["At most 1 picture fit into one prompt here; b was left out."]]
    assert names == ["c"]


def test_a_history_that_grows_too_large_loses_its_oldest(page: Page) -> None:
    turns = [{"question": "x" * 300_000, "answer": "", "previews": []}]
    for name in "abcd":
        call(page, "history.js", "new m.History().put(given)", {"id": name, "at": 0, "turns": turns})
    kept = json.loads(page.evaluate("localStorage.getItem('saccade-history')"))
    assert [conversation["id"] for conversation in kept] == ["d", "c", "b"]


@pytest.mark.parametrize(
    ("picture", "about", "questions"),
    [
        ({"kind": "image", "questions": ["Own?"]}, {"what": "a small one"}, 1),
        ({"kind": "image", "questions": None}, {"what": "a small one"}, 0),
        ({"kind": "image", "questions": None}, None, 3),
        ({"kind": "video", "questions": None}, None, 2),
        (None, None, 0),
    ],
)
def test_questions_are_suggested_where_the_model_may_know(
    page: Page, picture: dict[str, Any] | None, about: dict[str, str] | None, questions: int
) -> None:
    given = [picture, {"id": "m", "about": about}]
    assert len(call(page, "about.js", "m.questionsFor(...given)", given)) == questions
