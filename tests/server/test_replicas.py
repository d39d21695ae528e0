"""`saccade serve --replicas 2` with the built-in model: the same outputs, one cache per image, a death half-way."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from saccade import LLM, SamplingParams
from saccade.cli.main import main
from tests.helpers.servers.serving import RunningServer, chat_body, photo_part, running_builtin, text_part, until

MODEL = "saccade-builtin"
QUESTIONS: list[Any] = [
    "What can you see?",
    [photo_part(seed=1), text_part("What is this?")],
    [photo_part(seed=1), text_part("Which color is it?")],
    [photo_part(seed=2), photo_part(seed=1), text_part("Are they the same?")],
]


def engines(server: RunningServer) -> list[int]:
    """Process ids of the workers."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children()}
    return [pid for pid, line in lines.items() if b"saccade.engine.ipc.worker" in line]


def replicas(server: RunningServer) -> list[dict[str, Any]]:
    return list(server.get("/v1/engine").json()["replicas"])


def are_ready(server: RunningServer) -> bool:
    return [replica["state"] for replica in replicas(server)] == ["ready", "ready"]


@pytest.fixture(scope="module")
def pair() -> Iterator[RunningServer]:
    seen: set[int] = set()
    with running_builtin("--replicas", "2", "--device", "cpu") as server:
        assert until(lambda: are_ready(server))
        seen.update(engines(server))
        yield server
        seen.update(engines(server))
    assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()]


def content_of(server: RunningServer, content: Any, **fields: Any) -> str:
    response = server.chat(content, model=MODEL, max_tokens=12, **fields)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_outputs_are_those_of_one_process(pair: RunningServer) -> None:
    llm = LLM(kv_cache_gb=0.05, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=12)
    conversations: Any = [[{"role": "user", "content": content}] for content in QUESTIONS]
    expected = [out.outputs[0].text for out in llm.chat(conversations, params)]
    llm.close()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda content: content_of(pair, content), QUESTIONS)) == expected


def test_an_image_is_encoded_by_one_replica(pair: RunningServer) -> None:
    before = pair.stats("saccade:pictures_encoded_total")
    for number in range(5):
        content_of(pair, [text_part(f"{number} Look:"), photo_part(seed=77), text_part("What is it?")])
    assert until(lambda: pair.stats("saccade:pictures_encoded_total") > before)
    assert pair.stats("saccade:pictures_encoded_total") == before + 1


def test_metrics_and_routes_show_each_replica(pair: RunningServer) -> None:
    text = pair.get("/metrics").text
    assert 'saccade:running{replica="0"}' in text and 'saccade:running{replica="1"}' in text
    assert 'saccade:replica_ready{replica="1"} 1.0' in text
    assert f'vllm:num_requests_running{{engine="1",model_name="{MODEL}"}}' in text
    health = pair.get("/health").json()
    assert health["status"] == "ok" and len(health["replicas"]) == 2
    assert pair.get("/v1/engine").json()["stats"]["kv"]["total"] > 0
    assert any("2 engines share this CPU" in line for line in pair.log)


def test_cluster_status_shows_who_is_where(pair: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "status", "--url", pair.url, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["role"], row["index"], row["node"], row["device"], row["state"]) for row in rows] == [
        ("engine", index, socket.gethostname(), "cpu", "ready") for index in range(2)
    ]
    assert {row["pid"] for row in rows} == set(engines(pair))
    assert all(row["kv_use"] is not None and row["queued_work"] == 0 for row in rows)


def read_stream(server: RunningServer, text: str, events: list[Any]) -> None:
    body = chat_body(text, model=MODEL, stream=True, max_tokens=600, ignore_eos=True)
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))


def test_a_replica_killed_half_way_ends_its_streams_and_no_other(pair: RunningServer) -> None:
    streams: list[list[Any]] = [[], []]
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(read_stream, pair, f"{i} count", events) for i, events in enumerate(streams)]
        assert until(lambda: all(len(events) > 3 for events in streams))
        os.kill(engines(pair)[0], signal.SIGKILL)
        for future in done:
            future.result()
    whole, broken = sorted(streams, key=lambda events: "error" in events[-1])
    assert broken[-1]["error"]["code"] == "engine_unavailable"
    assert whole[-1]["choices"][0]["finish_reason"] == "length"
    assert pair.get("/ready").status_code == 200
    assert until(lambda: are_ready(pair))


def test_requests_without_a_token_move_to_the_other_replica(pair: RunningServer) -> None:
    victim = engines(pair)[0]
    before = pair.stats("saccade:requests_moved_total")
    os.kill(victim, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(content_of, pair, f"{number} What is this?") for number in range(4)]
        assert until(lambda: sum(future.done() for future in asked) >= 1)  # the other replica's
        os.kill(victim, signal.SIGKILL)
        assert all(isinstance(future.result(), str) for future in asked)
    assert pair.stats("saccade:requests_moved_total") > before
    assert until(lambda: are_ready(pair))
