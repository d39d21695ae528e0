"""`saccade bench`: a load on a running server, and what it showed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpcore

from saccade.bench.goodput import best, find_goodput
from saccade.bench.load import LoadResult, Part, Server, run_load
from saccade.bench.report import (
    Figures,
    Slo,
    as_json,
    client_warning,
    errors_of,
    figures,
    groups,
    table,
    write_csv,
)
from saccade.bench.workloads import WORKLOADS, Shape
from saccade.errors import ConfigError

_SECONDS = 10.0
_WARM_UP = 4  # requests before the load, not counted
_FIRST_RATE = 1.0  # of the search for goodput, requests a second
_TRIAL_SECONDS = 20.0  # of one of its loads


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "workload",
        nargs="?",
        default="image",
        choices=sorted(WORKLOADS),
        help="what requests hold (default: image)",
    )
    add("--url", default="http://localhost:8000", help="of the server (default: http://localhost:8000)")
    add("--model", help="name it serves; automatic: the first it lists")
    add("--api-key", help="better as OPENAI_API_KEY, which ps does not show")
    _add_load(command)
    _add_shape(command.add_argument_group("requests").add_argument)
    add = command.add_argument_group("output").add_argument
    add("--processes", type=_count, help="of clients; automatic: one per core, at most 8")
    add("--seed", type=int, default=0, help="of words, images and arrivals (default: 0)")
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    add("--csv", type=Path, metavar="FILE", help="also write a line for each request there")
    add("--quiet", action="store_true", help="no progress bars")
    add("--debug", action="store_true", help="show tracebacks")


def _add_load(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("load")
    add = group.add_argument
    load = group.add_mutually_exclusive_group()
    load.add_argument("--clients", type=_count, default=8, help="closed loop: so many at a time (default: 8)")
    load.add_argument("--rate", type=_positive, help="open loop: requests a second, by a Poisson process")
    load.add_argument(
        "--goodput", action="store_true", help="search the highest rate whose p99 keeps to the service levels"
    )
    add("--requests", type=_count, default=100, help="in all (default: 100)")
    add(
        "--beside",
        type=_positive,
        metavar="RATE",
        help="new images a second beside the workload, 4 tokens out each",
    )
    add("--beside-images", type=_count, default=80, help="how many of those come (default: 80)")
    add(
        "--slo-ttft-ms", type=_positive, default=500.0, help="service level of the first token (default: 500)"
    )
    add("--slo-itl-ms", type=_positive, default=25.0, help="and between two tokens (default: 25)")


def _add_shape(add: Callable[..., Any]) -> None:
    add(
        "--size",
        type=_size,
        action="append",
        metavar="WxH",
        help="of images (default: 1280x720); repeat for a mix",
    )
    add("--images", type=_count, default=1, help="in a request (default: 1)")
    add("--words", type=_count, default=20, help="of text in a message (default: 20)")
    add("--tokens", type=_count, default=64, help="of an answer (default: 64)")
    add("--turns", type=_count, default=4, help="of a conversation (default: 4)")
    add("--catalogue", type=_count, default=64, help="images of the zipf workload (default: 64)")
    add("--zipf", type=_positive, default=1.1, help="exponent of their popularity (default: 1.1)")
    add("--stop", action="store_true", help="let answers end by themselves; for servers without ignore_eos")


def bench(args: argparse.Namespace) -> int:
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    server = Server(args.url, key)
    model = args.model or _served_model(args.url, key)
    shape = _shape(args, model)
    run_load(
        server,
        [Part(args.workload, shape, _WARM_UP, clients=_WARM_UP, seed=-1 - args.seed)],
        1,
        progress=False,
    )
    slo = Slo(args.slo_ttft_ms, args.slo_itl_ms)
    return _goodput(args, server, shape, slo) if args.goodput else _once(args, server, shape, slo)


def _once(args: argparse.Namespace, server: Server, shape: Shape, slo: Slo) -> int:
    parts = _parts(args, shape, args.rate, args.requests)
    names = [args.workload, "beside"][: len(parts)]
    load = run_load(server, parts, args.processes, progress=not args.quiet)
    rows = {name: figures(some, slo) for name, some in groups(load.results, names).items()}
    print(table(rows))
    if args.csv:
        write_csv(args.csv, load.results, names)
    _write(args, {"parts": {name: as_json(row) for name, row in rows.items()}})
    return _complain(load)


def _goodput(args: argparse.Namespace, server: Server, shape: Shape, slo: Slo) -> int:
    loads: list[LoadResult] = []

    def measure(rate: float) -> Figures:
        count = max(args.requests, int(rate * _TRIAL_SECONDS))
        loads.append(
            run_load(server, _parts(args, shape, rate, count), args.processes, progress=not args.quiet)
        )
        row = figures([result for result in loads[-1].results if result.part == 0], slo)
        kept = "kept" if row.keeps(slo) else "missed"
        ttft, itl = (ms[-1] if ms else 0.0 for ms in (row.ttft_ms, row.itl_ms))
        print(
            f"{rate:8.2f} requests/s: p99 {ttft:.0f} ms to the first token, {itl:.1f} between tokens: {kept}",
            flush=True,
        )
        return row

    trials = find_goodput(measure, slo, _FIRST_RATE)
    found = best(trials)
    rate = found.rate if found else 0.0
    print(f"goodput: {rate:.2f} requests/s within {slo.ttft_ms:g} and {slo.itl_ms:g} ms at p99")
    _write(args, {"goodput_per_s": rate, "trials": [{"rate": t.rate, **as_json(t.figures)} for t in trials]})
    return _complain(*loads)


def _parts(args: argparse.Namespace, shape: Shape, rate: float | None, count: int) -> list[Part]:
    clients = None if rate else args.clients
    parts = [Part(args.workload, shape, count, clients, rate, args.seed)]
    if args.beside:
        beside = Shape(shape.model, shape.sizes, words=1, tokens=4, ignore_eos=shape.ignore_eos)
        parts.append(Part("image", beside, args.beside_images, None, args.beside, args.seed + 1))
    return parts


def _shape(args: argparse.Namespace, model: str) -> Shape:
    return Shape(
        model,
        tuple(args.size or [(1280, 720)]),
        args.images,
        args.words,
        args.tokens,
        args.turns,
        args.catalogue,
        args.zipf,
        ignore_eos=not args.stop,
    )


def _served_model(url: str, key: str | None) -> str:
    headers = [("authorization", f"Bearer {key}")] if key else []
    timeout = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), _SECONDS)}
    base = url.rstrip("/").removesuffix("/v1")
    try:
        response = httpcore.request("GET", f"{base}/v1/models", headers=headers, extensions=timeout)
        return str(json.loads(response.content)["data"][0]["id"])
    except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.UnsupportedProtocol) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"no server answers at {url}: {reason}; --url says where it is") from None
    except (httpcore.ProtocolError, ValueError, LookupError, TypeError):
        raise ConfigError(
            f"{url} lists no models; name one with --model, and a key in OPENAI_API_KEY"
        ) from None


def _write(args: argparse.Namespace, found: dict[str, Any]) -> None:
    if args.json:
        given = {name: value for name, value in vars(args).items() if name not in ("run", "api_key")}
        args.json.write_text(json.dumps({"arguments": given, **found}, indent=1, default=str) + "\n")


def _complain(*loads: LoadResult) -> int:
    """On stderr, what makes figures doubtful. 1 if a request failed."""
    warnings = {warning for load in loads if (warning := client_warning(load))}
    for warning in sorted(warnings)[:1]:
        print(f"saccade: {warning}", file=sys.stderr)
    errors = errors_of([result for load in loads for result in load.results])
    for text, count in list(errors.items())[:5]:
        print(f"saccade: {count} requests failed: {text}", file=sys.stderr)
    return 1 if errors else 0


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    try:
        return _count(width), _count(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no size such as 1280x720") from None
