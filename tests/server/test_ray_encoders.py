"""`saccade serve --ray-address --encoders`, with the built-in model on a cluster of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from saccade import LLM, SamplingParams
from tests.helpers.fakes.fake_worker import is_running
from tests.helpers.media.images import make_photo, png
from tests.helpers.servers.ray_cluster import ray_cluster
from tests.helpers.servers.serving import (
    RunningServer,
    as_url,
    error_of,
    image_part,
    photo_part,
    running_builtin,
    text_part,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.server, pytest.mark.slow]

MODEL = "saccade-builtin"
SECONDS = 120  # limits that keep a broken test from hanging


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = ("--replicas", "1", "--encoders", "1", "--device", "cpu")
    with ray_cluster(2) as cluster:
        with running_builtin("--ray-address", cluster.address, *flags) as server:
            assert until(lambda: encoders(server)[0]["state"] == "ready", SECONDS)
            assert until(lambda: connected(server) == 1, SECONDS)
            yield server
            workers = [worker["pid"] for worker in server.get("/v1/engine").json()["workers"]]
            assert len(workers) == 2
        assert until(lambda: not any(is_running(pid) for pid in workers), SECONDS)


def encoders(server: RunningServer) -> list[dict[str, Any]]:
    rows = server.get("/v1/engine").json()["workers"]
    return [row for row in rows if row["role"] == "encoder"]


def remote_counts(server: RunningServer) -> dict[str, int]:
    """The engine's view of its encoder workers."""
    return dict(server.get("/v1/engine").json()["stats"].get("remote_encoders", {}))


def connected(server: RunningServer) -> int:
    return remote_counts(server).get("connected", 0)


def question(seed: int) -> list[Any]:
    return [photo_part(seed=seed), text_part("What is this?")]


def content_of(server: RunningServer, content: Any) -> str:
    response = server.chat(content, model=MODEL, max_tokens=12)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_images_are_encoded_by_the_actor_and_outputs_are_those_of_one_process(server: RunningServer) -> None:
    llm = LLM(kv_cache_gb=0.05, use_tqdm=False)
    conversations: Any = [[{"role": "user", "content": question(seed)}] for seed in range(3)]
    outs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=12))
    llm.close()
    before = remote_counts(server)
    assert [content_of(server, question(seed)) for seed in range(3)] == [out.outputs[0].text for out in outs]
    after = remote_counts(server)
    assert (after["encoded"] - before["encoded"], after["fallbacks"] - before["fallbacks"]) == (3, 0)


def test_a_killed_encoder_costs_no_request_and_comes_back(server: RunningServer) -> None:
    victim = encoders(server)[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    assert content_of(server, question(seed=10))
    assert until(lambda: encoders(server)[0]["state"] == "ready" and encoders(server)[0]["pid"] != victim, SECONDS)
    assert until(lambda: connected(server) == 1, SECONDS)
    assert content_of(server, question(seed=11))
    assert until(lambda: server.get("/v1/engine").json()["encoders"][0]["encoded"], SECONDS)


def test_an_image_that_cannot_be_decoded_is_refused_by_the_actor(server: RunningServer) -> None:
    broken = image_part(as_url(png(make_photo(112, 84, 20))[:-2000]))
    response = server.chat([broken, text_part("What is this?")], model=MODEL)
    assert response.status_code == 400 and error_of(response)["code"] == "image_parse_error", response.text
    assert connected(server) == 1
