"""One engine process as its parent sees it: a child process and a socket to it. Knows no requests."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from saccade.engine.ipc.messages import HEADER, Report, Stop, body_size, frame, report_in

STOP_SECONDS = 5.0  # for the step that runs when the stop message arrives
TERM_SECONDS = 2.0  # between SIGTERM and SIGKILL
_POLL_SECONDS = 0.02
# By default glibc gives each image-decoding thread its own arena, which keeps what its largest image needed,
# and adapts the size from which memory is unmapped. One arena and fixed sizes keep memory constant.
MALLOC_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}


class EngineProcess:
    def __init__(
        self, child: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._child = child
        self._reader = reader
        self._writer = writer
        self.num_received = 0  # messages so far; each counts as a heartbeat
        self.last_received = time.monotonic()

    @classmethod
    async def spawn(
        cls, command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> EngineProcess:
        """Start `command FD`, where FD is the child's end of a socket pair.

        The child gets its own session: Ctrl-C in the terminal reaches only the parent, which drains first.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            fd = theirs.fileno()
            try:
                child = subprocess.Popen(
                    [*command, str(fd)],
                    pass_fds=[fd],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env={**MALLOC_ENVIRONMENT, **environment, **os.environ},
                )
            except OSError:
                writer.close()
                raise
        return cls(child, reader, writer)

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, message: bytes | bytearray) -> None:
        """Never waits: bytes in flight are bounded where requests are admitted."""
        if not self._writer.is_closing():
            self._writer.write(message)

    async def receive(self) -> Report | None:
        """The next message; None when the child has closed its end or died."""
        try:
            header = await self._reader.readexactly(HEADER.size)
            body = await self._reader.readexactly(body_size(header))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        report = report_in(body)
        self.num_received += 1
        self.last_received = time.monotonic()
        return report

    def kill(self) -> None:
        self._child.kill()

    async def end(self) -> str:
        """End the child: stop message, then SIGTERM, then SIGKILL. Returns how it ended, in words."""
        try:
            self.send(frame(Stop()))
            if not await self._has_ended_within(STOP_SECONDS):
                self._child.terminate()
            if not await self._has_ended_within(TERM_SECONDS):
                self._child.kill()
        finally:  # also when we are cancelled meanwhile
            if self._child.poll() is None:
                self._child.kill()
            self._child.wait()
            self._writer.close()
        status = self._child.returncode
        return f"it was ended by signal {-status}" if status < 0 else f"it exited with status {status}"

    async def _has_ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._child.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        return self._child.poll() is not None
