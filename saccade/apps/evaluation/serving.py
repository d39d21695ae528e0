"""Starts `saccade serve` on a free loopback port: for an evaluation, a batch, a soak."""

from __future__ import annotations

import ctypes
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from saccade.errors import ConfigError
from saccade.options.engine import Options

_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


class Served(NamedTuple):
    """A server that is ready."""

    url: str
    pid: int


@contextmanager
def serving(options: Options, *, show_log: bool = False) -> Iterator[str]:
    """The address of a server with these options. They are complete: SACCADE_ variables are left out."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SACCADE_")}
    with tempfile.TemporaryDirectory(prefix="saccade-eval-") as folder:
        config = Path(folder) / "options.json"
        config.write_text(json.dumps(dataclasses.asdict(options)))
        flags = ["--config", str(config), "--no-access-log"]
        with serving_with(flags, env, show_log=show_log, hint=" (--debug shows its log)") as server:
            yield server.url


@contextmanager
def serving_with(
    flags: Sequence[str], env: Mapping[str, str] | None = None, *, show_log: bool = False, hint: str = ""
) -> Iterator[Served]:
    """A server with these flags, which ends with the context. ConfigError, with `hint`, if it does not start.

    `env`: its environment, else ours. `show_log`: its log goes to our stderr.
    """
    url = f"http://127.0.0.1:{_free_port()}"
    with tempfile.TemporaryFile() as log:
        stderr = None if show_log else log
        process = _start(flags, url, env, stderr)
        try:
            _wait_ready(process, url, stderr, hint)
            yield Served(url, process.pid)
        finally:
            _stop(process)


def _start(
    flags: Sequence[str], url: str, env: Mapping[str, str] | None, log: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """The server has a session of its own: Ctrl-C does not end it before its requests are done."""
    where = ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    return subprocess.Popen(
        [sys.executable, "-m", "saccade.cli", "serve", *flags, *where],
        stdin=subprocess.DEVNULL,
        stderr=log,
        env=env,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: IO[bytes] | None, hint: str) -> None:
    """Wait without a time limit, as weights may load slowly, unless the server ends."""
    while not _is_ready(url):
        if process.poll() is not None:
            reason = "its own error stands above" if log is None else f"{_last_line(log)}{hint}"
            raise ConfigError(f"the server did not start: {reason}")
        time.sleep(_POLL_SECONDS)


def _is_ready(url: str) -> bool:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)  # without a proxy
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("saccade: ") if lines else "see its log"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
