"""Images encoded in the engine against encoder workers: `python -m benchmarks.encoders`.

Each row is a server of its own. Some streams of text decode without an end while clients send photos, each one new and
asked about once, one after the other. Shown: photos a second, the time to a photo's first token, and the gaps between
two tokens of the text, beside the photos and before they come. Then what became of the photos.

On a CPU the workers share its cores with the engine, so a row with workers has no more to compute with. With one GPU
they share that; with several each worker has its own. Without `--model` the built-in model is served; `--shape
qwen2_vl_2b` makes random weights of that shape. Arguments after `--flags` go to `saccade serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks.checkpoints import QWEN_TEMPLATE
from benchmarks.cpu_engine import photo
from benchmarks.gpu_shapes import SHAPES, write_folder
from benchmarks.results import write_json
from benchmarks.server import counter, image_part, user
from benchmarks.soak import serving

OUTPUTS = 8  # tokens about a photo
ALONE_SECONDS = 3.0  # of text before the photos
Gaps = list[tuple[float, float]]  # when a token came, and how long after the one before it


class Row(NamedTuple):
    encoders: int
    photos_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    alone_p50_ms: float  # gaps of text without photos
    beside_p50_ms: float  # and with them
    beside_p99_ms: float
    in_workers: float  # photos encoded there
    fallbacks: float  # encoded in the engine though there are workers; one is the warm-up's


async def tokens_of(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[float]:
    """When each chunk with text came."""
    whole = {**body, "stream": True, "temperature": 0, "ignore_eos": True}
    async with client.stream("POST", "/v1/chat/completions", json=whole) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                yield time.perf_counter()


async def read_text(client: httpx.AsyncClient, number: int, gaps: Gaps) -> None:
    """Streams of text, one after the other, until cancelled."""
    for turn in range(1_000_000):
        body = {"messages": [user(f"{number} {turn} Tell me a long story.")], "max_tokens": 1500}
        last: float | None = None
        async for at in tokens_of(client, body):
            if last is not None:
                gaps.append((at, at - last))
            last = at


async def ask(client: httpx.AsyncClient, data: bytes) -> float:
    """Seconds to the first token about a photo."""
    body = {"messages": [user(image_part(data), "What is this?")], "max_tokens": OUTPUTS}
    start = time.perf_counter()
    times = [at async for at in tokens_of(client, body)]
    return (times[0] if times else time.perf_counter()) - start


async def connected(client: httpx.AsyncClient, encoders: int) -> None:
    while True:
        view = (await client.get("/v1/engine")).json()
        if not encoders or view["stats"].get("remote_encoders", {}).get("connected") == encoders:
            return
        await asyncio.sleep(0.2)


async def measure(url: str, encoders: int, photos: Sequence[bytes], clients: int, streams: int) -> Row:
    waiting = iter(photos)
    gaps: Gaps = []
    first: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await connected(client, encoders)

        async def send() -> None:
            for data in waiting:
                first.append(await ask(client, data))

        texts = [asyncio.create_task(read_text(client, number, gaps)) for number in range(streams)]
        await asyncio.sleep(ALONE_SECONDS)
        start = time.perf_counter()
        await asyncio.gather(*[send() for _ in range(clients)])
        seconds = time.perf_counter() - start
        for task in texts:
            task.cancel()
        await asyncio.gather(*texts, return_exceptions=True)
        await asyncio.sleep(1.0)  # for the last counters
        metrics = (await client.get("/metrics")).text
    alone = [gap for at, gap in gaps if at < start] or [0.0]
    beside = [gap for at, gap in gaps if at >= start] or [0.0]
    ms = [
        float(np.percentile(values, share)) * 1e3
        for values, share in ((first, 50), (first, 99), (alone, 50), (beside, 50), (beside, 99))
    ]
    counted = [counter(metrics, f"saccade:remote_encoder_{name}") for name in ("encoded", "fallbacks")]
    return Row(encoders, len(photos) / seconds, *ms, *counted)


@contextlib.contextmanager
def model_of(args: argparse.Namespace) -> Any:
    """A folder, a hub id, or None for the built-in model."""
    if args.shape is None:
        yield args.model
        return
    with tempfile.TemporaryDirectory() as folder:
        write_folder(SHAPES[args.shape], Path(folder))
        tokenizer = Path(folder) / "tokenizer_config.json"
        known = json.loads(tokenizer.read_text())
        tokenizer.write_text(json.dumps({**known, "chat_template": QWEN_TEMPLATE}))
        yield folder


def show(rows: Sequence[Row]) -> None:
    print("  ".join(f"{title:>13}" for title in Row._fields))
    for row in rows:
        print("  ".join(f"{value:13.2f}" if isinstance(value, float) else f"{value:13}" for value in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; none: the built-in model")
    shapes = [name for name, shape in SHAPES.items() if shape.config["model_type"].startswith("qwen")]
    parser.add_argument("--shape", choices=shapes, help="of random weights instead")
    parser.add_argument("--encoders", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--photos", type=int, default=48)
    parser.add_argument("--size", default="640x480", metavar="WxH", help="of a photo")
    parser.add_argument("--clients", type=int, default=4, help="that send photos")
    parser.add_argument("--streams", type=int, default=2, help="of text")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there, with the commit")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of saccade serve, after all others")
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    rows = []
    with model_of(args) as model:
        for number, encoders in enumerate(args.encoders):
            photos = [photo(1000 * number + seed, width, height) for seed in range(args.photos)]
            dummy = ["--load-format", "dummy"] if args.shape else []
            with serving(model, ["--encoders", str(encoders), *dummy, *args.flags]) as (url, _):
                rows.append(asyncio.run(measure(url, encoders, photos, args.clients, args.streams)))
            show(rows)
    if args.json:
        write_json(args.json, {"rows": [row._asdict() for row in rows]})
    print(json.dumps([row._asdict() for row in rows]))


if __name__ == "__main__":
    main()
