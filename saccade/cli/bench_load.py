"""`saccade bench`: a load on a running server or on an engine, and what it showed."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from saccade.apps.bench.chart import distributions, rates
from saccade.apps.bench.goodput import FIRST_SHARE, best, find_goodput, saturated, summary
from saccade.apps.bench.levels import LoadLevel, ms_between, seconds_of, title
from saccade.apps.bench.load import LoadResult, Part, Server, run_load
from saccade.apps.bench.max_images import Attempt, send_images
from saccade.apps.bench.report import (
    Figures,
    Slo,
    as_json,
    client_warning,
    errors_of,
    figures,
    figures_by_group,
    groups,
    table,
    write_csv,
)
from saccade.apps.bench.stream_client import ServerAddress
from saccade.apps.bench.trace import TraceRequest
from saccade.apps.bench.workloads import RequestShape
from saccade.cli.bench import MAX_IMAGES
from saccade.cli.bench_checks import check
from saccade.cli.bench_max_images import max_images
from saccade.cli.get_json import get_json, get_text
from saccade.errors import ConfigError
from saccade.util.plain_files import write_whole

_WARM_UP = 4  # requests before the load, not counted
_ROUNDS = 3  # of each client in the closed loops before a search for goodput
_LEVEL_ROUNDS = 8  # requests of each client for a row of a table
_LEVEL_REQUESTS = 16  # and of all, at least
_TRIAL_SECONDS = 20.0  # of one load of the search, at least
_MAX_TRIAL_SECONDS = 120.0
_MAX_TRIAL_REQUESTS = 5000  # made before they are sent
_SEEDS = 1000  # between two of its loads: each brings new images


Run = Callable[[Sequence[Part]], LoadResult]


class Subject(NamedTuple):
    """What is measured."""

    name: str  # in errors
    model: str
    run: Run  # puts a load on it
    attempt: Callable[[RequestShape, int], Attempt]  # one request with so many images
    seconds: Callable[[], dict[str, float]] = dict  # what it has spent so far, as far as it tells


@contextmanager
def server(args: argparse.Namespace) -> Iterator[Subject]:
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    server = Server(args.url, key)
    yield Subject(
        "the server",
        args.model or _served_model(args.url, key),
        lambda parts: run_load(server, parts, args.processes, progress=not args.quiet),
        lambda shape, images: send_images(server, shape, images, args.seed),
        lambda: seconds_of(get_text(ServerAddress(args.url, key).url("/metrics"), key, args.url)),
    )


def bench(
    args: argparse.Namespace,
    open_subject: Callable[[argparse.Namespace], AbstractContextManager[Subject]] = server,
) -> int:
    """2 where the arguments cannot be used: nothing is sent then."""
    try:
        trace = check(args)
    except ConfigError as error:
        if args.debug:
            raise
        print(f"saccade: {error}", file=sys.stderr)
        return 2
    with _ended_by_sigterm(), open_subject(args) as subject:
        return _measure(args, subject, trace)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves the command as an exception does, so that processes and semaphores go with it."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(args: argparse.Namespace, subject: Subject, trace: tuple[TraceRequest, ...]) -> int:
    shape = _shape(args, subject.model)
    if args.workload == MAX_IMAGES:
        return _max_images(args, lambda images: subject.attempt(shape, images))
    _warm_up(subject, _warm_up_part(args, shape, trace))
    slo = Slo(args.slo_ttft_ms, args.slo_itl_ms)
    if args.goodput:
        return _goodput(args, subject.run, shape, slo)
    if args.levels:
        return _table(args, subject, shape, slo)
    return _once(args, subject.run, shape, slo, trace)


def _max_images(args: argparse.Namespace, attempt: Callable[[int], Attempt]) -> int:
    """1 where the server failed rather than refused, and where it takes no image at all."""
    search = max_images(attempt, args.max_images)
    limit = search.limit
    _write(args, {"max_images": search.images, "limit": limit and limit._asdict()})
    if limit is not None and not limit.is_refusal:
        return 1
    return int(search.images == 0)


def _warm_up_part(args: argparse.Namespace, shape: RequestShape, trace: tuple[TraceRequest, ...]) -> Part:
    """A trace gives requests of both kinds."""
    kinds = ([r for r in trace if r.sizes], [r for r in trace if not r.sizes])
    requests = tuple(request for kind in kinds for request in kind[: _WARM_UP // 2])
    count = len(requests) or _WARM_UP
    return Part(args.workload, shape, count, clients=count, seed=-1 - args.seed, trace=requests)


def _warm_up(subject: Subject, part: Part) -> None:
    """Not counted. Where none is answered, nothing would be."""
    results = subject.run([part]).results
    if all(result.sample.error for result in results):
        raise ConfigError(f"{subject.name} answers no request: {results[0].sample.error}")


def _once(
    args: argparse.Namespace, run: Run, shape: RequestShape, slo: Slo, trace: tuple[TraceRequest, ...]
) -> int:
    parts = _parts(args, shape, args.rate, args.requests, args.seed, trace)
    names = [args.workload, "beside"][: len(parts)]
    load = run(parts)
    rows = figures_by_group(load.results, names, slo)
    print(table(rows))
    if args.plot:
        write_whole(args.plot, distributions(groups(load.results, names), slo))
    if args.csv:
        write_csv(args.csv, load.results, names)
    whole = as_json(rows[args.workload])
    _write(args, {**whole, "parts": {name: as_json(row) for name, row in rows.items()}})
    return _complain(load)


def _table(args: argparse.Namespace, subject: Subject, shape: RequestShape, slo: Slo) -> int:
    """A load for each number of clients, with new images."""
    levels: list[LoadLevel] = []
    loads: list[LoadResult] = []
    for number, clients in enumerate(args.levels):
        before = subject.seconds()
        if not levels:
            print(title(before))
        requests = args.requests or max(_LEVEL_REQUESTS, _LEVEL_ROUNDS * clients)
        jobs = math.ceil(requests / max(1, shape.pages))
        part = Part(args.workload, shape, jobs, clients, seed=args.seed + _SEEDS * number)
        loads.append(subject.run([part]))
        row = figures(loads[-1].results, slo)
        levels.append(LoadLevel(clients, row, ms_between(before, subject.seconds(), row.requests)))
        print(levels[-1].row(), flush=True)
    _write(args, {"levels": [level.as_json() for level in levels]})
    return _complain(*loads)


def _goodput(args: argparse.Namespace, run: Run, shape: RequestShape, slo: Slo) -> int:
    loads: list[LoadResult] = []

    def measure(rate: float) -> Figures:
        count = _trial_requests(rate, args.requests)
        loads.append(run(_parts(args, shape, rate, count, seed=args.seed + _SEEDS * len(loads))))
        row = figures([result for result in loads[-1].results if result.part == 0], slo)
        row = row._replace(errors=sum(result.sample.error is not None for result in loads[-1].results))
        verdict = "kept" if row.keeps(slo) else "missed"
        ttft, itl = (ms[-1] if ms else 0.0 for ms in (row.ttft_ms, row.itl_ms))
        met = f"p99 {ttft:.0f} ms to the first token, {itl:.1f} between tokens, {row.errors} errors"
        print(f"{rate:8.2f} requests/s: {met}: {verdict}", flush=True)
        return row

    trials = find_goodput(measure, slo, _first_rate(args, run, shape))
    trial = best(trials)
    rate = 0.0 if trial is None else trial.rate
    print(summary(trials, slo))
    if args.plot:
        write_whole(args.plot, rates(trials, slo))
    _write(args, {"goodput_per_s": rate, "trials": [{"rate": t.rate, **as_json(t.figures)} for t in trials]})
    _complain(*loads)  # the highest rates are meant to be too high
    return int(trial is None)


def _trial_requests(rate: float, min_requests: int) -> int:
    """The number is at least this, where requests do not take too long or too much memory."""
    max_requests = min(max(rate * _MAX_TRIAL_SECONDS, _WARM_UP), _MAX_TRIAL_REQUESTS)
    return int(min(max(min_requests, rate * _TRIAL_SECONDS), max_requests))


def _first_rate(args: argparse.Namespace, run: Run, shape: RequestShape) -> float:
    """Near what the server can do: a search from far away would take a load for each rate on the way."""

    def measure(clients: int) -> Figures:
        part = Part(args.workload, shape, _ROUNDS * clients, clients, seed=args.seed - _SEEDS * clients)
        results = run([part]).results
        row = figures(results, Slo())
        jobs = row.requests_per_s * part.jobs / len(results)  # a conversation has several requests
        print(f"{clients:8} clients: {jobs:.2f} requests/s", flush=True)
        return row._replace(requests_per_s=jobs)

    return FIRST_SHARE * max(saturated(measure, args.clients), 1e-3)


def _parts(
    args: argparse.Namespace,
    shape: RequestShape,
    rate: float | None,
    count: int,
    seed: int,
    trace: tuple[TraceRequest, ...] = (),
) -> list[Part]:
    clients = None if rate or trace else args.clients
    parts = [Part(args.workload, shape, count, clients, rate, seed, trace)]
    if args.beside:
        beside = RequestShape(shape.model, shape.sizes, words=1, tokens=4, ignore_eos=shape.ignore_eos)
        images = math.ceil(args.beside * count / rate) if rate else args.beside_images
        parts.append(Part("image", beside, images, None, args.beside, seed + 1))
    return parts


def _shape(args: argparse.Namespace, model: str) -> RequestShape:
    return RequestShape(
        model,
        tuple(args.size or [(1280, 720)]),
        args.images,
        args.words,
        args.tokens,
        args.turns,
        args.catalogue,
        args.zipf,
        args.frames,
        args.fps,
        args.pages,
        ignore_eos=not args.stop,
    )


def _served_model(url: str, key: str | None) -> str:
    _, body = get_json(ServerAddress(url, key).url("/v1/models"), key, server=url)
    try:
        return str(body["data"][0]["id"])
    except (LookupError, TypeError):
        remedy = "name one with --model, and a key in OPENAI_API_KEY"
        raise ConfigError(f"{url} lists no models; {remedy}") from None


def _write(args: argparse.Namespace, findings: dict[str, Any]) -> None:
    if args.json:
        arguments = {name: value for name, value in vars(args).items() if name not in ("run", "api_key")}
        write_whole(args.json, json.dumps({"arguments": arguments, **findings}, indent=1, default=str) + "\n")


def _complain(*loads: LoadResult) -> int:
    """Tells stderr what makes figures doubtful. 1 if a request failed."""
    warnings = {warning for load in loads if (warning := client_warning(load))}
    for warning in sorted(warnings)[:1]:
        print(f"saccade: {warning}", file=sys.stderr)
    errors = errors_of([result for load in loads for result in load.results])
    for text, count in list(errors.items())[:5]:
        print(f"saccade: {count} requests failed: {text}", file=sys.stderr)
    return int(bool(errors))
