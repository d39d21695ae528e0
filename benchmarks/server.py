"""The server's promises, as ratios within one run: `python -m benchmarks.server`. A table, then one line of JSON.

Starts `saccade serve` on a loopback port with the random 120M-parameter checkpoint and talks to it over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cpu import QUESTIONS, greedy, make_llm
from benchmarks.cpu_engine import photo
from benchmarks.models import qwen2_vl_120m
from benchmarks.results import write_rows
from saccade.apps.evaluation.serving import serving_with

WARM_UP = 1000  # requests before memory is measured
REST = 12.0  # seconds after which both processes have tidied up
WORDS = ("red", "circle", "blue", "square", "small", "green", "left", "right", "above", "below", "large", "dark")


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """A server of its own; yields its address and process id once it is ready."""
    usual = ("--dtype", "float32", "--max-model-len", "4096", "--served-model-name", "bench")
    with serving_with([str(folder), *usual, *flags]) as server:
        yield server.url, server.pid


def image_part(data: bytes) -> dict[str, Any]:
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def body(messages: list[dict[str, Any]], tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "bench", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


async def ask(client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json=request)
    response.raise_for_status()
    return dict(response.json())


async def first_token(client: httpx.AsyncClient, request: dict[str, Any]) -> float:
    start = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json={**request, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and _has_token(json.loads(line[6:])):
                return time.perf_counter() - start
    raise RuntimeError("the stream ended without a token")


def _has_token(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices") or [{}]
    return bool(choices[0].get("delta", {}).get("content")) or choices[0].get("finish_reason") is not None


def counter(metrics: str, name: str) -> float:
    values = re.findall(rf"^{re.escape(name)}(?:_total)?(?:{{[^}}]*}})? ([0-9.e+-]+)$", metrics, re.MULTILINE)
    return sum(float(value) for value in values)


def words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


# --- the five promises --------------------------------------------------------------------------------------------


async def throughput(folder: Path, client: httpx.AsyncClient, rounds: int) -> list[tuple[float, float]]:
    """Seconds for 16 image requests, by the offline engine and by the server, one right after the other.

    In turns, because the same code takes a tenth more or less from minute to minute; each round has new images.
    """
    llm = make_llm(folder)
    pairs = []
    for index in range(rounds):
        chats = [[user(image_part(photo(3000 + 10 * index + i)), q)] for i in range(8) for q in QUESTIONS]
        start = time.perf_counter()
        llm.chat(chats, greedy(32), use_tqdm=False)
        offline = time.perf_counter() - start
        start = time.perf_counter()
        await asyncio.gather(*(ask(client, body(messages, 32)) for messages in chats))
        pairs.append((offline, time.perf_counter() - start))
    llm.close()
    return pairs


async def text_beside_images(client: httpx.AsyncClient, rounds: int) -> tuple[float, float]:
    """Median first-token time of a text request alone, and while 16 image requests are in flight."""
    texts = iter(body([user(words(200, seed))], 1) for seed in range(10_000))
    alone = [await first_token(client, next(texts)) for _ in range(8)]
    beside = []
    for index in range(rounds):
        images = [body([user(image_part(photo(5000 + 100 * index + i)), "What?")], 32) for i in range(16)]
        tasks = [asyncio.create_task(ask(client, request)) for request in images]
        await asyncio.sleep(0.5)
        while not any(task.done() for task in tasks):
            beside.append(await first_token(client, next(texts)))
            await asyncio.sleep(0.1)
        await asyncio.gather(*tasks)
    return statistics.median(alone), statistics.median(beside)


async def conversation(client: httpx.AsyncClient) -> dict[str, float]:
    """Ten turns about one image: first-token times of turns 3 and 10 (minimum of three runs), decodes and encodes."""
    await ask(client, body([user("hello")], 1))  # the image of the server's warm-up is counted with its first step
    before = (await client.get("/metrics")).text
    times: dict[int, list[float]] = {3: [], 10: []}
    for run in range(3):
        messages = [user(image_part(photo(9000 + run)), "What is in this picture?")]
        for turn in range(1, 11):
            elapsed = await first_token(client, body(messages, 1))
            times.setdefault(turn, []).append(elapsed)
            messages += [{"role": "assistant", "content": "A red circle."}, user(f"Question {turn}?")]
    after = (await client.get("/metrics")).text
    names = ("saccade:pictures_decoded", "saccade:pictures_encoded")
    decoded, encoded = (counter(after, name) - counter(before, name) for name in names)
    return {"turn 10 / turn 3": min(times[10]) / min(times[3]), "decoded": decoded, "encoded": encoded}


async def overload(folder: Path) -> float:
    """Milliseconds until a request beyond the limits is refused, the slowest of 50."""
    with serving(folder, "--max-num-seqs", "2", "--max-waiting", "2") as (url, _):
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            load = [
                asyncio.create_task(client.post("/v1/chat/completions", json=body([user(words(50, i))], 200)))
                for i in range(4)
            ]
            await asyncio.sleep(1.0)
            times = []
            for index in range(50):
                request = body([user(image_part(photo(index)), "?")], 8)
                start = time.perf_counter()
                response = await client.post("/v1/chat/completions", json=request)
                times.append((time.perf_counter() - start) * 1e3)
                assert response.status_code in (429, 503), f"accepted with {response.status_code}"
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
    return sorted(times)[-1]


async def memory(folder: Path, requests: int) -> float:
    """Growth of the resident memory of both processes, in MiB, over this many image requests after a warm-up.

    The encoder cache and the prefix cache are small, so that both are full after the warm-up: a cache that fills is not
    a leak, nor is a heap that grows to what its busiest moment needs. (Each KV block whose tokens are remembered
    costs about a kilobyte on the host.) Memory is read at rest, when both processes have tidied up.
    """
    flags = ("--encoder-cache-gb", "0.006", "--kv-cache-gb", "0.05")
    with serving(folder, *flags) as (url, pid):
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            for index in range(WARM_UP):
                await ask(client, body([user(image_part(photo(20_000 + index, 160, 120)), "?")], 2))
            before = await _resident_at_rest(pid)
            for index in range(requests):
                await ask(client, body([user(image_part(photo(30_000 + index, 160, 120)), "?")], 2))
            return await _resident_at_rest(pid) - before


async def _resident_at_rest(pid: int) -> float:
    await asyncio.sleep(REST)
    return resident(pid)


def resident(pid: int) -> float:
    """MiB of a process and its children."""
    children = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    mib = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return mib + sum(resident(child) for child in children)


async def run(folder: Path, rounds: int) -> list[tuple[str, float, str]]:
    with serving(folder) as (url, _):
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=64)) as client:
            pairs = await throughput(folder, client, 2 * rounds + 1)
            alone, beside = await text_beside_images(client, rounds)
            talk = await conversation(client)
    grown = await memory(folder, 300)
    refused = await overload(folder)
    return [
        ("requests/s offline, median", 16 / statistics.median(offline for offline, _ in pairs), ""),
        ("requests/s served, median", 16 / statistics.median(online for _, online in pairs), ""),
        (
            "served / offline, median of pairs",
            statistics.median(offline / online for offline, online in pairs),
            ">= 0.9",
        ),
        ("first token of text alone, ms", alone * 1e3, ""),
        ("first token of text beside 16 picture requests, ms", beside * 1e3, ""),
        ("beside / alone", beside / alone, "<= 2"),
        ("conversation: first token of turn 10 / turn 3", talk["turn 10 / turn 3"], "<= 1.2"),
        ("conversation: pictures decoded (3 shown)", talk["decoded"], "3"),
        ("conversation: pictures encoded (3 shown)", talk["encoded"], "3"),
        ("refusal under overload, slowest of 50, ms", refused, "<= 50"),
        ("memory growth over 300 picture requests, MiB", grown, "0"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, default=Path("build/bench-qwen2-vl-120m"), help="made when missing")
    parser.add_argument("--rounds", type=int, default=2, help="repeats of the slow parts")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there, with the commit")
    args = parser.parse_args()
    rows = asyncio.run(run(qwen2_vl_120m(args.model_dir), args.rounds))
    for name, value, goal in rows:
        print(f"{name:58} {value:9.3f}  {goal}")
    print(json.dumps({name: round(value, 4) for name, value, _ in rows}))
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
