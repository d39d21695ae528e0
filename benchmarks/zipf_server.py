"""Encoder cache of a running server under Zipf's law: `python -m benchmarks.zipf_server`. A table, JSON and an SVG.

Starts `saccade serve` of the built-in model with an encoder cache for a part of the catalogue. First one client asks
about images of the catalogue. Then a second one, from another address, floods the server with images that come once.
The text before an image is always new, so the prefix cache finds nothing and every image is looked up.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import time
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.cache_policies import zipf
from benchmarks.cpu_engine import photo
from benchmarks.results import write_json
from benchmarks.server import counter, image_part, user
from benchmarks.soak import serving

CATALOGUE = 60  # images
ROUND = 20  # requests about the catalogue between two looks at the counters
TOGETHER = 2  # of them at a time
WINDOW = 5  # rounds over which the hit rate is taken
FLOOD = 2  # new images per image of the catalogue


class Point(NamedTuple):
    requests: int  # about the catalogue, since the start
    seconds: float
    hit_rate: float  # of the catalogue, over the latest rounds
    is_flooded: bool


async def ask(client: httpx.AsyncClient, seed: int, number: int, side: int) -> None:
    parts = user(str(number), image_part(photo(seed, side, side)))
    body = {"messages": [parts], "max_tokens": 1, "temperature": 0}
    (await client.post("/v1/chat/completions", json=body)).raise_for_status()


async def measure(url: str, rounds: int, side: int) -> list[Point]:
    """The first 60 % of the rounds without the flood, then with it."""
    draws = zipf("", images=CATALOGUE)
    numbers = count()
    hits = [0.0]
    points = [Point(0, 0.0, 0.0, False)]
    start = time.monotonic()
    flood = httpx.AsyncHTTPTransport(local_address="127.0.0.2")  # another address is another tenant
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        httpx.AsyncClient(base_url=url, timeout=60, transport=flood) as flooding,
    ):
        before = counter((await client.get("/metrics")).text, "saccade:encoder_cache_hits")
        for index in range(rounds):
            is_flooded = index >= 0.6 * rounds
            for _ in range(ROUND // TOGETHER):
                asks = [ask(client, int(one.image), next(numbers), side) for one in islice(draws, TOGETHER)]
                for number in islice(numbers, TOGETHER * FLOOD * is_flooded):
                    asks.append(ask(flooding, 1_000_000 + number, number, side))
                await asyncio.gather(*asks)
            hits.append(counter((await client.get("/metrics")).text, "saccade:encoder_cache_hits") - before)
            recent = hits[-1 - WINDOW :]
            rate = (recent[-1] - recent[0]) / (ROUND * (len(recent) - 1))
            points.append(Point(ROUND * (index + 1), round(time.monotonic() - start, 1), round(rate, 4), is_flooded))
            print("{:6}  {:6.1f} s  {:6.1%}  {}".format(*points[-1][:3], "flooded" * is_flooded), flush=True)
    return points


# --- the plot -------------------------------------------------------------------------------------------------------

LEFT, RIGHT, TOP, BOTTOM = 56, 650, 46, 300


def svg(points: Sequence[Point], title: str) -> str:
    last = points[-1].requests
    line = " ".join(f"{_x(p.requests, last):.1f},{_y(p.hit_rate):.1f}" for p in points)
    flooded = _x(next(p.requests for p in points if p.is_flooded) - ROUND, last)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 350" font-family="sans-serif" font-size="12">',
        '<rect width="680" height="350" fill="#ffffff"/>',
        f'<rect x="{flooded:.1f}" y="{TOP}" width="{RIGHT - flooded:.1f}" height="{BOTTOM - TOP}" fill="#f3e9e7"/>',
        _text(LEFT, 22, title, size=15),
        _text(flooded + 8, BOTTOM - 10, f"{FLOOD} new images beside each"),
    ]
    for percent in range(0, 101, 20):
        parts.append(f'<path d="M{LEFT} {_y(percent / 100):.1f}H{RIGHT}" stroke="#e3e3e3"/>')
        parts.append(_text(LEFT - 8, _y(percent / 100) + 4, f"{percent} %", "end"))
    for requests in range(0, last + 1, 100):
        parts.append(_text(_x(requests, last), BOTTOM + 20, f"{requests:,}", "middle"))
    parts += [
        _text((LEFT + RIGHT) / 2, BOTTOM + 40, "requests about the catalogue", "middle"),
        f'<polyline points="{line}" fill="none" stroke="#1f6fb2" stroke-width="2"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(requests: int, last: int) -> float:
    return LEFT + (RIGHT - LEFT) * requests / last


def _y(share: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * share


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" fill="#222222"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=32, help=f"of {ROUND} requests about the catalogue")
    parser.add_argument("--side", type=int, default=56, help="pixels of an image, which is square")
    parser.add_argument("--encoder-cache-gb", default="0.000287", help="default: for 44 images of 56 pixels")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="write an SVG")
    given = parser.parse_args()
    limits = ["--encoder-cache-gb", given.encoder_cache_gb, "--max-pixels", str(given.side**2)]
    with serving(None, limits) as (url, _):
        points = asyncio.run(measure(url, given.rounds, given.side))
    if given.json:
        write_json(given.json, {"points": [point._asdict() for point in points]})
    if given.plot:
        title = f"Images found in the encoder cache, of the latest {WINDOW * ROUND}, under Zipf's law"
        Path(given.plot).write_text(svg(points, title), encoding="utf-8")


if __name__ == "__main__":
    main()
