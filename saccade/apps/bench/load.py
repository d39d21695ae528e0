"""Sends jobs from several processes, in an open or a closed loop, and collects what became of them.

closed   so many clients, each sends its next request when the last has ended
open     requests come by a Poisson process or as in a trace, however long answers take: what a service meets
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any, NamedTuple

from tqdm import tqdm

from saccade.apps.bench.stream_client import RequestSample, ServerAddress, StreamConnections
from saccade.apps.bench.trace import TraceRequest, job_of
from saccade.apps.bench.workloads import WORKLOADS, ClientJob, RequestShape
from saccade.errors import ConfigError

PATH = "/v1/chat/completions"
MAX_PROCESSES = 8
_TICK_SECONDS = 0.01  # how often a client looks whether it is late
_WAIT_SECONDS = 60.0  # for processes that have made their requests
_HEAD_START_SECONDS = 0.2  # for all processes to hear that the load begins
_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Part:
    """One kind of jobs in a load."""

    workload: str
    shape: RequestShape
    jobs: int
    clients: int | None = None  # closed loop
    rate: float | None = None  # open loop, jobs a second
    seed: int = 0
    trace: tuple[
        TraceRequest, ...
    ] = ()  # what the jobs are, and in an open loop when; else the workload says

    def times(self) -> list[float] | None:
        """When each job is sent, in seconds after the start; None in a closed loop."""
        if self.clients is not None:
            return None
        if self.rate is None:
            return [request.at for request in self.trace[: self.jobs]]
        rng = random.Random(self.seed)
        now = 0.0
        times = []
        for _ in range(self.jobs):
            times.append(now)
            now += rng.expovariate(self.rate)
        return times

    def job(self, number: int, place: int) -> ClientJob:
        """`place`: of this part in the load. Parts of one seed send different things."""
        rng = random.Random(f"{self.seed} {place} {number}")
        if self.trace:
            return job_of(self.trace[number], self.shape, rng)
        return WORKLOADS[self.workload](self.shape, number, rng)


class Result(NamedTuple):
    """One request, and where it came from."""

    part: int
    has_images: bool
    due: float  # when it should have been sent
    sample: RequestSample


class LoadResult(NamedTuple):
    results: list[Result]
    lag: list[float]  # seconds that clients woke up late


@dataclass(frozen=True)
class Server:
    url: str
    api_key: str | None = None
    timeout: float = 600.0  # seconds of a request


def run_load(
    server: Server, parts: Sequence[Part], processes: int | None = None, progress: bool = True
) -> LoadResult:
    ServerAddress(server.url, server.api_key)  # a bad address fails here, once
    max_workers = max(part.clients or part.jobs for part in parts)
    number = max(1, min(processes or min(MAX_PROCESSES, os.cpu_count() or 1), max_workers))
    num_jobs = _context.Value("L", 0)
    num_answers = _context.Value("L", 0)
    barrier = _context.Barrier(number + 1)
    queues: list[Queue[LoadResult]] = [_context.Queue() for _ in range(number)]
    arguments = [
        (server, tuple(parts), i, number, num_jobs, num_answers, barrier, queues[i]) for i in range(number)
    ]
    workers = [_context.Process(target=_work, args=row, daemon=True) for row in arguments]
    total = sum(part.jobs for part in parts)
    with _running(workers):
        _watch(num_jobs, total, "preparing", workers, progress)
        barrier.wait(_WAIT_SECONDS)
        _watch(num_answers, total, "requests", workers, progress)
        shares = [_taken(queue, workers) for queue in queues]
    results = [result for one in shares for result in one.results]
    return LoadResult(results, [late for one in shares for late in one.lag])


@contextlib.contextmanager
def _running(workers: Sequence[SpawnProcess]) -> Iterator[None]:
    try:
        for worker in workers:
            worker.start()
        yield
        for worker in workers:
            worker.join()
    finally:
        started = [worker for worker in workers if worker.pid is not None]
        for worker in started:
            worker.terminate()
        for worker in started:
            worker.join()


def _taken(queue: Queue[LoadResult], workers: Sequence[SpawnProcess]) -> LoadResult:
    while True:
        try:
            return queue.get(timeout=1.0)
        except Empty:
            if any(worker.exitcode not in (None, 0) for worker in workers):
                raise ConfigError("a process of clients ended before it told its results") from None


def _watch(counter: Any, total: int, name: str, workers: Sequence[SpawnProcess], progress: bool) -> None:
    with tqdm(total=total, desc=name, unit="", disable=not progress, leave=False) as bar:
        count = 0
        while count < total:
            time.sleep(0.05)
            new = counter.value - count
            count += new
            if new:
                bar.update(new)
            if any(worker.exitcode not in (None, 0) for worker in workers):
                raise ConfigError(f"a process of clients ended early ({name}); is memory short?")


# --- in a client process ------------------------------------------------------------------------------------


def _work(
    server: Server,
    parts: tuple[Part, ...],
    index: int,
    number: int,
    num_jobs: Any,
    num_answers: Any,
    barrier: Any,
    queue: Any,
) -> None:
    def tick(counter: Any) -> Callable[[], None]:
        def count() -> None:
            with counter.get_lock():
                counter.value += 1

        return count

    shares = [_Share.of(part, place, index, number, tick(num_jobs)) for place, part in enumerate(parts)]
    barrier.wait()
    queue.put(
        asyncio.run(_drive(server, shares, time.perf_counter() + _HEAD_START_SECONDS, tick(num_answers)))
    )


class _Share(NamedTuple):
    """A process's part of a part."""

    part: int
    jobs: list[ClientJob]
    times: list[float] | None
    clients: int

    @staticmethod
    def of(part: Part, place: int, index: int, number: int, tick: Callable[[], None]) -> _Share:
        sharing = min(number, part.clients or number)  # a process without clients gets no jobs
        jobs = []
        for job in range(index, part.jobs, sharing) if index < sharing else ():
            jobs.append(part.job(job, place))
            tick()
        times = part.times()
        clients = len(range(index, part.clients or 0, number))
        return _Share(place, jobs, times[index::number] if times is not None else None, clients)


