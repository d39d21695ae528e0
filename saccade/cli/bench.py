"""`saccade bench`: its arguments, and which part of it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saccade.cli.numbers import count, counts, positive, size
from saccade.errors import UsageError

WORKLOADS = ("beside", "catalogue", "conversation", "documents", "image", "text", "video")
DOCUMENTS = "documents"
MAX_IMAGES = "most-images"  # no load: a search
NAMES = (*WORKLOADS, MAX_IMAGES)
_URL = "http://localhost:8000"
_BESIDE_RATE = 16.0  # images a second of the workload `beside`


def add(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Send requests to an OpenAI-compatible server, or to an engine in this process, and "
        "print what they met: times to the first token and between tokens, throughput, and how much of it "
        "kept to the service levels."
    )
    command.epilog = (
        "Examples: saccade bench image --clients 32; saccade bench text --rate 20 --beside 4; "
        "saccade bench --trace requests.jsonl --plot times.svg; saccade bench image --goodput; "
        "saccade bench most-images; saccade bench image --offline; saccade bench documents --pdf 4"
    )
    add = command.add_argument
    add(
        "what",
        nargs="?",
        metavar="MODEL | WORKLOAD",
        help="folder or hub id: no server, an engine in this process; or a workload, as --workload",
    )
    add(
        "--workload",
        choices=NAMES,
        help="what requests hold (default: image); catalogue: images that come again, by Zipf's law; "
        "beside: text streams beside new images; documents: pages of text; most-images is no load: it "
        "searches the largest number of images in one request that works",
    )
    where = command.add_mutually_exclusive_group()
    where.add_argument("--url", default=_URL, help=f"of the server (default: {_URL})")
    where.add_argument(
        "--offline",
        nargs="?",
        const="",
        metavar="MODEL",
        help="no server: an engine in this process, with this model (folder or hub id; nothing: built in)",
    )
    _add_engine(add)
    add("--api-key", help="better as OPENAI_API_KEY, which ps does not show")
    _add_load(command)
    _add_shape(command.add_argument_group("requests").add_argument)
    _add_output(command.add_argument_group("output").add_argument)


def _add_output(add: Callable[..., Any]) -> None:
    add("--processes", type=count, help="of clients; automatic: one per core, at most 8")
    add("--seed", type=int, default=0, help="of words, images and arrivals (default: 0)")
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    add("--csv", type=Path, metavar="FILE", help="also write a line for each request there")
    add(
        "--plot",
        type=Path,
        metavar="FILE.svg",
        help="also plot how times are distributed, or with --goodput p99 against the rate",
    )
    add("--quiet", action="store_true", help="no progress bars")
    add("--debug", action="store_true", help="show tracebacks")


def _add_engine(add: Callable[..., Any]) -> None:
    add("--model", help="name it serves; automatic: the first it lists")
    add(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="no load: measure an engine with --model (folder or hub id; nothing: built in) on this machine, "
        "and write what saccade plan --calibration reads",
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        help="of an engine in this process; dummy: random weights, made from a folder with a config and a "
        "tokenizer alone (times do not depend on values; default: auto)",
    )
    add("--dtype", help="of that engine: float32, bfloat16 or float16 (default: auto, as saccade serve)")


def _add_load(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("load")
    add = group.add_argument
    load = group.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        "--clients",
        dest="clients",
        type=counts,
        metavar="N[,N]",
        help="closed loop: so many at a time; several are measured one after the other, in a table "
        "(default: 8, of documents 1,4,16,32)",
    )
    load.add_argument("--rate", type=positive, help="open loop: requests a second, by a Poisson process")
    load.add_argument(
        "--goodput", action="store_true", help="search the highest rate whose p99 keeps to the service levels"
    )
    load.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="open loop: requests as they came to a service, instead of a workload. A JSON object a line: at "
        "(seconds), words or input_tokens, output_tokens, images (a list of sizes such as 1280x720)",
    )
    add(
        "--requests",
        type=count,
        help="in all (default: 100; of a trace all; in a table 8 for each at a time, 16 at least)",
    )
    add(
        "--beside",
        type=positive,
        metavar="RATE",
        help="new images a second beside the workload, 4 tokens out each",
    )
    add(
        "--beside-images",
        type=count,
        default=80,
        help="how many of those come in a closed loop (default: 80)",
    )
    add("--slo-ttft-ms", type=positive, default=500.0, help="service level of the first token (default: 500)")
    add("--slo-itl-ms", type=positive, default=25.0, help="and between two tokens (default: 25)")


def _add_shape(add: Callable[..., Any]) -> None:
    add(
        "--image-size",
        "--size",
        dest="size",
        type=size,
        action="append",
        metavar="WxH",
        help="of images and videos (default: 1280x720, of documents 1275x1650); repeat for a mix",
    )
    add("--images", type=count, default=1, help="in a request, or videos (default: 1)")
    add("--frames", type=count, default=16, help="of a video (default: 16)")
    add(
        "--fps",
        type=count,
        default=2,
        help="of its frames: 2, which many models sample, keeps all (default: 2)",
    )
    add(
        "--pdf",
        dest="pages",
        type=count,
        metavar="PAGES",
        default=0,
        help="documents are PDF files of so many A4 pages, which the server renders; else pages are images",
    )
    add("--max-images", type=count, default=256, help="most-images tries no more (default: 256)")
    add(
        "--input-tokens",
        "--words",
        dest="words",
        type=count,
        default=20,
        help="of text in a message, in words of about a token (default: 20)",
    )
    add(
        "--output-tokens",
        "--tokens",
        dest="tokens",
        type=count,
        default=64,
        help="of an answer (default: 64)",
    )
    add("--turns", type=count, default=4, help="of a conversation (default: 4)")
    add("--catalogue", type=count, default=64, help="images of the workload catalogue (default: 64)")
    add("--zipf", type=positive, default=1.1, help="exponent of their popularity (default: 1.1)")
    add("--stop", action="store_true", help="let answers end by themselves; for servers without ignore_eos")


def engine_options(args: argparse.Namespace) -> dict[str, str]:
    """Options of an engine in this process, as `saccade.LLM` takes them."""
    return {name: value for name in ("load_format", "dtype") if (value := getattr(args, name)) is not None}


def resolve(args: argparse.Namespace) -> None:
    """Sets `workload` and `offline` from what was named without a flag."""
    if args.what in NAMES and args.workload is None:
        args.workload = args.what
    elif args.what is not None:
        if args.url != _URL:
            both = f"{args.what!r} is an engine in this process, --url a server"
            raise UsageError(f"{both}; for the name that a server gives its model say --model")
        args.offline = args.what
    if args.workload == "beside":
        args.workload = "text"
        if args.beside is None:
            args.beside = _BESIDE_RATE


def run(args: argparse.Namespace) -> int:
    resolve(args)
    if args.calibrate:
        from saccade.cli.calibrate import calibrate  # needs torch

        return calibrate(args.calibrate, args.model, engine_options(args))
    from saccade.cli.bench_load import bench

    if args.offline is None:
        return bench(args)
    from saccade.cli.bench_offline import offline  # needs torch

    return bench(args, offline)
