"""The arguments of `saccade run-batch`, apart from the running, so that `saccade --help` stays quick."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saccade.cli.bench_arguments import count, positive
from saccade.errors import UsageError


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    command = commands.add_parser(
        "run-batch",
        help="answer a file of requests, in OpenAI's batch format",
        description="Send each line of IN (custom_id, method, url, body) and write a line of OUT for it. The "
        "same command again goes on where OUT ends. Without --url the model is served by a process of its "
        "own meanwhile, with the options of the environment (SACCADE_MAX_MODEL_LEN) and SACCADE_CONFIG.",
        epilog="Example: saccade run-batch requests.jsonl results.jsonl --url http://127.0.0.1:8000",
    )
    add = command.add_argument
    add("files", nargs="*", type=Path, metavar="IN OUT", help="requests and results, JSON lines")
    add("-i", "--input-file", type=Path, help="IN, as vLLM names it")
    add("-o", "--output-file", type=Path, help="OUT, as vLLM names it")
    add("--url", help="a running server; nothing: --model is served for this batch")
    add("--model", help="folder or hub id to serve; nothing: the built-in model")
    add("--api-key", help="key of the server at --url")
    add("--concurrency", type=count, default=64, help="requests at a time (64)")
    add("--timeout", type=positive, default=3600.0, help="seconds that one answer may take (3600)")
    add("--quiet", action="store_true", help="no progress bar")
    add("--debug", action="store_true", help="show tracebacks")
    command.set_defaults(run=run)


def files_of(args: argparse.Namespace) -> tuple[Path, Path]:
    """IN and OUT, however they were given."""
    rest = list(args.files)
    source = args.input_file or (rest.pop(0) if rest else None)
    results = args.output_file or (rest.pop(0) if rest else None)
    if source is None or results is None or rest:
        raise UsageError("give IN and OUT once: saccade run-batch IN OUT, or -i IN -o OUT")
    if args.url and args.model:
        raise UsageError("--url names a server that has its model; leave --model out")
    return source, results
