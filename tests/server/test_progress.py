"""What somebody at a terminal sees while a server loads, and what a log file is spared."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import threading
from pathlib import Path

from tests.helpers.servers.serving import RunningServer, free_port, until

_LOADED = "Loading weights: 100%"


def test_a_server_at_a_terminal_shows_how_far_loading_is(qwen2_vl_folder: Path) -> None:
    terminal, stderr = pty.openpty()
    termios.tcsetwinsize(stderr, (24, 100))
    command = [sys.executable, "-m", "saccade.cli", "serve", str(qwen2_vl_folder), "--kv-cache-gb", "0.05"]
    process = subprocess.Popen([*command, "--port", str(free_port())], stderr=stderr)
    os.close(stderr)
    shown: list[str] = []
    threading.Thread(target=_watch, args=(terminal, shown), daemon=True).start()
    try:
        assert until(lambda: _LOADED in "".join(shown)), "".join(shown)
        assert "tensors" in "".join(shown)
    finally:
        process.terminate()
        process.wait(120)


def test_a_server_that_logs_to_a_file_draws_no_bar(server: RunningServer) -> None:
    assert "Loading weights:" not in "".join(server.log)


def _watch(terminal: int, shown: list[str]) -> None:
    """Reads until the other end closes, which Linux reports as an error."""
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:
            break
        if not data:
            break
        shown.append(data.decode(errors="replace"))
    os.close(terminal)
