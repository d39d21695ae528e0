"""A real Valkey or Redis server on a unix socket, found on this machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

NAMES = ("valkey-server", "redis-server")
MISSING = "no valkey-server or redis-server is on the PATH; run tools/valkey.sh, or install one, and run again"
PASSWORD = "hunter2"


@dataclass
class RunningValkey:
    url: str
    client: redis.Redis
    process: subprocess.Popen[str]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running_valkey(folder: Path, *settings: str) -> Iterator[RunningValkey]:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found is not None, MISSING
    socket = folder / "valkey.sock"
    given = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--requirepass", PASSWORD, *settings]
    process = subprocess.Popen([found, *given], stdout=subprocess.PIPE, text=True, cwd=folder)
    assert process.stdout is not None
    try:
        log = ""
        while "eady to accept connections" not in log:
            line = process.stdout.readline()
            assert line, f"the server ended:\n{log}"
            log += line
        client = redis.Redis(unix_socket_path=str(socket), password=PASSWORD)
        yield RunningValkey(f"unix://:{PASSWORD}@{socket}", client, process)
        client.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
