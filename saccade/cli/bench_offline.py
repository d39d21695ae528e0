"""`saccade bench --offline`: the same loads through an engine in this process, without HTTP.

One thread prepares prompts, steps and takes the times, as a caller of `saccade.LLM` would.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tqdm import tqdm

from saccade import LLM, SamplingParams
from saccade.apps.bench.load import LoadResult, Part, Result
from saccade.apps.bench.max_images import Attempt
from saccade.apps.bench.stream_client import RequestSample
from saccade.apps.bench.workloads import WORKLOADS, ClientJob, RequestShape
from saccade.cli.bench import engine_options
from saccade.cli.bench_load import Subject
from saccade.errors import RequestError
from saccade.llm import OfflineEngine
from saccade.outputs import RequestOutput


@contextmanager
def offline(args: argparse.Namespace) -> Iterator[Subject]:
    progress = not args.quiet
    with LLM(model=args.offline or None, use_tqdm=progress, **engine_options(args)) as llm:
        yield Subject(
            "the engine",
            args.offline or "built in",
            lambda parts: run_offline(llm.engine, parts, progress),
            lambda shape, images: _attempt(llm, shape, images, args.seed),
        )


def run_offline(engine: OfflineEngine, parts: Sequence[Part], progress: bool = False) -> LoadResult:
    total = sum(part.jobs for part in parts)
    with tqdm(total=total, desc="preparing", unit="", disable=not progress, leave=False) as bar:
        sources = [_Source.of(part, place, bar.update) for place, part in enumerate(parts)]
    with tqdm(total=total, desc="requests", unit="", disable=not progress, leave=False) as bar:
        driver = _Driver(engine, sources, bar.update)
        driver.run()
    return LoadResult(driver.results, [])


def _attempt(llm: LLM, shape: RequestShape, images: int, seed: int) -> Attempt:
    job = WORKLOADS["image"](replace(shape, images=images), 0, random.Random(f"{seed} {images}"))
    chat = _chat(job.bodies[0])
    try:
        llm.chat(chat.messages, chat.params, use_tqdm=False)
    except RequestError as error:
        return Attempt(images, str(error), is_refusal=True)
    return Attempt(images, None)


class _Chat(NamedTuple):
    """A body, as `OfflineEngine.add_chat` takes it."""

    messages: list[dict[str, Any]]
    params: SamplingParams


class _Work(NamedTuple):
    """A job: its chats follow each other."""

    chats: list[_Chat]
    has_images: bool

    @staticmethod
    def of(job: ClientJob) -> _Work:
        return _Work([_chat(body) for body in job.bodies], job.has_images)


def _chat(body: bytes) -> _Chat:
    """Data URLs become bytes here: a caller in Python has no need of them."""
    fields = json.loads(body)
    for message in fields["messages"]:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] not in ("text", "file"):
                link = part[part["type"]]
                link["url"] = base64.b64decode(link["url"].partition(",")[2])
    params = SamplingParams(
        temperature=fields["temperature"],
        max_tokens=fields["max_tokens"],
        ignore_eos=fields.get("ignore_eos", False),
    )
    return _Chat(fields["messages"], params)


@dataclass
class _Source:
    """A part's jobs that have not begun."""

    place: int
    jobs: deque[_Work]
    times: deque[float]  # empty: a closed loop
    clients: int
    num_open: int = 0  # jobs

    @staticmethod
    def of(part: Part, place: int, tick: Callable[[], object]) -> _Source:
        jobs: deque[_Work] = deque()
        for number in range(part.jobs):
            jobs.append(_Work.of(part.job(number, place)))
            tick()
        return _Source(place, jobs, deque(part.times() or ()), part.clients or 0)

    def due(self, start: float) -> Iterator[tuple[_Work, float]]:
        """Jobs to begin now, each with the time at which it should have begun."""
        while self.jobs and self._is_due(start):
            self.num_open += 1
            yield self.jobs.popleft(), start + self.times.popleft() if self.times else time.perf_counter()

    def _is_due(self, start: float) -> bool:
        if self.times:
            return self.next_time(start) <= time.perf_counter()
        return self.num_open < self.clients

    def next_time(self, start: float) -> float:
        return start + self.times[0] if self.times else start


@dataclass
class _Stream:
    """A chat that the engine works on."""

    source: _Source
    work: _Work
    turn: int  # of the work's chats
    due: float
    start: float
    token_times: list[float] = field(default_factory=list)
    num_tokens: int = 0


class _Driver:
    def __init__(self, engine: OfflineEngine, sources: Sequence[_Source], tick: Callable[[], object]) -> None:
        self.results: list[Result] = []
        self._engine = engine
        self._sources = sources
        self._tick = tick
        self._streams: dict[str, _Stream] = {}
        self._count = 0

    def run(self) -> None:
        start = time.perf_counter()
        while self._streams or any(source.jobs for source in self._sources):
            for source in self._sources:
                for work, due in source.due(start):
                    self._send(source, work, 0, due)
            if self._streams:
                for output in self._engine.step():
                    self._take(output)
            else:
                times = [source.next_time(start) for source in self._sources if source.jobs]
                time.sleep(max(0.0, min(times, default=start) - time.perf_counter()))

    def _send(self, source: _Source, work: _Work, turn: int, due: float) -> None:
        self._count += 1
        request_id = f"bench-{self._count}"
        stream = _Stream(source, work, turn, due, time.perf_counter())
        chat = work.chats[turn]
        try:
            self._engine.add_chat(request_id, chat.messages, chat.params)
        except RequestError as error:
            self._end(stream, 0, str(error))
        else:
            self._streams[request_id] = stream

    def _take(self, output: RequestOutput) -> None:
        stream = self._streams[output.request_id]
        tokens = len(output.outputs[0].token_ids)
        if tokens > stream.num_tokens:
            stream.token_times.append(time.perf_counter())
            stream.num_tokens = tokens
        if output.finished:
            del self._streams[output.request_id]
            self._end(stream, len(output.prompt_token_ids), str(output.error) if output.error else None)

    def _end(self, stream: _Stream, prompt_tokens: int, error: str | None) -> None:
        """Note what became of a chat, and begin the next of its conversation."""
        now = time.perf_counter()
        if error is None and not stream.token_times:
            error = "no token came"
        sample = RequestSample(stream.start, stream.token_times, now, prompt_tokens, stream.num_tokens, error)
        self.results.append(Result(stream.source.place, stream.work.has_images, stream.due, sample))
        if stream.turn + 1 < len(stream.work.chats):
            self._send(stream.source, stream.work, stream.turn + 1, now)
        else:
            stream.source.num_open -= 1
            self._tick()
