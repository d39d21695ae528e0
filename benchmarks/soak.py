"""A soak: mixed load for as long as you like, and what drifts meanwhile. `python -m benchmarks.soak --minutes 60`

Starts `saccade serve` (the built-in model unless told) and talks to it over HTTP: chats, images, conversations,
schemas, videos, broken requests, clients that leave. Looks at both processes every few seconds. Prints tables by tenths
of the run, then the drift over its last half. The exit status is 1 if the server failed a request or a process ended.

`python -m benchmarks.soak --minutes 60 -- --kv-cache-gb 0.05` hands the flags behind -- to the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tqdm import tqdm

from benchmarks.soak_load import Call, Load, can_make_videos
from benchmarks.soak_report import Answer, Fill, Run, print_report, summary
from benchmarks.soak_watch import Watch, engine_of
from saccade.apps.evaluation.serving import serving_with
from saccade.errors import ConfigError

_TIMEOUT = 120.0
_IDLE_SECONDS = 2.0  # shorter than the server keeps idle connections, so that it closes none that is just used again
_OVERLOAD = frozenset({429, 503})


class Settings(NamedTuple):
    seconds: float
    clients: int
    rate: float  # requests a second, all clients together
    every: float  # seconds between two looks
    seed: int


# --- clients ----------------------------------------------------------------------------------------------------------


class Pacer:
    """Lets one request start every so often, whoever sends it. Time that nobody used is not made up for."""

    def __init__(self, rate: float) -> None:
        self._pause = 1 / rate
        self._next = 0.0

    async def turn(self) -> None:
        now = time.monotonic()
        self._next = max(now, self._next + self._pause)
        await asyncio.sleep(self._next - now)


async def ask(client: httpx.AsyncClient, call: Call, began: float) -> Answer:
    """Sends one request. The time of a stream is that to its first piece, of all others to their end."""
    content = call.body if isinstance(call.body, bytes) else json.dumps(call.body).encode()
    start = time.monotonic()
    try:
        async with client.stream("POST", call.path, content=content) as response:
            finish, error = await _read(response, call)
            status = response.status_code
    except httpx.HTTPError as broken:
        finish = time.monotonic()
        error = f"connection: {broken!r}"
        status = 0
    problem = error or _problem(call, status)
    return Answer(call.kind, start - began, finish - start, status, status in _OVERLOAD, problem)


async def _read(response: httpx.Response, call: Call) -> tuple[float, str | None]:
    """When the answer was there, and the error that a stream ended with."""
    if call.how == "whole" or response.status_code != 200:
        await response.aread()
        return time.monotonic(), None
    first: float | None = None
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            first = first or time.monotonic()
            if line.startswith('data: {"error"'):
                return first, f"error in a stream: {line[:200]}"
            if call.how == "leave":
                break
    return first or time.monotonic(), None if first else "a stream without events"


def _problem(call: Call, status: int) -> str | None:
    if status in _OVERLOAD:
        return None
    if call.is_bad and not 400 <= status < 500:
        return f"status {status} for a bad request"
    if not call.is_bad and status != 200:
        return f"status {status}"
    return None


async def play(client: httpx.AsyncClient, load: Load, pacer: Pacer, run: Run, end: float) -> None:
    """One client: the next request once the one before is answered and there is a turn."""
    while time.monotonic() < end and not run.watch.deaths:
        await pacer.turn()
        call = await asyncio.to_thread(load.next)
        answer = await ask(client, call, run.began)
        run.answers.append(answer)


# --- the soak ---------------------------------------------------------------------------------------------------------


async def soak(url: str, watch: Watch, settings: Settings, *, is_quiet: bool = False) -> Run:
    limits = httpx.Limits(max_connections=settings.clients + 4, keepalive_expiry=_IDLE_SECONDS)
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, limits=limits, headers=headers) as client:
        card = (await client.get("/v1/models")).json()["data"][0]
        has_video = can_make_videos() and "video" in (card.get("multimodal") or {})
        run = Run(watch, settings.seconds, began=time.monotonic())
        pacer = Pacer(settings.rate)
        end = run.began + settings.seconds
        loads = [Load(settings.seed, i, card["id"], has_video=has_video) for i in range(settings.clients)]
        async with _looking(client, run, settings, is_quiet):
            await asyncio.gather(*(play(client, load, pacer, run, end) for load in loads))
    return run


@asynccontextmanager
async def _looking(client: httpx.AsyncClient, run: Run, settings: Settings, is_quiet: bool) -> AsyncIterator[None]:
    """Samples and a progress bar beside the body."""

    async def look() -> None:
        at = time.monotonic() - run.began
        await asyncio.to_thread(run.watch.look, at)
        with contextlib.suppress(httpx.HTTPError):
            run.fills.append(_fill(at, (await client.get("/v1/engine")).json()))

    async def keep_looking() -> None:
        with tqdm(total=round(settings.seconds), unit="s", disable=is_quiet) as bar:
            while True:
                await look()
                bar.n = min(round(time.monotonic() - run.began), round(settings.seconds))
                counts = Counter(answer.outcome for answer in run.answers)
                bar.set_postfix(requests=len(run.answers), refused=counts["refused"], failed=counts["failed"])
                await asyncio.sleep(settings.every)

    task = asyncio.create_task(keep_looking())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await look()


def _fill(at: float, view: dict[str, Any]) -> Fill:
    """How full the caches are. A server that is not ours, or has done nothing yet, says nothing."""
    stats = view.get("stats") or {}
    kv = stats.get("kv") or {}
    encoder = stats.get("encoder_cache") or {}
    return Fill(
        at,
        1 - kv["free"] / kv["total"] if kv.get("total") else 0.0,
        encoder["slots_used"] / encoder["slots_total"] if encoder.get("slots_total") else 0.0,
    )


@contextmanager
def _target(args: argparse.Namespace) -> Iterator[tuple[str, Watch]]:
    if args.url:
        yield args.url, Watch(dict(zip(("api", "engine"), args.pids or (), strict=False)))
        return
    flags = [*([args.model] if args.model else []), "--no-access-log", *args.flags]
    with serving_with(flags) as server:
        yield server.url, Watch({"api": server.pid, "engine": engine_of(server.pid)})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long (10)")
    parser.add_argument("--clients", type=int, default=4, help="requests at a time (4)")
    parser.add_argument("--rate", type=float, default=4, help="requests a second at most, all clients together (4)")
    parser.add_argument("--every", type=float, default=5, help="seconds between two looks at the processes (5)")
    parser.add_argument("--seed", type=int, default=0, help="of the load (0)")
    parser.add_argument("--steady", type=float, default=8, help="MiB an hour that count as no growth (8)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything that was measured there")
    parser.add_argument("--model", help="folder or hub id; nothing: the built-in model")
    parser.add_argument("--url", help="a server that runs already, instead of one of our own")
    parser.add_argument("--pids", type=int, nargs="+", help="with --url: process ids of its API process and its engine")
    parser.add_argument("flags", nargs="*", help="behind --: flags for saccade serve")
    args = parser.parse_args()
    if args.pids and not args.url:
        parser.error("--pids goes with --url; the processes of a server of our own are known")
    return args


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server of our own ends with us
    settings = Settings(args.minutes * 60, args.clients, args.rate, args.every, args.seed)
    try:
        with _target(args) as (url, watch):
            run = asyncio.run(soak(url, watch, settings))
    except ConfigError as error:
        sys.exit(str(error))
    print_report(run, args.steady)
    if args.json:
        args.json.write_text(json.dumps(run.as_json()))
    print(json.dumps(summary(run)))
    return 1 if run.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
