"""`saccade run-batch`: a file of requests, sent to a running server or to one that is started for it."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from saccade.apps.batch.batch_file import BatchResult
from saccade.apps.batch.batch_lines import batch_lines, line_helper
from saccade.apps.batch.batch_run import BatchCounts, HttpSender, run_batch
from saccade.apps.evaluation.serving import serving_with
from saccade.cli.numbers import count, positive
from saccade.errors import ConfigError, UsageError, reason_of
from saccade.util.plain_files import open_plain


class _BatchServer(NamedTuple):
    url: str
    api_key: str | None


def add(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Send each line of IN (custom_id, method, url, body) and write a line of OUT for it. The "
        "same command again goes on where OUT ends. Without --url the model is served by a process of its "
        "own meanwhile, with the options of the environment (SACCADE_MAX_MODEL_LEN) and SACCADE_CONFIG."
    )
    command.epilog = "Example: saccade run-batch requests.jsonl results.jsonl --url http://127.0.0.1:8000"
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


def run(args: argparse.Namespace) -> int:
    source, results = _files_of(args)
    _check_files(source, results)  # before a model is loaded
    with _server(args) as server:
        counts = asyncio.run(_run(args, source, results, server))
    again = f", {counts.resumed} of them before" if counts.resumed else ""
    failed = f", {counts.failed} failed" if counts.failed else ""
    print(f"saccade: {counts.total} results in {results}{again}{failed}", file=sys.stderr)
    return int(counts.failed > 0)


def _files_of(args: argparse.Namespace) -> tuple[Path, Path]:
    """IN and OUT, however they were given."""
    files = list(args.files)
    if args.input_file is not None:
        files.insert(0, args.input_file)
    if args.output_file is not None:
        files.insert(1, args.output_file)
    if len(files) != 2:
        raise UsageError("give IN and OUT once: saccade run-batch IN OUT, or -i IN -o OUT")
    if args.url and args.model:
        raise UsageError("--url names a server that has its model; leave --model out")
    return files[0], files[1]


def _check_files(source: Path, results: Path) -> None:
    for path, mode in ((source, "rb"), (results, "ab")):
        try:
            open_plain(path, mode).close()
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened: {error.strerror}") from None


async def _run(args: argparse.Namespace, source: Path, results: Path, server: _BatchServer) -> BatchCounts:
    sender = HttpSender(server.url, server.api_key, args.concurrency, args.timeout)
    with tqdm(desc="requests", unit="", disable=args.quiet) as bar:

        def start(total: int, resumed: int) -> None:
            bar.reset(total)
            bar.update(resumed)

        def step(result: BatchResult) -> None:
            bar.update()

        helper = line_helper()
        try:
            with batch_lines(source, helper) as lines:
                helper.close()
                return await run_batch(lines, results, sender, args.concurrency, start, step)
        except OSError as error:
            again = "the same command goes on from what it has"
            raise ConfigError(f"{results} cannot be written: {reason_of(error)}; {again}") from None
        finally:
            helper.close()
            await sender.close()


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[_BatchServer]:
    """That at --url, or a process that serves the model until the batch is done."""
    if args.url:
        yield _BatchServer(args.url, args.api_key)
        return
    key = secrets.token_hex(16)
    env = {"SACCADE_LOG_LEVEL": "warning", **os.environ, "SACCADE_API_KEY": key}
    with serving_with([args.model] if args.model else [], env, show_log=True) as server:
        yield _BatchServer(server.url, key)
