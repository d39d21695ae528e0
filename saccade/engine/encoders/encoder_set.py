"""The encoder workers of a server: started, watched and restarted by the front door. Never imports torch.

Owns a private folder with one socket for each worker, which engines connect to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from saccade.engine.autoscale import AUTOSCALE_SECONDS, Autoscaler, Load
from saccade.engine.ipc.client import CheckpointFiles
from saccade.engine.ipc.messages import start_message
from saccade.engine.ipc.process import EngineProcess
from saccade.engine.ipc.supervisor import EngineStatus, Launcher, WorkerSupervisor
from saccade.errors import ConfigError, EngineUnavailable
from saccade.options import Options
from saccade.types import Geometry, Replica

WORKER = (sys.executable, "-m", "saccade.engine.encoders.worker")

_MAX_PATH = 90  # bytes; a socket's whole path may have 107

logger = logging.getLogger("saccade.engine")


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
        bounds: tuple[int, int] | None = None,
    ) -> None:
        """`name`: the workers' addresses begin with it. None: they are sockets in a folder.

        `bounds`: how few and how many there may be; None: always `count`. All have an address from the start.
        """
        low, high = bounds or (count, count)
        self._folder = _private_folder() if high and name is None else None
        folder = self._folder.name if self._folder else name
        self.addresses = tuple(f"{folder}/encoder-{index}" for index in range(high))
        self._files = (checkpoint.path, checkpoint.config, checkpoint.image_processor, options, largest)
        self._num_engines = num_engines
        self._how: dict[str, Any] = {"launch": launch, "heartbeat_timeout": heartbeat_timeout}
        self._autoscaler = Autoscaler(low, high)
        self._scaling: asyncio.Task[None] | None = None
        self._used = set(range(count))  # places with a worker
        self._workers = [self._new_worker(index) for index in range(high)]

    def _new_worker(self, index: int) -> WorkerSupervisor:
        replica = Replica(0, self._num_engines, self.addresses, encoder=index)
        start = start_message(*self._files, (), progress=False, replica=replica)
        return WorkerSupervisor(start, f"encoder {index}", **self._how)

    async def start(self) -> tuple[str, ...]:
        """Wait until all are warm; returns lines for the log."""
        ready = await asyncio.gather(*[self._workers[index].wait_ready() for index in sorted(self._used)])
        if self._autoscaler.is_needed:
            self._scaling = asyncio.create_task(self._autoscale())
        return tuple(reason for one in ready for reason in one.reasons)

    async def stop(self) -> None:
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.wait([self._scaling])
        await asyncio.gather(*[worker.stop() for worker in self._workers])
        if self._folder is not None:
            self._folder.cleanup()

    def views(self) -> Sequence[EncoderView]:
        """By index; where autoscaling has none now, one that is stopped."""
        return [self._view(index) for index in range(len(self._workers))]

    def _view(self, index: int) -> EncoderView:
        status, stats = self._workers[index].status(), self._workers[index].stats()
        if index not in self._used:
            status = replace(status, state="stopped")
        return EncoderView(status, stats.get("queue", 0), stats.get("encoded", 0))

    # --- growing and shrinking ------------------------------------------------------------------------------

    async def _autoscale(self) -> None:
        while True:
            await asyncio.sleep(AUTOSCALE_SECONDS)
            change = self._autoscaler.decide(self._load())
            if change:
                await (self.grow() if change > 0 else self.shrink())

    def _load(self) -> Load:
        states = {index: self._workers[index].status().state for index in self._used}
        stats = [self._workers[index].stats() for index, state in states.items() if state == "ready"]
        return Load(
            num_ready=len(stats),
            num_starting=sum(state == "starting" for state in states.values()),
            queued_work=sum(own.get("patches", 0) for own in stats),
            use=sum(own.get("use", 0.0) for own in stats),
        )

    async def grow(self) -> None:
        """Start one more where there is a place. Engines find it by its address."""
        index = min(set(range(len(self._workers))) - self._used)
        self._used.add(index)
        logger.info("encoder %d is added", index)
        try:
            await self._workers[index].wait_ready()
        except (ConfigError, EngineUnavailable) as error:
            logger.error("encoder %d could not be added: %s", index, error)
            await self._retire(index)

    async def shrink(self) -> None:
        """End one that has no image. One that comes in this moment is encoded elsewhere, as after a death."""
        idle = [index for index in self._used if not self._view(index).queue]
        if idle:
            logger.info("encoder %d is removed", max(idle))
            await self._retire(max(idle))

    async def _retire(self, index: int) -> None:
        await self._workers[index].stop()
        self._workers[index] = self._new_worker(index)
        self._used.remove(index)


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
