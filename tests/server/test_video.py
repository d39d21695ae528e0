"""Videos over HTTP: sent, fetched, named again, billed, and refused where they cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade import LLM, SamplingParams
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from saccade.server.api.models import video_card
from tests.helpers.media.images import make_photo, png
from tests.helpers.media.videos import film
from tests.helpers.servers.image_site import Site, running_site
from tests.helpers.servers.serving import (
    RunningServer,
    as_url,
    error_of,
    image_part,
    photo_part,
    running_server,
    text_part,
)

pytestmark = pytest.mark.transformers

FILM = film(20)
STILLS = "data:video/png;base64," + ",".join(as_url(png(make_photo(84, 56, i))).partition(",")[2] for i in range(3))
WHERE = "messages[0].content[0].video_url"

site = pytest.fixture(scope="module")(running_site)


@pytest.fixture(scope="module")
def server(qwen2_vl_folder: Path, site: Site) -> Iterator[RunningServer]:
    """It may fetch from this machine, takes videos of 10 seconds and at most 8 frames of each."""
    site.files["/film.mp4"] = FILM
    flags = ("--allowed-media-domains", f"127.0.0.1:{site.server_port}", "--allow-private-media-addresses")
    with running_server(qwen2_vl_folder, *flags, "--max-video-seconds", "10", "--max-video-frames", "8") as running:
        yield running


def video_part(url: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def ask(server: RunningServer, part: Any, **fields: Any) -> httpx.Response:
    return server.chat([part, text_part("What happens?")], include_bill=True, **fields)


def answer(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_a_video_is_answered_and_billed_as_one(server: RunningServer) -> None:
    body = ask(server, video_part(as_url(FILM, "video/mp4"))).json()
    (item,) = body["bill"]["items"]
    assert (item["kind"], item["frames"], item["tokens"], len(item["groups"])) == ("video", 4, 12, 2)
    details = body["usage"]["prompt_tokens_details"]
    assert (details["video_tokens"], details["image_tokens"]) == (12, 0)


def test_fetched_and_sent_are_the_same_video(server: RunningServer, site: Site) -> None:
    sent = ask(server, video_part(as_url(FILM, "video/mp4")))
    fetched = ask(server, video_part(site.url("/film.mp4")))
    assert answer(fetched) == answer(sent)
    assert fetched.json()["bill"]["items"][0]["key"] == sent.json()["bill"]["items"][0]["key"]


def test_a_video_can_be_named_again_by_its_uuid(server: RunningServer) -> None:
    first = ask(server, video_part(as_url(FILM, "video/mp4"), uuid="film"))
    assert answer(ask(server, {"type": "video_url", "video_url": None, "uuid": "film"})) == answer(first)


def test_a_url_used_as_a_image_and_as_a_video_is_fetched_under_the_limits_of_each(
    server: RunningServer, site: Site
) -> None:
    url, before = site.url("/film.mp4?both"), len(site.asked)
    response = server.chat([image_part(url), image_part(url), video_part(url), text_part("What happens?")])
    assert error_of(response)["param"] == "messages[0].content[0].image_url"
    assert site.asked[before:] == ["/film.mp4?both"] * 2


def test_a_uuid_without_a_video_says_that_a_video_is_missing(server: RunningServer) -> None:
    response = ask(server, {"type": "video_url", "video_url": None, "uuid": "never sent"})
    assert response.status_code == 400 and "no video is kept" in error_of(response)["message"]


def test_frames_may_be_sent_one_by_one(server: RunningServer) -> None:
    body = ask(server, video_part(STILLS)).json()
    assert body["bill"]["items"][0]["frames"] == 3


def test_a_video_stands_beside_a_image(server: RunningServer) -> None:
    parts = [photo_part(56, 56), video_part(as_url(FILM, "video/mp4")), text_part("Which?")]
    body = server.chat(parts, include_bill=True).json()
    assert [item["kind"] for item in body["bill"]["items"]] == ["image", "video"]


@pytest.mark.parametrize(
    "fields",
    [{"mm_processor_kwargs": {"num_frames": 2}}, {"media_io_kwargs": {"video": {"num_frames": 2}}}],
)
def test_a_client_may_ask_for_fewer_frames(server: RunningServer, fields: dict[str, Any]) -> None:
    body = ask(server, video_part(as_url(FILM, "video/mp4")), **fields).json()
    assert body["bill"]["items"][0]["frames"] == 2


@pytest.mark.parametrize("url", [as_url(FILM, "video/mp4"), STILLS], ids=["file", "frames"])
def test_a_pruned_video_is_billed_and_answered_as_in_one_process(
    server: RunningServer, qwen2_vl_folder: Path, url: str
) -> None:
    part, kwargs = video_part(url), {"video_pruning": 0.5}
    response = ask(server, part, mm_processor_kwargs=kwargs, temperature=0, max_tokens=12)
    item = response.json()["bill"]["items"][0]
    assert (item["tokens"], item["pruned"]) == (6 + 3, 3)
    llm = LLM(model=str(qwen2_vl_folder), max_model_len=512, kv_cache_gb=0.02, use_tqdm=False)
    chat = [{"role": "user", "content": [part, text_part("What happens?")]}]
    greedy = SamplingParams(temperature=0, max_tokens=12)
    (out,) = llm.chat(chat, greedy, mm_processor_kwargs=kwargs, use_tqdm=False)
    llm.close()
    assert answer(response) == out.outputs[0].text


@pytest.mark.parametrize(
    ("part", "fields", "words"),
    [
        (video_part(as_url(film(150), "video/mp4")), {}, "15 s, and at most 10 s"),
        (video_part(as_url(FILM[:300], "video/mp4")), {}, "damaged or cut short"),
        (video_part(as_url(b"text", "video/mp4")), {}, "MP4, MOV, WebM, MKV and AVI"),
        (video_part(as_url(FILM, "video/mp4")), {"mm_processor_kwargs": {"num_frames": 9}}, "from 1 to 8"),
        (video_part("https://example.com/a.mp4"), {}, "example.com"),
    ],
)
def test_what_cannot_be_used_is_refused(server: RunningServer, part: Any, fields: Any, words: str) -> None:
    response = ask(server, part, **fields)
    assert response.status_code == 400
    assert words in error_of(response)["message"]


def test_a_missing_video_is_called_a_video(server: RunningServer, site: Site) -> None:
    error = error_of(ask(server, video_part(site.url("/nothing"))))
    assert error["message"].startswith("the video could not be had") and error["param"] == WHERE


def test_two_videos_are_one_too_many(server: RunningServer) -> None:
    part = video_part(as_url(FILM, "video/mp4"))
    assert "at most 1 videos" in error_of(server.chat([part, part]))["message"]


def test_the_model_card_says_what_videos_may_be(server: RunningServer) -> None:
    card = server.get("/v1/models").json()["data"][0]["multimodal"]
    assert card["limit_per_prompt"]["video"] == 1
    assert (card["video"]["fps"], card["video"]["max_frames"], card["video"]["max_seconds"]) == (2.0, 8, 10.0)


@pytest.mark.parametrize("is_installed", [False, True])
def test_the_model_card_promises_files_only_where_they_can_be_read(
    qwen2_vl_folder: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    monkeypatch.setattr("saccade.media.video_file.find_spec", lambda name: object() if is_installed else None)
    videos = Processor(open_checkpoint(str(qwen2_vl_folder)), MediaPolicy.of(Options())).videos
    assert videos is not None
    card = video_card(videos)
    assert ("MP4" in card["formats"]) == bool(card["formats"]) == is_installed
    assert "video/jpeg" in card["frame_types"]
