"""Videos that a load makes."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random

import av
import numpy as np
import pytest

from saccade.apps.bench.video import check_av
from saccade.apps.bench.workloads import WORKLOADS, RequestShape
from saccade.cli.main import main
from saccade.errors import ConfigError
from tests.helpers.fakes.fake_chat_server import fake_chat_server

SHAPE = RequestShape("fake", sizes=((63, 48), (32, 32)), frames=5, fps=4)


def videos_in(body: bytes) -> list[list[np.ndarray]]:
    parts = json.loads(body)["messages"][0]["content"]
    urls = [part["video_url"]["url"] for part in parts if part["type"] == "video_url"]
    assert all(url.startswith("data:video/mp4;base64,") for url in urls)
    files = [io.BytesIO(base64.b64decode(url.partition(",")[2])) for url in urls]
    return [[frame.to_ndarray(format="rgb24") for frame in av.open(file).decode(video=0)] for file in files]


def test_a_video_has_its_frames_and_all_differ() -> None:
    job = WORKLOADS["video"](SHAPE, 0, random.Random(0))
    (frames,) = videos_in(job.bodies[0])
    assert [frame.shape for frame in frames] == [(48, 64, 3)] * 5, "sides are even"
    assert all((a != b).any() for a, b in itertools.pairwise(frames)) and job.has_images


def test_videos_of_two_requests_differ_and_a_request_may_have_several() -> None:
    shape = RequestShape("fake", sizes=((32, 32),), frames=2, images=2)
    bodies = [WORKLOADS["video"](shape, number, random.Random(number)).bodies[0] for number in range(2)]
    assert [len(videos_in(body)) for body in bodies] == [2, 2] and bodies[0] != bodies[1]


def test_the_command_sends_videos(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_chat_server() as fake:
        given = ["--url", fake.url, "--requests", "2", "--clients", "1", "--size", "32x32", "--frames", "3"]
        assert main(["bench", "video", *given, "--quiet"]) == 0
    assert "video: 2 requests" in capsys.readouterr().out
    assert len(videos_in(json.dumps(fake.bodies[-1]).encode())[0]) == 3


def test_without_pyav_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("saccade.apps.bench.video.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="PyAV, which is not installed"):
        check_av()
    assert main(["bench", "video", "--model", "m"]) == 2
    assert "pip install saccade[video]" in capsys.readouterr().err


def test_an_engine_in_this_process_answers_about_a_video(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--requests", "1", "--clients", "1", "--size", "64x64", "--frames", "4", "--tokens", "2", "--quiet"]
    assert main(["bench", "video", "--offline", *given]) == 0
    assert "video: 1 requests" in capsys.readouterr().out
