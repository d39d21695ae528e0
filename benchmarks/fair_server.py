"""One tenant floods, another asks briefly: `python -m benchmarks.fair_server`. What does the second one wait?

Starts `saccade serve` with two keys. Tenant A keeps more requests open than there are seats; tenant B sends a short
chat each second and takes the time to its first token: alone, beside long prompts and answers, beside pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cpu_engine import photo
from benchmarks.server import ask, body, first_token, image_part, serving, user, words
from saccade.processor.checkpoint_files import BUILTIN

SEATS = 6  # --max-num-seqs
OPEN = 24  # requests of A at a time

Body = dict[str, Any]


def texts() -> Iterator[Body]:
    return (body([user(words(200, seed))], 200) for seed in itertools.count())


def images() -> Iterator[Body]:
    return (body([user(image_part(photo(seed, 320, 240)), "What?")], 64) for seed in itertools.count())


async def _flood(client: httpx.AsyncClient, requests: Iterator[Body], done: list[float]) -> None:
    for request in requests:
        await ask(client, request)
        done.append(time.perf_counter())


async def waits(url: str, flood: Callable[[], Iterator[Body]] | None, seconds: int) -> tuple[list[float], int]:
    """B's times to first token, one each second, and how many requests of A ended meanwhile."""
    clients = [
        httpx.AsyncClient(base_url=url, timeout=300, headers={"authorization": f"Bearer {key}"}, limits=httpx.Limits())
        for key in "AB"
    ]
    done: list[float] = []
    requests = flood() if flood else iter(())
    tasks = [asyncio.create_task(_flood(clients[0], requests, done)) for _ in range(OPEN)]
    await asyncio.sleep(3 if flood else 0)  # until A's requests hold all seats
    asked = []
    for number in range(seconds):
        asked.append(asyncio.create_task(first_token(clients[1], body([user(words(12, number))], 8))))
        await asyncio.sleep(1)
    num_done = len(done)
    times = await asyncio.gather(*asked)
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    for client in clients:
        await client.aclose()
    return sorted(times), num_done


async def run(folder: Path, seconds: int) -> list[tuple[str, float, float, int]]:
    flags = ("--api-key", "A", "--api-key", "B", "--max-num-seqs", str(SEATS), "--max-model-len", "2048")
    rows = []
    with serving(folder, *flags) as (url, _):
        for name, flood, length in (
            ("alone", None, 8),
            ("beside text", texts, seconds),
            ("beside images", images, seconds),
        ):
            times, num_done = await waits(url, flood, length)
            median, p99 = statistics.median(times), times[int(0.99 * len(times))]
            print(
                f"first token of B {name:14} p50 {median:7.3f} s p99 {p99:7.3f} s of {len(times)}; A: {num_done} ended",
                flush=True,
            )
            rows.append((name, median, p99, num_done))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, default=BUILTIN, help="the small model of the package if not given")
    parser.add_argument("--seconds", type=int, default=20, help="of each flood")
    args = parser.parse_args()
    rows = asyncio.run(run(args.model_dir, args.seconds))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
