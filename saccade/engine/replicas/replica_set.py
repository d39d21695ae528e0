"""Several engines as one: a submission is routed to a replica, and moves if that dies before its first token.

Owns one client per replica, each of which supervises its own worker, and the router's placements.

    submit ─► router: which replica ─► EngineClient 0 ══► worker 0      events go straight to the streams
                    ▲                  EngineClient 1 ══► worker 1
                    └── what is cached, first tokens, ends, deaths ◄──┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from saccade.engine.ipc.client import EngineClient, EngineInfo, EngineStatus, ReplicaView
from saccade.engine.ipc.stream import RequestStream, Submission
from saccade.engine.replicas.merging import merged_info, merged_stats, merged_status
from saccade.engine.replicas.router import Placement, Router, demand_of
from saccade.errors import EngineUnavailable, RequestError
from saccade.options import Replica
from saccade.scheduler.cache_log import CacheChanges
from saccade.types import Request

_SILENT_SECONDS = 5.0  # without a heartbeat: a replica gets no new requests while another can take them
_MAX_DEATHS = 2  # of replicas under one submission: then it may be the cause, and does not move again

logger = logging.getLogger("saccade.engine")


class ReplicaSet:
    def __init__(self, make_client: Callable[..., EngineClient], num_replicas: int) -> None:
        """`make_client` takes `replica` and `watcher`."""
        self._router = Router(num_replicas)
        self._placements: dict[Submission, Placement] = {}  # of what is open
        self._is_stopping = False
        self._num_moved = 0
        self._infos: tuple[EngineInfo, ...] = ()  # that `_info` was made from
        self._info: EngineInfo | None = None
        self._clients = [
            make_client(replica=Replica(index, num_replicas), watcher=self) for index in range(num_replicas)
        ]

    # --- from start to stop ---------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Wait until all replicas are warm; those that are take requests meanwhile."""
        await asyncio.gather(*[client.start() for client in self._clients])
        assert self.info is not None
        return self.info

    def drain(self) -> None:
        for client in self._clients:
            client.drain()

    async def stop(self) -> None:
        self._is_stopping = True
        await asyncio.gather(*[client.stop() for client in self._clients])

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
        return merged_status([client.status() for client in self._clients])

    def replicas(self) -> list[ReplicaView]:
        pairs = zip(self._clients, self._router.replicas, strict=True)
        return [ReplicaView(client.status(), client.stats(), state.queued_work) for client, state in pairs]

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
            wait = min(client.retry_after for client in self._clients)
            raise EngineUnavailable(f"the engine is {state}; try again later", wait)
        limits = info.limits
        max_requests = None if limits.max_waiting is None else limits.max_num_seqs + limits.max_waiting
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
