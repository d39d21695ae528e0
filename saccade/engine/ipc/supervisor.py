"""One worker process after the other: start, heartbeats, restarts with back-off. Knows no requests.

Owns one worker at a time, an engine or an encoder. Never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from saccade.engine.ipc.messages import Fatal, Ready, Report, Start, StepUpdate, Stop, WorkerPlace, frame
from saccade.errors import ConfigError, EngineUnavailable

FIRST_BACKOFF = 0.5  # seconds
MAX_BACKOFF = 30.0  # a worker that lived longer starts again from the first back-off
_MIN_HEARTBEAT_TIMEOUT = 2.0  # an idle worker reports twice a second
_NUM_CHECKS = 4  # without a message before a worker counts as hung: one stall of our own loop is not enough
_POLL_SECONDS = 0.02  # while a worker falls asleep or wakes up
_GUESSED_START = 5.0  # seconds, until a start has been measured

logger = logging.getLogger("saccade.engine")

State = Literal["starting", "ready", "restarting", "draining", "sleeping", "stopped"]


class Channel(Protocol):
    """A worker as its supervisor reaches it, whatever has started it."""

    @property
    def pid(self) -> int | None: ...

    num_received: int  # messages so far; each counts as a heartbeat
    last_received: float  # time.monotonic()

    def send(self, message: bytes | bytearray) -> None: ...

    async def receive(self) -> Report | None:
        """None: the worker is gone."""

    def kill(self) -> None: ...

    async def end(self) -> str:
        """End the worker, by force if needed; returns how it ended, in words."""


Launcher = Callable[[], Awaitable[Channel]]
"""Starts a worker. OSError if it cannot."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    state: State
    heartbeat_age: float  # seconds since the worker's last message
    restarts: int
    last_error: str | None  # why the last worker ended, if it was not told to
    pid: int | None  # of our child process, if there is one
    place: WorkerPlace | None = None  # of the latest worker that was ready


