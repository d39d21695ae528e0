"""`saccade serve --encoders 2` with the built-in model: the same outputs, also when workers die or hang."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from saccade import LLM, SamplingParams
from tests.helpers.media.images import make_photo, png
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

MODEL = "saccade-builtin"
QUESTIONS: list[Any] = [
    "What can you see?",
    [photo_part(seed=1), text_part("What is this?")],
    [photo_part(200, 120, seed=3), text_part("Which color is it?")],
    [photo_part(seed=2), photo_part(seed=1), text_part("Are they the same?")],
]


def workers(server: RunningServer, module: bytes = b"saccade.engine.encoders.worker") -> list[int]:
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children()}
    return [pid for pid, line in lines.items() if module in line]


def engine(server: RunningServer) -> int:
    (pid,) = workers(server, b"saccade.engine.ipc.worker")
    return pid


def connected(server: RunningServer) -> int:
    view = server.get("/v1/engine").json()
    states = [encoder["state"] for encoder in view["encoders"]]
    counts = view["stats"].get("remote_encoders", {})  # the engine may not have reported yet
    return states.count("ready") and int(counts.get("connected", 0))


def arenas(pid: int) -> tuple[int, int]:
    """Shared memory that a process has mapped, and descriptors of it."""
    names = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    maps = Path(f"/proc/{pid}/maps").read_text().count("memfd:saccade-embeddings")
    return maps, sum("memfd:saccade-embeddings" in name for name in names)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    seen: set[int] = set()
    with tempfile.TemporaryDirectory() as place:  # its own: other tests start and end servers meanwhile
        with running_builtin("--encoders", "2", "--device", "cpu", env={"TMPDIR": place}) as made:
            assert until(lambda: connected(made) == 2)
            (folder,) = Path(place).glob("saccade-*")
            assert (folder / "encoder-0").exists() and folder.stat().st_mode & 0o777 == 0o700
            seen.update(workers(made))
            yield made
            seen.update(workers(made))
        assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()]
        assert not list(Path(place).iterdir())


def content_of(server: RunningServer, content: Any, **fields: Any) -> str:
    response = server.chat(content, model=MODEL, max_tokens=12, **fields)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def photo(seed: int) -> list[Any]:
    return [photo_part(seed=seed), text_part("What is this?")]


def test_outputs_are_those_of_one_process(server: RunningServer) -> None:
    llm = LLM(kv_cache_gb=0.05, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=12)
    conversations: Any = [[{"role": "user", "content": content}] for content in QUESTIONS]
    expected = [out.outputs[0].text for out in llm.chat(conversations, params)]
    llm.close()
    before = server.stats("saccade:remote_encoder_encoded_total")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda content: content_of(server, content), QUESTIONS)) == expected
    assert until(lambda: server.stats("saccade:remote_encoder_encoded_total") == before + 3)


def test_a_broken_image_is_the_clients_error(server: RunningServer) -> None:
    data = bytearray(png(make_photo(112, 84, 5)))
    data[300:400] = bytes(100)  # its header is whole, its pixels are not
    response = server.chat([image_part(as_url(bytes(data))), text_part("What?")], model=MODEL)
    assert response.status_code == 400 and error_of(response)["code"] == "image_parse_error"


def test_metrics_and_routes_show_each_worker(server: RunningServer) -> None:
    text = server.get("/metrics").text
    assert 'saccade:encoder_up{encoder="0"} 1.0' in text and 'saccade:encoder_up{encoder="1"} 1.0' in text
    assert len(server.get("/health").json()["encoders"]) == 2
    assert until(lambda: any("1 engine and 2 encoder workers share this CPU" in line for line in server.log))
    assert until(lambda: any("encoder 1: the vision tower on cpu" in line for line in server.log))


def test_a_worker_killed_with_images_in_it_fails_no_request(server: RunningServer) -> None:
    """Both hang, so that the images are in them; one is killed, then the other; each starts again."""
    held = arenas(engine(server))
    lost = server.stats("saccade:remote_encoder_lost_total")
    victims = workers(server)
    for pid in victims:
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(content_of, server, photo(seed)) for seed in range(20, 24)]
        assert until(lambda: server.get("/v1/engine").json()["stats"]["remote_encoders"]["open"] > 0)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        assert all(isinstance(future.result(), str) for future in asked)
    assert until(lambda: server.stats("saccade:remote_encoder_lost_total") > lost)
    assert until(lambda: connected(server) == 2)
    assert server.stats("saccade:encoder_restarts_total") == 2
    before = server.stats("saccade:remote_encoder_encoded_total")
    content_of(server, photo(30))
    assert until(lambda: server.stats("saccade:remote_encoder_encoded_total") == before + 1)
    assert until(lambda: arenas(engine(server)) == held) and held == (2, 2)  # one for each worker
