"""The encoder workers of a server: started, watched and restarted by the front door. Never imports torch.

Owns a private folder with one socket for each worker, which engines connect to.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from saccade.engine.ipc.client import CheckpointFiles
from saccade.engine.ipc.messages import start_message
from saccade.engine.ipc.process import EngineProcess
from saccade.engine.ipc.supervisor import EngineStatus, Launcher, WorkerSupervisor
from saccade.errors import ConfigError
from saccade.options import Options
from saccade.types import Geometry, Replica

WORKER = (sys.executable, "-m", "saccade.engine.encoders.worker")

_MAX_PATH = 90  # bytes; a socket's whole path may have 107


class EncoderView(NamedTuple):
    """One encoder worker, for those that watch it."""

    status: EngineStatus
    queue: int  # images it has
    encoded: int  # since its process started


class EncoderSet:
    def __init__(
        self,
        options: Options,
        count: int,
        num_engines: int,
        *,
        checkpoint: CheckpointFiles,
        largest: Geometry | None,
        heartbeat_timeout: float = 60.0,
        launch: Launcher = partial(EngineProcess.spawn, WORKER),  # noqa: B008 (immutable)
        name: str | None = None,
    ) -> None:
        """`name`: the workers' addresses begin with it. None: they are sockets in a folder."""
        self._folder = _private_folder() if count and name is None else None
        folder = self._folder.name if self._folder else name
        self.addresses = tuple(f"{folder}/encoder-{index}" for index in range(count))
        files = (checkpoint.path, checkpoint.config, checkpoint.image_processor)
        self._workers = []
        for index in range(count):
            replica = Replica(0, num_engines, self.addresses, encoder=index)
            start = start_message(*files, options, largest, (), progress=False, replica=replica)
            name = f"encoder {index}"
            worker = WorkerSupervisor(start, name, launch=launch, heartbeat_timeout=heartbeat_timeout)
            self._workers.append(worker)

    async def start(self) -> tuple[str, ...]:
        """Wait until all are warm; returns lines for the log."""
        ready = await asyncio.gather(*[worker.wait_ready() for worker in self._workers])
        return tuple(reason for one in ready for reason in one.reasons)

    async def stop(self) -> None:
        await asyncio.gather(*[worker.stop() for worker in self._workers])
        if self._folder is not None:
            self._folder.cleanup()

    def views(self) -> Sequence[EncoderView]:
        return [_view(worker.status(), worker.stats()) for worker in self._workers]


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """Only this user may enter it."""
    if sys.platform != "linux":
        raise ConfigError("encoders need shared memory as Linux has it; leave out --encoders")
    folder = tempfile.TemporaryDirectory(prefix="saccade-")
    if len(os.fsencode(folder.name)) > _MAX_PATH:
        name = folder.name
        folder.cleanup()
        raise ConfigError(f"{name} is too long for the path of a socket; set TMPDIR to a shorter one")
    return folder


def _view(status: EngineStatus, stats: dict[str, Any]) -> EncoderView:
    return EncoderView(status, stats.get("queue", 0), stats.get("encoded", 0))
