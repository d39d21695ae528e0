"""Two replicas and an encoder worker whose caches hold next to nothing: each answer is that of its request alone.

SACCADE_TINY_CACHE_REQUESTS=200 asks more at once; docs/cluster.md has what came of it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from saccade import LLM, SamplingParams
from tests.helpers.servers.serving import RunningServer, photo_part, running_builtin, text_part, until

MODEL = "saccade-builtin"
NUM_REQUESTS = int(os.environ.get("SACCADE_TINY_CACHE_REQUESTS", "14"))
WORDS = ("red", "circle", "blue", "square", "small", "green", "left", "right", "above", "below", "large", "dark")
SHARED = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "400", "--max-num-batched-tokens", "64")
TINY = ("--kv-cache-gb", "0.003", "--encoder-cache-gb", "0.0006")  # 32 blocks and 419 embeddings each


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_builtin("--replicas", "2", "--encoders", "1", *SHARED, *TINY) as server:
        assert until(lambda: are_ready(server))
        yield server


def are_ready(server: RunningServer) -> bool:
    view = server.get("/v1/engine").json()
    states = [worker["state"] for worker in view["replicas"] + view["encoders"]]
    return states == ["ready"] * 3 and view["stats"].get("remote_encoders", {}).get("connected") == 2


def request(number: int) -> tuple[Any, dict[str, Any]]:
    """Words, a new image, one that comes again, or both. An eighth are sampled."""
    source = random.Random(number)
    words = text_part(" ".join(source.choices(WORDS, k=source.randint(3, 80))))
    new, seen = photo_part(source.choice((112, 160, 224)), 112, seed=1000 + number), photo_part(seed=number % 3)
    content = ([words], [new, words], [seen, words], [seen, new, words])[number % 4]
    how: dict[str, Any] = {"max_tokens": source.randint(8, 64), "ignore_eos": True, "temperature": 0}
    if number % 8 == 5:
        how |= {"temperature": 0.8, "seed": number}
    elif number % 3 == 0:
        how |= {"seed": number}
    return content, how


def asked(server: RunningServer, number: int) -> list[int]:
    content, how = request(number)
    response = server.chat(content, model=MODEL, return_token_ids=True, **how)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


def alone(llm: LLM, number: int) -> list[int]:
    content, how = request(number)
    conversation: Any = [{"role": "user", "content": content}]
    return list(llm.chat([conversation], SamplingParams(**how))[0].outputs[0].token_ids)


def is_idle(server: RunningServer) -> bool:
    view = server.get("/v1/engine").json()
    stats, cache = view["stats"], view["stats"]["encoder_cache"]
    open_work = [
        *(view["open_requests"], stats["running"], stats["waiting"], stats["kv"]["used"]),
        *(cache["slots_pinned"], cache["slots_in_flight"], stats["remote_encoders"]["open"]),
        *(replica["queued_work"] for replica in view["replicas"]),
        *(encoder["queue"] for encoder in view["encoders"]),
    ]
    return not any(open_work) and cache["slots_idle"] == cache["slots_used"]


@pytest.mark.slow
def test_preempted_requests_are_answered_as_if_they_were_alone(server: RunningServer) -> None:
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda number: asked(server, number), range(NUM_REQUESTS)))
    assert until(lambda: is_idle(server)), server.get("/v1/engine").text
    assert server.stats("saccade:preemptions_total") > 0
    stats = server.get("/v1/engine").json()["stats"]
    assert stats["kv"]["free"] + stats["kv"]["idle"] == stats["kv"]["total"]
    llm = LLM(kv_cache_gb=0.05, device="cpu", dtype="float32", max_model_len=400, use_tqdm=False)
    expected = [alone(llm, number) for number in range(NUM_REQUESTS)]
    llm.close()
    assert answers == expected
