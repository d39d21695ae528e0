"""OpenAI-compatible servers on a CPU, in turns: `python -m benchmarks.cpu_peers --server NAME COMMAND --server ...`

`{port}` in a command is replaced. A round is a new server: first tokens, decoding, eight requests at once, and the peak
memory of all its processes. The table has medians, each peer's ratio to the first server, and the spread of the rounds.
All servers must count the same tokens.

Times during which other processes took more than a twentieth of the cores are taken again, with new images.
`--processor-time` counts what the server's processes computed instead, for servers of one thread beside other work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cpu_engine import REPEATS, ROWS, TOKENS, photo
from benchmarks.server import ask, body, image_part, user

START = 300  # seconds a server may take
TRIES = 4  # until a time is undisturbed
DISTURBED = 0.05  # of the cores, by other processes
NEW = ("new", "new_8", "shared_8")  # rows that ask about images not seen before
TICKS = os.sysconf("SC_CLK_TCK")
Counts = dict[str, tuple[int, int]]
"""Prompt and answer tokens of each row."""


@contextmanager
def serving(command: str, log: Path) -> Iterator[tuple[str, int]]:
    """Its address and process id once it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("w") as output:
        parts = shlex.split(command.replace("{port}", str(port)))
        process = subprocess.Popen(parts, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_healthy(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _wait_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"the server was not healthy after {START} seconds")


def processes(pid: int) -> list[int]:
    """A process and its children."""
    children = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    return [pid, *(process for child in children for process in processes(child))]


def peak_mib(pid: int) -> float:
    """Highest resident memory of each process, added."""
    lines = [line for process in processes(pid) for line in Path(f"/proc/{process}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def computed(pid: int) -> float:
    """Processor seconds of a process and its children."""
    stats = (Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in processes(pid))
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / TICKS


def busy() -> float:
    """Processor seconds of the whole machine."""
    user, nice, system, _idle, _wait, *interrupts = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return sum(map(int, (user, nice, system, *interrupts))) / TICKS


class Round:
    """One new server, measured once. `seed` makes its images new."""

    def __init__(self, client: httpx.AsyncClient, pid: int, seed: int, counts_processor_time: bool) -> None:
        self.client = client
        self.pid = pid
        self.seed = seed
        self.counts_processor_time = counts_processor_time
        self.counts: Counts = {}
        self.disturbed = 0  # times that stayed so

    async def ask(self, row: str, images: Sequence[tuple[int, str]], tokens: int) -> float:
        """Seconds until all requests, each an image and a question, are answered."""
        for _ in range(TRIES):
            elapsed, disturbed = await self._ask_once(row, images, tokens)
            if disturbed < DISTURBED or self.counts_processor_time:
                return elapsed
            images = [(number + 100, question) for number, question in images] if row in NEW else images
            await asyncio.sleep(1)
        self.disturbed += 1
        return elapsed

    async def _ask_once(self, row: str, images: Sequence[tuple[int, str]], tokens: int) -> tuple[float, float]:
        """The time, and the share of the cores that other processes took."""
        requests = [body([user(image_part(photo(self.seed + i)), question)], tokens) for i, question in images]
        start = time.perf_counter()
        server = computed(self.pid)
        machine = busy()
        client = time.process_time()
        answers = await asyncio.gather(*(ask(self.client, request) for request in requests))
        elapsed = time.perf_counter() - start
        server = computed(self.pid) - server
        disturbance = busy() - machine - server - (time.process_time() - client) - 2 / TICKS  # less what rounding adds
        usages = [answer["usage"] for answer in answers]
        self.counts[row] = (sum(u["prompt_tokens"] for u in usages), sum(u["completion_tokens"] for u in usages))
        return server if self.counts_processor_time else elapsed, disturbance / elapsed / (os.cpu_count() or 1)

    async def rate(self, row: str, images: Sequence[tuple[int, str]]) -> float:
        """Tokens a second once all prompts are computed."""
        await self.ask(row, images, 1)
        first = statistics.median([await self.ask(row, images, 1) for _ in range(REPEATS)])
        whole = statistics.median([await self.ask(row, images, TOKENS) for _ in range(REPEATS)])
        return len(images) * (TOKENS - 1) / (whole - first)

    async def measure(self) -> dict[str, float]:
        question = "What is in this picture?"
        await self.ask("warm-up", [(1, "What?")], 4)
        return {
            "new": statistics.median([await self.ask("new", [(10 + i, question)], 1) for i in range(REPEATS)]),
            "seen": statistics.median([await self.ask("seen", [(12, f"Question {i}?")], 1) for i in range(REPEATS)]),
            "decode_1": await self.rate("decode_1", [(12, question)]),
            "decode_8": await self.rate("decode_8", [(12, f"Question {i}, what?") for i in range(8)]),
            "new_8": await self.ask("new_8", [(50 + i, question) for i in range(8)], TOKENS),
            "shared_8": await self.ask("shared_8", [(70 + i % 2, f"Question {i}?") for i in range(8)], TOKENS),
            "peak_mib": peak_mib(self.pid),
        }


async def run_round(name: str, command: str, seed: int, args: argparse.Namespace) -> tuple[dict[str, float], Counts]:
    began = time.perf_counter()
    with serving(command, args.logs / f"{name}.log") as (url, pid):
        start = time.perf_counter() - began
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            current = Round(client, pid, seed, args.processor_time)
            figures = await current.measure()
    rows = " ".join(f"{key} {value:.3f}" for key, value in figures.items())
    print(f"{name}: start {start:.1f} s, {current.disturbed} times disturbed; {rows}", flush=True)
    return figures, current.counts


def table(names: Sequence[str], rounds: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    rows = []
    for key, title in ROWS.items():
        values = {name: [figures[key] for figures in rounds[name]] for name in names}
        medians = {name: statistics.median(v) for name, v in values.items()}
        spreads = {name: (max(v) - min(v)) / medians[name] for name, v in values.items()}
        rows.append({"row": title, "median": medians, "spread": spreads})
        cells = (f"{medians[n]:9.3f} ({medians[n] / medians[names[0]]:4.2f}, ±{spreads[n] / 2:3.0%})" for n in names)
        print(f"{title:42}" + "".join(f" {cell:>24}" for cell in cells))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", nargs=2, action="append", required=True, metavar=("NAME", "COMMAND"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--logs", type=Path, default=Path("build"), help="folder for what the servers print")
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are ended
    args.logs.mkdir(parents=True, exist_ok=True)
    servers = dict(args.server)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    for index in range(args.rounds):
        counts = {}
        for name, command in servers.items():
            figures, counts[name] = asyncio.run(run_round(name, command, 1000 * index, args))
            rounds[name].append(figures)
        if len({json.dumps(each) for each in counts.values()}) > 1:
            raise SystemExit(f"the servers counted other tokens: {counts}")
    print(f"{'':42}" + "".join(f" {name:>24}" for name in servers))
    print(json.dumps(table(list(servers), rounds)))


if __name__ == "__main__":
    main()
