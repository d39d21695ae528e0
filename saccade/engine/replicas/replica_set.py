"""Several engines as one: a submission is routed to a replica, and moves if that dies before its first token.

Owns one client per replica, each of which supervises its own worker, and the router's placements.

    submit ─► router: which replica ─► EngineClient 0 ══► worker 0      events go straight to the streams
                    ▲                  EngineClient 1 ══► worker 1
                    └── what is cached, first tokens, ends, deaths ◄──┘
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from saccade.engine.autoscale import WorkerLoad
from saccade.engine.ipc.client import EngineClient, EngineInfo, EngineStatus, ReplicaView
from saccade.engine.ipc.messages import ControlAction
from saccade.engine.ipc.stream import RequestStream, Submission
from saccade.engine.ipc.worker_places import WorkerPlaces
from saccade.engine.replicas.merging import merged_info, merged_stats, merged_status
from saccade.engine.replicas.router import RoutedCall, Router, demand_of
from saccade.errors import EngineUnavailable, RequestError
from saccade.scheduler.cache_log import CacheChanges
from saccade.types.replica import Replica
from saccade.types.request import Request

_SILENT_SECONDS = 5.0  # without a heartbeat: a replica gets no new requests while another can take them
_DRAIN_POLL_SECONDS = 0.1
_MAX_DEATHS = 2  # of replicas under one submission: then it may be the cause, and does not move again

logger = logging.getLogger("saccade.engine")


class ReplicaSet:
    def __init__(
        self, make_client: Callable[..., EngineClient], num_replicas: int, bounds: tuple[int, int]
    ) -> None:
        """`make_client` takes `replica` and `watcher`. `bounds`: how few and how many there may be."""
        self._make_client = make_client
        _, self._num_places = bounds
        self._router = Router(self._num_places)
        self._placements: dict[Submission, RoutedCall] = {}  # of what is open
        self._is_stopping = False
        self._num_moved = 0
        self._infos: tuple[EngineInfo, ...] = ()  # that `_info` was made from
        self._info: EngineInfo | None = None
        self._places = WorkerPlaces("engine", self._new_client, num_replicas, bounds)

    def _new_client(self, index: int) -> EngineClient:
        return self._make_client(replica=Replica(index, self._num_places), watcher=self)

    @property
    def _clients(self) -> list[EngineClient]:
        return self._places.workers

    # --- from start to stop ---------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Wait until all replicas are warm; those that are take requests meanwhile."""
        await self._places.start()
        assert self.info is not None
        self._places.autoscale(self._load, self.shrink)
        return self.info

    def drain(self) -> None:
        for client in self._places.used_workers:
            client.drain()

    async def stop(self) -> None:
        self._is_stopping = True
        await self._places.stop()

    async def sleep(self) -> None:
        await asyncio.gather(*(client.sleep() for client in self._places.used_workers))

    async def wake_up(self) -> None:
        await asyncio.gather(*(client.wake_up() for client in self._places.used_workers))

    async def control(self, action: ControlAction, prefix: str | None = None) -> str | bool | None:
        """In all replicas; of a reset, whether all did it, of a profile, all files."""
        answers = await asyncio.gather(
            *(client.control(action, prefix) for client in self._places.used_workers)
        )
        files = [str(one) for one in answers if isinstance(one, str)]
        return ", ".join(files) if files else all(one is not False for one in answers)

    @property
    def info(self) -> EngineInfo | None:
        """What holds for every replica that has started; None before the first has."""
        infos = tuple(client.info for client in self._clients if client.info is not None)
        if infos != self._infos:
            self._infos = infos
            self._info = merged_info(infos)
        return self._info

    @property
    def bytes_in_flight(self) -> int:
        return sum(client.bytes_in_flight for client in self._clients)

    def stats(self) -> dict[str, Any]:
        stats = merged_stats([client.stats() for client in self._clients])
        return {**stats, "moved": self._num_moved} if stats else {}

    def status(self) -> EngineStatus:
        return merged_status([client.status() for client in self._places.used_workers])

    def replicas(self) -> list[ReplicaView]:
        """By index; where autoscaling has none now, one that is stopped."""
        return [self._view(index) for index in range(self._num_places)]

    def _view(self, index: int) -> ReplicaView:
        stats = self._clients[index].stats()
        return ReplicaView(self._places.status(index), stats, self._router.replicas[index].queued_work)

    # --- growing and shrinking ------------------------------------------------------------------------------

    async def grow(self) -> None:
        await self._places.grow()

    async def shrink(self) -> None:
        """End the replica with the least work, once its open requests are finished."""
        live = self._live()
        if len(live) < 2:
            return
        index = min(live, key=lambda one: (self._router.replicas[one].queued_work, -one))
        logger.info("engine %d finishes its requests and is removed", index)
        self._clients[index].drain()
        while self._router.replicas[index].num_requests:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        await self._places.retire(index)

    def _load(self) -> WorkerLoad:
        views = [self._view(index) for index in sorted(self._places.used)]
        ready = [view for view in views if view.status.state == "ready"]
        blocks = [view.stats["kv"] for view in ready if view.stats]
        return WorkerLoad(
            num_ready=len(ready),
            num_starting=sum(view.status.state == "starting" for view in views),
            queued_work=sum(view.queued_work for view in views),
            use=sum(kv["used"] / kv["total"] for kv in blocks),
        )

    # --- requests -------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """As `EngineClient.submit`."""
        submission = Submission(requests)
        self._send(submission)
        await submission.admission()
        return list(submission.streams.values())

    def _send(self, submission: Submission) -> None:
        live = self._live()
        info = self.info
        if not live or info is None:
            state = self.status().state
            wait = min(client.retry_after for client in self._places.used_workers)
            raise EngineUnavailable(f"the engine is {state}; try again later", wait)
        limits = info.limits
        max_waiting = math.inf if limits.max_waiting is None else limits.max_waiting
        max_requests = limits.max_num_seqs + max_waiting
        demand = demand_of(submission.requests, limits)
        placement = self._placements[submission] = self._router.place(demand, live, max_requests)
        try:
            self._clients[placement.replica].send(submission)
        except BaseException:
            self.ended(submission)
            raise

    def _live(self) -> list[int]:
        """Replicas that can take requests; of hung ones only where no other is left."""
        statuses = [(index, client.status()) for index, client in enumerate(self._clients)]
        ready = [(index, status) for index, status in statuses if status.state == "ready"]
        awake = [index for index, status in ready if status.heartbeat_age < _SILENT_SECONDS]
        return awake or [index for index, _ in ready]

    # --- what the clients tell ------------------------------------------------------------------------------

    def began(self, submission: Submission) -> None:
        self._router.end_prefill(self._placements[submission])

    def ended(self, submission: Submission) -> None:
        self._router.remove(self._placements.pop(submission))

    def move(self, submission: Submission) -> bool:
        submission.num_deaths += 1
        if self._is_stopping or submission.num_deaths >= _MAX_DEATHS:
            return False
        try:
            self._send(submission)
        except (EngineUnavailable, RequestError):
            return False
        self._num_moved += 1
        return True

    def cache_changed(self, index: int, changes: CacheChanges) -> None:
        self._router.replicas[index].apply(changes)

    def worker_ended(self, index: int) -> None:
        self._router.replicas[index].forget()

    def check(self) -> None:
        """The conservation laws."""
        self._router.check(self._placements.values())
        assert bool(self._placements) == bool(self.bytes_in_flight), "bytes in flight without a submission"
