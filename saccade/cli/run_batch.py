"""`saccade run-batch`: a file of requests, sent to a running server or to one that is started for it."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from saccade.batch.batch_file import BatchResult
from saccade.batch.batch_run import BatchCounts, HttpSender, run_batch
from saccade.cli.get_json import get_json
from saccade.cli.run_batch_arguments import files_of
from saccade.errors import ConfigError

_POLL_SECONDS = 0.25
_STOP_SECONDS = 30.0


class _Server(NamedTuple):
    url: str
    api_key: str | None


def run(args: argparse.Namespace) -> int:
    source, results = files_of(args)
    with source.open("rb"), results.open("ab"):  # before a model is loaded
        pass
    with _server(args) as server:
        counts = asyncio.run(_run(args, source, results, server))
    again = f", {counts.resumed} of them before" if counts.resumed else ""
    failed = f", {counts.failed} failed" if counts.failed else ""
    print(f"saccade: {counts.total} results in {results}{again}{failed}", file=sys.stderr)
    return 1 if counts.failed else 0


async def _run(args: argparse.Namespace, source: Path, results: Path, server: _Server) -> BatchCounts:
    sender = HttpSender(server.url, server.api_key, args.concurrency, args.timeout)
    with tqdm(desc="requests", unit="", disable=args.quiet) as bar:

        def start(total: int, resumed: int) -> None:
            bar.reset(total)
            bar.update(resumed)

        def step(result: BatchResult) -> None:
            bar.update()

        try:
            return await run_batch(source, results, sender, args.concurrency, start, step)
        finally:
            await sender.close()


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[_Server]:
    """That at --url, or a process that serves the model until the batch is done."""
    if args.url:
        yield _Server(args.url, args.api_key)
        return
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    key = secrets.token_hex(16)
    command = [sys.executable, "-m", "saccade.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += [args.model] if args.model else []
    environment = {"SACCADE_LOG_LEVEL": "warning", **os.environ, "SACCADE_API_KEY": key}
    process = subprocess.Popen(command, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url)
        yield _Server(url, key)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    while True:
        if process.poll() is not None:
            raise ConfigError("the model cannot be served; its own error stands above")
        try:
            if get_json(f"{url}/ready", None, url)[0] == 200:
                return
        except ConfigError:  # it does not listen yet
            pass
        time.sleep(_POLL_SECONDS)
