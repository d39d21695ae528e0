"""The engine as the API process sees it: async streams, restarts with back-off, its state.

Owns one engine process at a time and the requests open in it. Never imports torch and never decodes an image.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from saccade.checkpoint.config import ModelConfig
from saccade.engine.ipc.messages import (
    Abort,
    Accepted,
    Fatal,
    Ready,
    Refused,
    Report,
    StepUpdate,
    Submit,
    frame,
    pack_requests,
    start_message,
)
from saccade.engine.ipc.process import EngineProcess
from saccade.engine.ipc.stream import RequestStream, Submission
from saccade.errors import ConfigError, EngineUnavailable, RequestError
from saccade.options import Options, Replica, SchedulerConfig
from saccade.scheduler.cache_log import CacheChanges
from saccade.types import Geometry, Request, TokenEvent

__all__ = ["EngineClient", "EngineInfo", "EngineStatus", "EngineUnavailable", "RequestStream"]

WORKER = (sys.executable, "-m", "saccade.engine.ipc.worker")
FIRST_BACKOFF = 0.5  # seconds
MAX_BACKOFF = 30.0  # a worker that lived longer starts again from the first back-off
_MIN_HEARTBEAT_TIMEOUT = 2.0  # an idle worker reports twice a second
_NUM_CHECKS = 4  # without a message before a worker counts as hung: one stall of our own loop is not enough
_GUESSED_START = 5.0  # seconds, until a start has been measured

logger = logging.getLogger("saccade.engine")

State = Literal["starting", "ready", "restarting", "draining", "stopped"]


class CheckpointFiles(Protocol):
    """What the worker needs of a checkpoint; the processor's `Checkpoint` has it."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def image_processor(self) -> Mapping[str, Any]: ...


class Channel(Protocol):
    """A worker as its client reaches it, whatever has started it."""

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


class Watcher(Protocol):
    """What a client tells the set of replicas that it belongs to."""

    def began(self, submission: Submission) -> None:
        """Its first event is there: from now on it cannot move."""

    def ended(self, submission: Submission) -> None:
        """Nothing of it is open here any more."""

    def move(self, submission: Submission) -> bool:
        """The worker died before its first event. Whether another replica has it now."""

    def cache_changed(self, index: int, changes: CacheChanges) -> None: ...

    def worker_ended(self, index: int) -> None:
        """The next worker begins with empty caches."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a worker chose when it started. A restarted one chooses anew: the free memory may differ."""

    limits: SchedulerConfig
    reasons: tuple[str, ...]  # one line per choice, for the start-up log
    start_seconds: float  # from the start of the process until it was warm


@dataclass(frozen=True, slots=True)
class EngineStatus:
    state: State
    heartbeat_age: float  # seconds since the worker's last message
    restarts: int
    last_error: str | None  # why the last worker ended, if it was not told to
    pid: int | None  # of the worker, if there is one


class ReplicaView(NamedTuple):
    """One of several engines, for those that watch them."""

    status: EngineStatus
    stats: Mapping[str, Any]
    queued_work: int  # in prompt tokens, as the router counts


