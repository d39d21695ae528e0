"""The largest number of images in one request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from saccade.apps.bench.max_images import Attempt, find_max_images
from saccade.cli.main import main
from tests.helpers.fakes.fake_chat_server import fake_chat_server

GIVEN = ["--size", "16x16", "--tokens", "1", "--quiet"]


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 100, 127])
def test_the_number_is_exact_and_found_in_few_requests(limit: int) -> None:
    tried: list[int] = []

    def attempt(images: int) -> Attempt:
        tried.append(images)
        return Attempt(images, None if images <= limit else "400: too many", is_refusal=images > limit)

    found = find_max_images(attempt, 128)
    assert found.images == limit and found.limit == Attempt(limit + 1, "400: too many", True)
    assert len(tried) == len(set(tried)) <= 15


@pytest.mark.parametrize("up_to", [1, 5, 8])
def test_a_server_without_a_limit_is_tried_up_to_the_one_given(up_to: int) -> None:
    tried: list[int] = []

    def attempt(images: int) -> Attempt:
        tried.append(images)
        return Attempt(images, None)

    assert find_max_images(attempt, up_to) == (up_to, None)
    assert max(tried) == up_to and len(tried) == len(set(tried))


def test_the_command_prints_the_number_and_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_chat_server(max_images=5) as fake:
        given = ["--url", fake.url, *GIVEN, "--json", str(tmp_path / "a.json")]
        assert main(["bench", "most-images", *given]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "most images: 5; 6 refused: 400: 6 images were sent; 5 are allowed"
    counts = [len(body["messages"][0]["content"]) - 1 for body in fake.bodies]
    assert counts == [1, 2, 4, 8, 6, 5]
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["max_images"] == 5 and written["limit"]["images"] == 6


def test_a_server_that_breaks_is_not_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_chat_server(breaks_at=4) as fake:
        assert main(["bench", "most-images", "--url", fake.url, *GIVEN]) == 1
    assert "most images: 2; 4 failed, so the search ended: 500: out of memory" in capsys.readouterr().out
    assert len(fake.bodies) == 3


def test_a_server_that_takes_no_images_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_chat_server(max_images=0) as fake:
        assert main(["bench", "most-images", "--url", fake.url, *GIVEN]) == 1
    assert "most images: 0; 1 refused: 400" in capsys.readouterr().out


def test_no_more_than_allowed_are_tried(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_chat_server() as fake:
        assert main(["bench", "most-images", "--url", fake.url, *GIVEN, "--max-images", "3"]) == 0
    assert "most images: 3 or more; no more were tried (--max-images 3)" in capsys.readouterr().out


@pytest.mark.parametrize("flag", [["--rate", "2"], ["--goodput"], ["--beside", "2"]])
def test_flags_of_a_load_are_refused(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "most-images", *flag]) == 2
    assert f"leave out {flag[0]}" in capsys.readouterr().err
