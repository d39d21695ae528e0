"""`saccade serve --ray-address`, with the built-in model on a cluster of this machine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from saccade import LLM, SamplingParams
from saccade.cli.main import main
from tests.helpers.fakes.fake_worker import is_running
from tests.helpers.servers.ray_cluster import RayCluster, ray_cluster
from tests.helpers.servers.serving import RunningServer, photo_part, running_builtin, text_part, until

pytestmark = [pytest.mark.ray, pytest.mark.server, pytest.mark.slow]

MODEL = "saccade-builtin"
SECONDS = 120  # limits that keep a broken test from hanging
QUESTIONS: list[Any] = [
    "What can you see?",
    [photo_part(seed=1), text_part("What is this?")],
    [photo_part(seed=2), photo_part(seed=1), text_part("Are they the same?")],
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: RayCluster) -> Iterator[RunningServer]:
    with running_builtin("--ray-address", cluster.address, "--replicas", "2", "--device", "cpu") as server:
        assert until(lambda: are_ready(server), SECONDS)
        yield server
        workers = [worker["pid"] for worker in workers_of(server)]
        assert workers and all(is_running(pid) for pid in workers)
    assert until(lambda: not any(is_running(pid) for pid in workers), SECONDS)


def workers_of(server: RunningServer) -> list[dict[str, Any]]:
    return list(server.get("/v1/engine").json()["workers"])


def are_ready(server: RunningServer) -> bool:
    return [worker["state"] for worker in workers_of(server)] == ["ready", "ready"]


def content_of(server: RunningServer, content: Any) -> str:
    response = server.chat(content, model=MODEL, max_tokens=12)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_outputs_are_those_of_one_process(server: RunningServer) -> None:
    llm = LLM(kv_cache_gb=0.05, use_tqdm=False)
    conversations: Any = [[{"role": "user", "content": content}] for content in QUESTIONS]
    outs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=12))
    llm.close()
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda content: content_of(server, content), QUESTIONS))
    assert answers == [out.outputs[0].text for out in outs]


def test_cluster_status_names_the_ray_workers(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "status", "--url", server.url, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["node"], row["device"], row["state"]) for row in rows] == [(os.uname().nodename, "cpu", "ready")] * 2
    assert not {row["pid"] for row in rows} & set(server.children())  # those are the bridges


def test_a_killed_ray_worker_leaves_the_server_ready(server: RunningServer) -> None:
    victim = workers_of(server)[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    assert until(lambda: workers_of(server)[0]["restarts"] == 1, SECONDS)
    assert server.get("/ready").status_code == 200 and content_of(server, "What is this?")
    assert until(lambda: are_ready(server), SECONDS)
    assert workers_of(server)[0]["pid"] != victim


def test_without_its_head_the_server_says_so_and_recovers(server: RunningServer, cluster: RayCluster) -> None:
    cluster.kill_head()
    assert until(lambda: server.get("/health").status_code == 503, SECONDS)
    assert server.get("/ready").json() == {"status": "restarting"}
    refused = server.chat("What is this?", model=MODEL)
    assert refused.status_code == 503 and "restarting" in refused.json()["error"]["message"]
    assert until(lambda: all("no Ray cluster" in str(worker["last_error"]) for worker in workers_of(server)), SECONDS)
    cluster.start_head(2)
    assert until(lambda: are_ready(server), SECONDS)
    assert server.get("/ready").status_code == 200 and content_of(server, "What is this?")
