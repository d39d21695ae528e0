"""Starts `saccade serve` on a free loopback port for an evaluation."""

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from saccade.errors import ConfigError
from saccade.options import Options

_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


@contextmanager
def serving(options: Options, *, show_log: bool = False) -> Iterator[str]:
    """The address of a ready server with these options, which ends with the context."""
    url = f"http://127.0.0.1:{_free_port()}"
    with tempfile.TemporaryDirectory(prefix="saccade-eval-") as folder, tempfile.TemporaryFile() as log:
        config = Path(folder) / "options.json"
        config.write_text(json.dumps(dataclasses.asdict(options)))
        process = _start(config, url, None if show_log else log)
        try:
            _wait_ready(process, url, log)
            yield url
        finally:
            _stop(process)


def _start(config: Path, url: str, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C does not end the server before its requests are done.

    The options are complete, so SACCADE_ variables of the environment are left out.
    """
    port = url.rpartition(":")[2]
    flags = ["--config", str(config), "--host", "127.0.0.1", "--port", port, "--no-access-log"]
    return subprocess.Popen(
        [sys.executable, "-m", "saccade.cli", "serve", *flags],
        stdin=subprocess.DEVNULL,
        stderr=log,
        env={name: value for name, value in os.environ.items() if not name.startswith("SACCADE_")},
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    """Wait without a time limit, as weights may load slowly, unless the server ends."""
    while not _is_ready(url):
        if process.poll() is not None:
            raise ConfigError(f"the server did not start: {_last_line(log)} (--debug shows its log)")
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
