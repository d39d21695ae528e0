"""The engine as the API process sees it: async streams, its limits, its state.

Owns the requests open in one engine process. Never imports torch and never decodes an image.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from saccade.checkpoint.config import ModelConfig
from saccade.engine.ipc.kv_event_publisher import KVEventEndpoints, KVEventPublisher
from saccade.engine.ipc.messages import (
    Abort,
    Accepted,
    Control,
    ControlAction,
    Controlled,
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
from saccade.engine.ipc.supervisor import EngineStatus, Launcher, WorkerSupervisor
from saccade.errors import ConfigError, EngineUnavailable, RequestError
from saccade.options.engine import Options, SchedulerConfig
from saccade.scheduler.cache_log import CacheChanges
from saccade.types.events import TokenEvent
from saccade.types.media import Geometry
from saccade.types.replica import Replica
from saccade.types.request import Request

__all__ = ["EngineClient", "EngineInfo", "EngineStatus", "EngineUnavailable", "RequestStream"]

WORKER = (sys.executable, "-m", "saccade.engine.ipc.worker")


class CheckpointFiles(Protocol):
    """What the worker needs of a checkpoint; the processor's `Checkpoint` has it."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def image_processor(self) -> Mapping[str, Any]: ...


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


class ReplicaView(NamedTuple):
    """One of several engines, for those that watch them."""

    status: EngineStatus
    stats: Mapping[str, Any]
    queued_work: int  # in prompt tokens, as the router counts


class EngineClient(WorkerSupervisor):
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
        encoders: tuple[str, ...] = (),
        kv_events: KVEventEndpoints | None = None,
    ) -> None:
        """`warmup` requests run in every new worker before it is ready.

        `encoders`: addresses of the encoder workers. `kv_events`: bound at once.
        """
        files = (checkpoint.path, checkpoint.config, checkpoint.image_processor)
        shows_progress = progress and not replica.index
        replica = replace(replica, encoders=encoders)
        start = start_message(
            *files,
            options,
            largest,
            warmup,
            progress=shows_progress,
            replica=replica,
            logs_kv_events=kv_events is not None,
        )
        name = "the engine" if replica.is_alone else f"engine {replica.index}"
        super().__init__(start, name, launch=launch, heartbeat_timeout=heartbeat_timeout)
        self._kv_events = KVEventPublisher(kv_events, replica.index) if kv_events is not None else None
        self._index = replica.index
        self._watcher = watcher
        self._info: EngineInfo | None = None
        self._open: dict[str, Submission] = {}  # by request id, until the worker says that it ended
        self._bytes_in_flight = 0
        self._controls: dict[
            int, asyncio.Future[str | bool | None]
        ] = {}  # by number, until they are answered
        self._num_controls = 0

    async def start(self) -> EngineInfo:
        """Wait until the worker is warm. ConfigError or EngineUnavailable if the first one fails."""
        await self.wait_ready()
        assert self._info is not None
        return self._info

    async def stop(self) -> None:
        await super().stop()
        if self._kv_events is not None:
            self._kv_events.close()
            self._kv_events = None

    @property
    def info(self) -> EngineInfo | None:
        """What the latest worker chose; None before the first is ready."""
        return self._info

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of all open requests, as sent to the worker, which keeps them until the request ends."""
        return self._bytes_in_flight

    def stats(self) -> dict[str, Any]:
        stats = super().stats()
        if stats and self._kv_events is not None:
            return {**stats, "kv_events": self._kv_events.stats()}
        return stats

    def replicas(self) -> Sequence[ReplicaView]:
        """Of an engine that is several; here none."""
        return ()

    async def control(self, action: ControlAction, prefix: str | None = None) -> str | bool | None:
        """Done between two steps of the engine. ConfigError if it cannot be."""
        process = self.check_ready()
        self._num_controls += 1
        number = self._num_controls
        answer: asyncio.Future[str | bool | None] = asyncio.get_running_loop().create_future()
        self._controls[number] = answer
        process.send(frame(Control(number, action, prefix)))
        try:
            return await answer
        finally:
            del self._controls[number]

    def _take_controlled(self, report: Controlled) -> None:
        answer = self._controls.get(report.number)
        if answer is None or answer.done():
            return
        if report.error is not None:
            answer.set_exception(ConfigError(report.error))
        else:
            answer.set_result(report.result)

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
        process = self.check_ready()
        for name in submission.streams:
            if name in self._open:
                raise RequestError(f"a request with the id {name!r} is already open; choose another id")
        message = frame(Submit(pack_requests(submission.requests)))
        if self._watcher is None:
            submission.requests = ()  # it cannot move
        submission.sent(len(message), self._abort)
        self._open |= dict.fromkeys(submission.streams, submission)
        self._bytes_in_flight += submission.num_bytes
        process.send(message)

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

    # --- what the worker says -------------------------------------------------------------------------------

    def _take(self, report: Report) -> None:
        if isinstance(report, StepUpdate):
            self._take_update(report)
        elif isinstance(report, Accepted):
            if report.request_id in self._open:
                self._open[report.request_id].admit()
        elif isinstance(report, Refused):
            self._take_refusal(report)
        elif isinstance(report, Controlled):
            self._take_controlled(report)
        else:
            super()._take(report)

    def _take_refusal(self, refused: Refused) -> None:
        submission = self._open.get(refused.request_id)
        if submission is not None:
            for stream in submission.streams.values():
                self._close(stream.request_id)
                if submission.is_admitted:  # by a worker that died since
                    stream.push(TokenEvent(stream.request_id, None, None, "error", error=refused.error))
            submission.refuse(refused.error)

    def _take_update(self, update: StepUpdate) -> None:
        super()._take(update)
        if update.cache is not None and self._watcher is not None:
            self._watcher.cache_changed(self._index, update.cache)
        if update.kv_events and self._kv_events is not None:
            self._kv_events.publish(update.kv_events)
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
        super()._take_ready(ready)
        assert ready.limits is not None
        assert self._start_seconds is not None
        self._info = EngineInfo(ready.limits, ready.reasons, self._start_seconds)

    def _worker_ended(self) -> None:
        for answer in self._controls.values():
            if not answer.done():
                answer.set_exception(
                    EngineUnavailable("the engine stopped before it was done", self.retry_after)
                )
        if self._watcher is not None:
            self._watcher.worker_ended(self._index)
        if self._kv_events is not None:
            self._kv_events.clear()