async def _drive(
    server: Server, shares: Sequence[_Share], start: float, tick: Callable[[], None]
) -> LoadResult:
    connections = StreamConnections(ServerAddress(server.url, server.api_key), server.timeout)
    results: list[Result] = []

    async def send(share: _Share, job: ClientJob, due: float) -> None:
        for body in job.bodies:
            results.append(Result(share.part, job.has_images, due, await connections.send(PATH, body)))
            due = time.perf_counter()
        tick()

    async def client(share: _Share, jobs: Iterator[ClientJob]) -> None:
        for job in jobs:
            await send(share, job, time.perf_counter())

    lag: list[float] = []
    watching = asyncio.create_task(_note_lag(lag))
    await asyncio.sleep(start - time.perf_counter())
    tasks = []
    for share in shares:
        jobs = iter(share.jobs)
        if share.times is None:
            tasks += [asyncio.create_task(client(share, jobs)) for _ in range(share.clients)]
        else:
            tasks.append(asyncio.create_task(_arrive(share, share.times, start, send)))
    await asyncio.gather(*tasks)
    watching.cancel()
    connections.close()
    return LoadResult(results, lag)


async def _arrive(share: _Share, times: Sequence[float], start: float, send: Callable[..., Any]) -> None:
    tasks = []
    for job, at in zip(share.jobs, times, strict=True):
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        tasks.append(asyncio.create_task(send(share, job, start + at)))
    await asyncio.gather(*tasks)


async def _note_lag(lag: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_TICK_SECONDS)
        lag.append(time.perf_counter() - before - _TICK_SECONDS)
