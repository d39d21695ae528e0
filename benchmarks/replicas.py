"""What a front door costs with 1 to 64 replicas, and 1 against 2 real ones: `python -m benchmarks.replicas`.

The first table has fake engines: processes with the real scheduler that compute nothing. Requests are chats of 1,600
tokens about the images of a catalogue, four of them for each replica. CPU time is that of the front door's own process:
routing, messages and streams, without HTTP. The second table is `saccade serve` of the built-in model on this CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks.cpu_engine import photo
from benchmarks.results import write_json
from benchmarks.server import counter, image_part, user
from benchmarks.soak import serving
from saccade.checkpoint.config import model_config
from saccade.engine.ipc.client import EngineClient
from saccade.engine.ipc.process import EngineProcess
from saccade.engine.replicas.replica_set import ReplicaSet
from saccade.options.engine import Options
from saccade.sampling_params import SamplingParams
from saccade.scheduler.block_hashes import text_records
from saccade.types.media import Geometry, Grid, Header, MediaItem, Size
from saccade.types.prompt import Prompt, Span
from saccade.types.request import Request

IMAGE_TOKENS = 1564
IMAGE_BYTES = 60_000
TEXT_TOKENS = 36
OUTPUTS = 16
PER_REPLICA = 4  # images of the catalogue, and requests open at a time


# --- fake engines ---------------------------------------------------------------------------------------------------


def fake_client(**how: Any) -> EngineClient:
    launch = partial(EngineProcess.spawn, (sys.executable, "-m", "benchmarks.fake_engine"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = model_config({"model_type": "fake", "vocab_size": 9, "max_position_embeddings": 64, **sizes})
    files = SimpleNamespace(path=Path("/nowhere"), config=config, image_processor={})
    return EngineClient(Options(), checkpoint=files, largest=None, launch=launch, **how)


def chat_about(image: int, number: int) -> Request:
    """A few tokens of template, the image, a question that is never the same."""
    key = hashlib.sha256(f"image {image}".encode()).digest()
    question = [number + 10 * i for i in range(TEXT_TOKENS - 15)]
    rows = (key + offset.to_bytes(8, "little") for offset in range(IMAGE_TOKENS))
    size = Size(1280, 960)
    geometry = Geometry(size, Grid(1, 68, 92), IMAGE_TOKENS, IMAGE_TOKENS)
    prompt = Prompt(
        token_ids=[*range(15), *[9] * IMAGE_TOKENS, *question],
        spans=(Span(15, IMAGE_TOKENS, key, IMAGE_TOKENS),),
        items=(MediaItem(key, "image", bytes(IMAGE_BYTES), Header("jpeg", size, 1, 1, "RGB"), geometry),),
        positions=np.zeros((1, IMAGE_TOKENS + TEXT_TOKENS), np.int32),
        next_position=IMAGE_TOKENS + TEXT_TOKENS,
        identity=text_records(range(15)) + b"".join(rows) + text_records(question),
    )
    params = SamplingParams(max_tokens=OUTPUTS, temperature=0)
    return Request(str(number), prompt, params, OUTPUTS, frozenset(), seed=0)


class FrontDoor(NamedTuple):
    replicas: int
    requests_per_s: float
    cpu_ms: float  # of the front door, for one request
    encodes: float  # of an image, over those of the catalogue: 1 where each is encoded by one replica
    spread: float  # most steps of a replica over the mean


async def front_door(count: int, num_requests: int) -> FrontDoor:
    engine = fake_client() if count == 1 else ReplicaSet(fake_client, count)
    images = random.Random(0).choices(range(PER_REPLICA * count), k=num_requests)
    requests = [chat_about(image, number) for number, image in enumerate(images)]
    try:
        await engine.start()
        waiting = iter(requests)

        async def client() -> None:
            for request in waiting:
                (stream,) = await engine.submit([request])
                async for _ in stream:
                    pass

        start, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*[client() for _ in range(PER_REPLICA * count)])
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        await asyncio.sleep(1.5)  # for the last counters
        steps = [view.stats["steps"] for view in engine.replicas()] or [1]
        encoded = engine.stats()["encoder"]["encoded"] / len(set(images))
    finally:
        await engine.stop()
    spread = max(steps) * len(steps) / sum(steps)
    return FrontDoor(count, num_requests / seconds, cpu / num_requests * 1e3, encoded, spread)


# --- real engines ---------------------------------------------------------------------------------------------------


class Served(NamedTuple):
    replicas: int
    requests_per_s: float
    encoded: float


async def served(count: int, num_requests: int, at_once: int) -> Served:
    """Chats about twelve images with new questions."""
    numbers = iter(range(num_requests))
    with serving(None, ["--device", "cpu", "--kv-cache-gb", "0.1", "--replicas", str(count)]) as (url, _):
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            while "starting" in (await client.get("/v1/engine")).text:
                await asyncio.sleep(0.1)

            async def ask() -> None:
                for number in numbers:
                    parts = user(image_part(photo(number % 12, 224, 224)), f"{number} What is this?")
                    body = {"messages": [parts], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
                    (await client.post("/v1/chat/completions", json=body)).raise_for_status()

            start = time.perf_counter()
            await asyncio.gather(*[ask() for _ in range(at_once)])
            seconds = time.perf_counter() - start
            encoded = counter((await client.get("/metrics")).text, "saccade:pictures_encoded")
    return Served(count, num_requests / seconds, encoded)


def show(titles: Sequence[str], rows: Sequence[tuple[float, ...]]) -> None:
    print("  ".join(f"{title:>16}" for title in titles))
    for row in rows:
        print("  ".join(f"{value:16.2f}" if isinstance(value, float) else f"{value:16}" for value in row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64], help="of fake engines")
    parser.add_argument("--requests", type=int, default=600, help="to fake engines, at each size")
    parser.add_argument("--real", type=int, default=120, metavar="N", help="requests to real ones; 0: none")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there, with the commit")
    args = parser.parse_args()
    doors = [asyncio.run(front_door(count, args.requests)) for count in args.replicas]
    show(("fake replicas", "requests/s", "CPU ms/request", "encodes/image", "max/mean steps"), doors)
    real = [asyncio.run(served(count, args.real, at_once=8)) for count in (1, 2) if args.real]
    show(("real replicas", "requests/s", "images encoded"), real)
    if args.json:
        found = {"front_door": [row._asdict() for row in doors], "served": [row._asdict() for row in real]}
        write_json(args.json, found)


if __name__ == "__main__":
    main()
