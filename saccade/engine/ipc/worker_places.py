"""Numbered places for the workers of one kind. Some have a worker, others wait until load is high.

Owns the workers and the loop of autoscaling. Which of them to end is for the caller to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Generic, TypeVar

from saccade.engine.autoscale import AUTOSCALE_SECONDS, Autoscaler, WorkerLoad
from saccade.engine.ipc.messages import Ready
from saccade.engine.ipc.supervisor import EngineStatus, WorkerSupervisor
from saccade.errors import ConfigError, EngineUnavailable

logger = logging.getLogger("saccade.engine")

Worker = TypeVar("Worker", bound=WorkerSupervisor)


class WorkerPlaces(Generic[Worker]):
    def __init__(self, kind: str, make: Callable[[int], Worker], count: int, bounds: tuple[int, int]) -> None:
        """`count` workers at first; `bounds`: how few and how many there may be."""
        low, high = bounds
        self._kind = kind
        self._make = make
        self._autoscaler = Autoscaler(low, high)
        self._tasks: set[asyncio.Task[None]] = set()
        self.used = set(range(count))  # places with a worker
        self.workers = [make(index) for index in range(high)]

    @property
    def used_workers(self) -> list[Worker]:
        return [self.workers[index] for index in sorted(self.used)]

    def status(self, index: int) -> EngineStatus:
        """Of a place without a worker: stopped."""
        status = self.workers[index].status()
        return status if index in self.used else replace(status, state="stopped")

    async def start(self) -> list[Ready]:
        """Wait until all are warm."""
        return await asyncio.gather(*[worker.wait_ready() for worker in self.used_workers])

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*[worker.stop() for worker in self.workers])  # unused ones hold ports, too

    # --- growing and shrinking ------------------------------------------------------------------------------

    async def grow(self) -> None:
        """Start one more where there is a place. One that fails to start changes nothing."""
        free = [index for index in range(len(self.workers)) if index not in self.used]
        if not free:
            return
        index = free[0]
        self.used.add(index)
        logger.info("%s %d is added", self._kind, index)
        try:
            await self.workers[index].wait_ready()
        except (ConfigError, EngineUnavailable) as error:
            logger.error("%s %d could not be added: %s", self._kind, index, error)
            await self.retire(index)

    async def retire(self, index: int) -> None:
        """End a worker; its place may get another one."""
        await self.workers[index].stop()
        self.workers[index] = await asyncio.to_thread(self._make, index)  # which may start a process
        self.used.remove(index)

    def autoscale(
        self, load: Callable[[], WorkerLoad], shrink: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """From now on, where the bounds allow it. `shrink` ends one worker, or none."""
        if self._autoscaler.is_needed:
            self._begin(self._autoscale(load, shrink))

    async def _autoscale(
        self, load: Callable[[], WorkerLoad], shrink: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        while True:
            await asyncio.sleep(AUTOSCALE_SECONDS)
            change = self._autoscaler.decide(load())
            if change:
                self._begin(self.grow() if change > 0 else shrink())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