class WorkerSupervisor:
    def __init__(self, start: Start, name: str, *, launch: Launcher, heartbeat_timeout: float) -> None:
        """`heartbeat_timeout` is the longest a single step may take, in seconds."""
        if heartbeat_timeout < _MIN_HEARTBEAT_TIMEOUT:
            shortest = _MIN_HEARTBEAT_TIMEOUT
            raise ConfigError(f"heartbeat_timeout must be {shortest} s or more, not {heartbeat_timeout}")
        self._start_frame = frame(start)
        self._name = name
        self._launch = launch
        self._heartbeat_timeout = heartbeat_timeout
        self._state: State = "starting"
        self._process: Channel | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._started: asyncio.Future[Ready] | None = None  # of the first start
        self._spawned_at = time.monotonic()
        self._ready_at: float | None = None  # of the current worker
        self._start_seconds: float | None = None  # of the latest one that became ready
        self._place: WorkerPlace | None = None
        self._stats: dict[str, Any] = {}
        self._fatal: Fatal | None = None  # the current worker's last message
        self._backoff = FIRST_BACKOFF
        self._restarts = 0
        self._stopped_at = 0.0  # of the last worker that stopped
        self._last_error: str | None = None
        self._awake = asyncio.Event()
        self._is_asleep = False  # its worker has ended

    async def wait_ready(self) -> Ready:
        """Start, and wait until it is warm. ConfigError or EngineUnavailable if the first worker fails."""
        assert self._supervisor is None, "a worker's supervisor starts once"
        self._started = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(self._started))
        return await self._started

    def drain(self) -> None:
        """Refuse new work; open work goes on."""
        if self._state != "stopped":
            self._state = "draining"

    def check_ready(self) -> Channel:
        """The worker. EngineUnavailable if it takes nothing now."""
        if self._state != "ready" or self._process is None:
            raise EngineUnavailable(f"{self._name} is {self._state}; try again later", self.retry_after)
        return self._process

    async def sleep(self) -> None:
        """End the worker, and with it all its memory, until `wake_up`. Open work is lost."""
        if self._state == "sleeping":
            return
        process = self.check_ready()
        self._state = "sleeping"
        self._awake.clear()
        self._lose_open("the engine was put to sleep; the request was not finished")
        process.send(frame(Stop()))
        while self._state == "sleeping" and not self._is_asleep:
            await asyncio.sleep(_POLL_SECONDS)

    async def wake_up(self) -> None:
        """Start a new worker and wait until it is warm."""
        self._awake.set()
        while self._state not in ("ready", "draining", "stopped"):
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self) -> None:
        """End the worker, by force if needed."""
        self._state = "stopped"
        self._lose_open("the server is shutting down; the request was not finished")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])

    def stats(self) -> dict[str, Any]:
        """The worker's counters, at most a second old. Empty without one; a new one counts from zero."""
        return self._stats

    def status(self) -> EngineStatus:
        process = self._process
        last_received, pid = (process.last_received, process.pid) if process else (self._spawned_at, None)
        return EngineStatus(
            state=self._state,
            heartbeat_age=time.monotonic() - last_received,
            restarts=self._restarts,
            last_error=self._last_error,
            pid=pid,
            place=self._place,
        )

    @property
    def retry_after(self) -> float:
        """Seconds until the next worker may be ready."""
        seconds = self._start_seconds
        return self._backoff + (_GUESSED_START if seconds is None else seconds)

    # --- what a kind of worker adds -------------------------------------------------------------------------

    def _take(self, report: Report) -> None:
        if isinstance(report, StepUpdate):
            if report.stats is not None:
                self._stats = report.stats
        elif isinstance(report, Ready):
            self._take_ready(report)
        elif isinstance(report, Fatal):
            self._fatal = self._fatal or report

    def _take_ready(self, ready: Ready) -> None:
        self._ready_at = time.monotonic()
        self._start_seconds = self._ready_at - self._spawned_at
        self._place = ready.place
        if self._state in ("starting", "restarting"):
            self._state = "ready"
            if self._restarts:
                away = self._ready_at - self._stopped_at
                logger.warning("%s is back after %.1f s (restart %d)", self._name, away, self._restarts)
        if self._started is not None and not self._started.done():
            self._started.set_result(ready)

    def _worker_ended(self) -> None:
        """It is gone, or about to be ended."""

    def _lose_open(self, message: str) -> None:
        """What was open in it is lost."""

    # --- one worker after the other -------------------------------------------------------------------------

    async def _supervise(self, started: asyncio.Future[Ready]) -> None:
        while True:
            reason = await self._run_worker()
            self._last_error = reason
            if not started.done():
                self._state = "stopped"
                started.set_exception(self._failed_start(reason))
            if self._state in ("draining", "stopped"):
                self._state = "stopped"
                self._lose_open(f"the engine stopped under the request: {reason}")
                return
            if self._state == "sleeping":
                logger.info("%s sleeps, and its memory is free", self._name)
                self._is_asleep = True
                await self._awake.wait()
                self._is_asleep = False
                self._state = "starting"
            else:
                await self._pause(reason)

    async def _pause(self, reason: str) -> None:
        """Back off before the next start: a worker that keeps dying is started ever more rarely."""
        if self._ready_at is not None and time.monotonic() - self._ready_at > MAX_BACKOFF:
            self._backoff = FIRST_BACKOFF
        again = "is being started again; send the request again"
        self._lose_open(f"the engine stopped under the request and {again}")
        self._restarts += 1
        self._stopped_at = time.monotonic()
        pause = self._backoff
        logger.error("%s stopped: %s; it is started again in %.1f s", self._name, reason, pause)
        await asyncio.sleep(self._backoff)
        self._backoff = min(self._backoff * 2, MAX_BACKOFF)

    async def _run_worker(self) -> str:
        """From its start to its end; returns why it ended."""
        self._fatal = self._ready_at = None
        self._spawned_at = time.monotonic()
        try:
            process = self._process = await self._launch()
        except OSError as error:
            return f"its process could not be started ({error.strerror})"
        watch = asyncio.create_task(self._watch(process))
        try:
            await self._listen(process)
        finally:
            watch.cancel()
            self._process = None
            self._stats = {}  # what it held is free
            if self._state == "ready":
                self._state = "restarting"
            self._worker_ended()
            how = await process.end()
        return self._fatal.message if self._fatal else how

    async def _listen(self, process: Channel) -> None:
        try:
            process.send(self._start_frame)
            while (report := await process.receive()) is not None:
                self._take(report)
        except Exception:  # garbage on the wire, or a bug of ours: a new worker is the way out of both
            logger.exception("what %s sent cannot be understood", self._name)
            process.kill()

    async def _watch(self, process: Channel) -> None:
        """Kill a worker whose step loop is silent for the heartbeat timeout; loading may take any time."""
        silent = 0
        while silent < _NUM_CHECKS:
            before = process.num_received
            await asyncio.sleep(self._heartbeat_timeout / _NUM_CHECKS)
            silent = silent + 1 if self._ready_at is not None and process.num_received == before else 0
        self._fatal = Fatal(f"it gave no sign of life for {self._heartbeat_timeout} s", is_config=False)
        process.kill()

    def _failed_start(self, reason: str) -> Exception:
        if self._fatal is not None and self._fatal.is_config:
            return ConfigError(reason)
        return EngineUnavailable(f"{self._name} did not start: {reason}", self.retry_after)
