"""The encoder workers of a server: started, watched and restarted by the front door. Never imports torch.

Owns a folder with one socket for each worker, which engines connect to.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from saccade.engine.autoscale import WorkerLoad
from saccade.engine.encoders.socket_folder import SocketFolder
from saccade.engine.ipc.client import CheckpointFiles
from saccade.engine.ipc.messages import start_message
from saccade.engine.ipc.process import EngineProcess
from saccade.engine.ipc.supervisor import EngineStatus, Launcher, WorkerSupervisor
from saccade.engine.ipc.worker_places import WorkerPlaces
from saccade.options.engine import Options
from saccade.types.media import Geometry
from saccade.types.replica import Replica

WORKER = (sys.executable, "-m", "saccade.engine.encoders.worker")

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
        bounds: tuple[int, int],
    ) -> None:
        """`name`: the workers' addresses begin with it. None: they are sockets in a folder.

        `bounds`: how few and how many there may be. All have an address from the start.
        """
        _, high = bounds
        self._folder: SocketFolder | None = None
        if high and name is None:
            self._folder = SocketFolder()
            name = self._folder.name
        self.addresses = tuple(f"{name}/encoder-{index}" for index in range(high))
        self._files = (checkpoint.path, checkpoint.config, checkpoint.image_processor, options, largest)
        self._num_engines = num_engines
        self._how: dict[str, Any] = {"launch": launch, "heartbeat_timeout": heartbeat_timeout}
        self._places = WorkerPlaces("encoder", self._new_worker, count, bounds)

    def _new_worker(self, index: int) -> WorkerSupervisor:
        replica = Replica(0, self._num_engines, self.addresses, encoder=index)
        start = start_message(*self._files, (), progress=False, replica=replica)
        return WorkerSupervisor(start, f"encoder {index}", **self._how)

    async def start(self) -> tuple[str, ...]:
        """Wait until all are warm; returns lines for the log."""
        ready = await self._places.start()
        self._places.autoscale(self._load, self.shrink)
        return tuple(reason for one in ready for reason in one.reasons)

    async def stop(self) -> None:
        await self._places.stop()
        if self._folder is not None:
            self._folder.close()

    def views(self) -> Sequence[EncoderView]:
        """By index; where autoscaling has none now, one that is stopped."""
        return [self._view(index) for index in range(len(self._places.workers))]

    def _view(self, index: int) -> EncoderView:
        stats = self._places.workers[index].stats()
        return EncoderView(self._places.status(index), stats.get("queue", 0), stats.get("encoded", 0))

    # --- growing and shrinking ------------------------------------------------------------------------------

    def _load(self) -> WorkerLoad:
        workers = self._places.used_workers
        states = [worker.status().state for worker in workers]
        stats = [worker.stats() for worker, state in zip(workers, states, strict=True) if state == "ready"]
        return WorkerLoad(
            num_ready=len(stats),
            num_starting=states.count("starting"),
            queued_work=sum(each.get("patches", 0) for each in stats),
            use=sum(each.get("use", 0.0) for each in stats),
        )

    async def grow(self) -> None:
        """Engines find a new one by its address."""
        await self._places.grow()

    async def shrink(self) -> None:
        """End one that has no image. One that comes in this moment is encoded elsewhere, as after a death."""
        views = {index: self._view(index) for index in self._places.used}
        idle = [i for i, view in views.items() if not view.queue and view.status.state != "stopped"]
        if idle:
            logger.info("encoder %d is removed", max(idle))
            await self._places.retire(max(idle))