class EngineClient:
    def __init__(
        self,
        options: Options,
        *,
        checkpoint: CheckpointFiles,
        largest: Geometry | None,
        warmup: Sequence[Request] = (),
        heartbeat_timeout: float = 60.0,
        progress: bool = True,
        launch: Launcher = partial(EngineProcess.spawn, WORKER),  # noqa: B008 (immutable)
        replica: Replica = Replica(),  # noqa: B008
        watcher: Watcher | None = None,
    ) -> None:
        """`warmup` requests run in every new worker before it is ready.

        `heartbeat_timeout` is the longest a single step may take, in seconds.
        """
        if heartbeat_timeout < _MIN_HEARTBEAT_TIMEOUT:
            shortest = _MIN_HEARTBEAT_TIMEOUT
            raise ConfigError(f"heartbeat_timeout must be {shortest} s or more, not {heartbeat_timeout}")
        files = (checkpoint.path, checkpoint.config, checkpoint.image_processor)
        shown = progress and not replica.index
        message = start_message(*files, options, largest, warmup, progress=shown, replica=replica)
        self._start_frame = frame(message)
        self._heartbeat_timeout = heartbeat_timeout
        self._launch = launch
        self._name = "the engine" if replica.is_alone else f"engine {replica.index}"
        self._index = replica.index
        self._watcher = watcher
        self._state: State = "starting"
        self._process: Channel | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._started: asyncio.Future[EngineInfo] | None = None  # of the first start
        self._spawned_at = time.monotonic()
        self._ready_at: float | None = None  # of the current worker
        self._info: EngineInfo | None = None
        self._stats: dict[str, Any] = {}
        self._open: dict[str, Submission] = {}  # by request id, until the worker says that it ended
        self._bytes_in_flight = 0
        self._fatal: Fatal | None = None  # the current worker's last message
        self._backoff = FIRST_BACKOFF
        self._restarts = 0
        self._last_error: str | None = None

    # --- from start to stop ---------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Wait until the worker is warm. ConfigError or EngineUnavailable if the first one fails."""
        assert self._supervisor is None, "an engine client starts once"
        self._started = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(self._started))
        return await self._started

    def drain(self) -> None:
        """Refuse new requests; open ones go on."""
        if self._state != "stopped":
            self._state = "draining"

    async def stop(self) -> None:
        """End the worker, by force if needed. Open streams raise EngineUnavailable."""
        self._state = "stopped"
        self._lose_open("the server is shutting down; the request was not finished")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])

    @property
    def info(self) -> EngineInfo | None:
        """What the latest worker chose; None before the first is ready."""
        return self._info

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of all open requests, as sent to the worker, which keeps them until the request ends."""
        return self._bytes_in_flight

    def stats(self) -> dict[str, Any]:
        """The worker's counters, at most about a second old. A new worker counts from zero."""
        return self._stats

    def replicas(self) -> Sequence[ReplicaView]:
        """Of an engine that is several; here none."""
        return ()

    def status(self) -> EngineStatus:
        process = self._process
        return EngineStatus(
            state=self._state,
            heartbeat_age=time.monotonic() - (process.last_received if process else self._spawned_at),
            restarts=self._restarts,
            last_error=self._last_error,
            pid=process.pid if process else None,
        )

    # --- requests -------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Returns when the scheduler has admitted all of them; RequestError if it refuses, then none runs.

        Requests that share a prompt object send it once, and it counts once as bytes in flight.
        """
        submission = Submission(requests)
        self.send(submission)
        await submission.admission()
        return list(submission.streams.values())

    def send(self, submission: Submission) -> None:
        """Of several replicas, also one that another worker had before."""
        if self._state != "ready" or self._process is None:
            raise EngineUnavailable(f"the engine is {self._state}; try again later", self.retry_after)
        for name in submission.streams:
            if name in self._open:
                raise RequestError(f"a request with the id {name!r} is already open; choose another id")
        message = frame(Submit(pack_requests(submission.requests)))
        if self._watcher is None:
            submission.requests = ()  # it cannot move
        submission.sent(len(message), self._abort)
        self._open |= dict.fromkeys(submission.streams, submission)
        self._bytes_in_flight += submission.num_bytes
        self._process.send(message)

    def _begin(self, submission: Submission) -> None:
        self._bytes_in_flight -= submission.num_bytes
        submission.requests = ()
        self._bytes_in_flight += submission.num_bytes
        if self._watcher is not None:
            self._watcher.began(submission)

    def _abort(self, request_id: str) -> None:
        if self._process is not None:
            self._process.send(frame(Abort(request_id)))

    def _close(self, request_id: str) -> RequestStream | None:
        submission = self._open.pop(request_id, None)
        if submission is None:
            return None
        submission.num_open -= 1
        if not submission.num_open:
            self._bytes_in_flight -= submission.num_bytes
            if self._watcher is not None:
                self._watcher.ended(submission)
        return submission.streams[request_id]

    def _lose_open(self, message: str) -> None:
        for submission in list(dict.fromkeys(self._open.values())):
            streams = [self._close(request_id) for request_id in submission.streams]
            if self._watcher is not None and submission.can_move and self._watcher.move(submission):
                continue
            error = EngineUnavailable(message, self.retry_after)
            submission.refuse(error)
            for stream in streams:
                if stream is not None:
                    stream.lose(error)

    @property
    def retry_after(self) -> float:
        """Seconds until the next worker may be ready."""
        return self._backoff + (self._info.start_seconds if self._info else _GUESSED_START)

    # --- what the worker says -------------------------------------------------------------------------------

    def _take(self, report: Report) -> None:
        if isinstance(report, StepUpdate):
            self._take_update(report)
        elif isinstance(report, Accepted):
            if report.request_id in self._open:
                self._open[report.request_id].admit()
        elif isinstance(report, Refused):
            self._take_refusal(report)
        elif isinstance(report, Ready):
            self._take_ready(report)
        else:
            self._fatal = report

    def _take_refusal(self, refused: Refused) -> None:
        submission = self._open.get(refused.request_id)
        if submission is not None:
            for stream in submission.streams.values():
                self._close(stream.request_id)
                if submission.is_admitted:  # by a worker that died since
                    stream.push(TokenEvent(stream.request_id, None, None, "error", error=refused.error))
            submission.refuse(refused.error)

    def _take_update(self, update: StepUpdate) -> None:
        self._stats = update.stats if update.stats is not None else self._stats
        if update.cache is not None and self._watcher is not None:
            self._watcher.cache_changed(self._index, update.cache)
        for event in update.events:
            submission = self._open.get(event.request_id)
            if submission is None:
                continue
            if submission.requests:
                self._begin(submission)
            if event.finish_reason is not None:
                self._close(event.request_id)
            submission.streams[event.request_id].push(event)

    def _take_ready(self, ready: Ready) -> None:
        self._ready_at = time.monotonic()
        self._info = EngineInfo(ready.limits, ready.reasons, self._ready_at - self._spawned_at)
        if self._state in ("starting", "restarting"):
            self._state = "ready"
        if self._started is not None and not self._started.done():
            self._started.set_result(self._info)

    # --- one worker after the other -------------------------------------------------------------------------

    async def _supervise(self, started: asyncio.Future[EngineInfo]) -> None:
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
            await self._pause(reason)

    async def _pause(self, reason: str) -> None:
        """Back off before the next start: a worker that keeps dying is started ever more rarely."""
        if self._ready_at is not None and time.monotonic() - self._ready_at > MAX_BACKOFF:
            self._backoff = FIRST_BACKOFF
        again = "is being started again; send the request again"
        self._lose_open(f"the engine stopped under the request and {again}")
        self._restarts += 1
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
            self._state = "restarting" if self._state == "ready" else self._state
            if self._watcher is not None:
                self._watcher.worker_ended(self._index)
            how = await process.end()
        return self._fatal.message if self._fatal else how

    async def _listen(self, process: Channel) -> None:
        try:
            process.send(self._start_frame)
            while (report := await process.receive()) is not None:
                self._take(report)
        except Exception:  # garbage on the wire, or a bug of ours: a new worker is the way out of both
            logger.exception("what the engine sent cannot be understood")
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
        return EngineUnavailable(f"the engine did not start: {reason}", self.retry_after)
