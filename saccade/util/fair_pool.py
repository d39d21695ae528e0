"""A thread pool that clients share: the one that has used its threads least goes first.

    client  held   waiting
    A       3.1 s  40 items   waits, however early it came
    B       0.2 s   2 items   goes first
    C       -       1 item    new: begins where the least served one is, saves nothing up

Within a client its requests take turns. A client's weight divides what it has used.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")
_MAX_REMEMBERED = 256  # clients without items


class Owner(NamedTuple):
    """Whose work it is."""

    client: str  # a tenant, or an address
    request: str = ""
    weight: float = 1.0  # of the client


class QueueFull(Exception):
    """A client's queue is full, with `count` items."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} wait")
        self.count = count


class _Item(NamedTuple):
    future: Future[Any]
    work: Callable[[], Any]
    weight: float


@dataclass(slots=True, eq=False)
class _Client:
    name: str
    held_seconds: float = 0.0  # it held a thread, by weight; grows only
    num_running: int = 0
    num_waiting: int = 0
    requests: OrderedDict[str, deque[_Item]] = field(default_factory=OrderedDict)  # that wait, in turn

    def put(self, request: str, item: _Item) -> None:
        self.requests.setdefault(request, deque()).append(item)
        self.num_waiting += 1

    def pop(self) -> _Item:
        """The next item; its request moves to the end."""
        request, items = self.requests.popitem(last=False)
        item = items.popleft()
        if items:
            self.requests[request] = items
        self.num_waiting -= 1
        return item


class FairPool:
    """Threads start on demand and are daemons, so none delays exit."""

    def __init__(
        self,
        threads: int,
        name: str,
        max_waiting: float = math.inf,
        max_running: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_waiting`: items that one client may have queued. `max_running`: threads that it may hold."""
        self._num_threads = threads
        self._name = name
        self._max_waiting = max_waiting
        self._max_running = max_running or threads
        self._clock = clock
        self._clients: dict[str, _Client] = {}  # with items that wait or run
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._virtual_time = 0.0  # the most that a client had used when it was served
        self._remembered: OrderedDict[str, float] = OrderedDict()  # clients without items that used more
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Items that no thread has taken yet."""
        with self._changed:
            return sum(client.num_waiting for client in self._clients.values())

    def submit(self, owner: Owner | str, work: Callable[[], Result]) -> Future[Result]:
        """Raises QueueFull if the client's queue is full. A future may be cancelled until its work starts."""
        if isinstance(owner, str):
            owner = Owner(owner)
        future: Future[Result] = Future()
        with self._changed:
            client = self._clients.get(owner.client)
            count = client.num_waiting if client else 0
            if count >= self._max_waiting:
                raise QueueFull(count)
            if self._is_closed:
                future.cancel()
                return future
            if client is None:  # time in which it asked for nothing is not saved up
                seconds = max(self._virtual_time, self._remembered.pop(owner.client, 0.0))
                client = self._clients[owner.client] = _Client(owner.client, seconds)
            client.put(owner.request, _Item(future, work, owner.weight))
            self._start_thread()
            self._changed.notify()
        return future

    def close(self, *, wait: bool = False) -> None:
        """Cancel queued work. Running work goes on; with `wait` until it is done."""
        with self._changed:
            self._is_closed = True
            queues = [items for client in self._clients.values() for items in client.requests.values()]
            futures = [item.future for items in queues for item in items]
            self._clients.clear()
            self._changed.notify_all()
        for future in futures:
            future.cancel()
        if wait:
            for thread in self._threads:
                thread.join()

    def check_idle(self) -> None:
        """The conservation law: a client that has nothing to do here is forgotten."""
        with self._changed:
            assert not self._clients, f"{sorted(self._clients)} wait or run"

    def _start_thread(self) -> None:
        if len(self._threads) < self._num_threads:
            name = f"{self._name}-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        while (turn := self._take()) is not None:
            client, item = turn
            start = self._clock()
            error: BaseException | None = None
            result: list[Any] = []  # it must not stay alive here once its future has it
            is_wanted = item.future.set_running_or_notify_cancel()
            if is_wanted:
                try:
                    result.append(item.work())
                except BaseException as raised:
                    error = raised
            self._give_back(client, (self._clock() - start) / item.weight)
            if error is not None:
                item.future.set_exception(error)
            elif is_wanted:
                item.future.set_result(result.pop())
            del turn, client, item, result, error  # or they would stay alive until the next item

    def _take(self) -> tuple[_Client, _Item] | None:
        """The next item. None when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._next())
            if self._is_closed:
                return None
            client = self._next()
            assert client is not None
            self._virtual_time = max(self._virtual_time, client.held_seconds)
            client.num_running += 1
            return client, client.pop()

    def _next(self) -> _Client | None:
        """The client that goes first: of those that may have a thread, the one that used least.

        What it runs already counts before its time is known, so that threads go to different clients.
        """
        ready = (
            client
            for client in self._clients.values()
            if client.num_waiting and client.num_running < self._max_running
        )
        return min(ready, key=lambda client: (client.num_running, client.held_seconds), default=None)

    def _give_back(self, client: _Client, seconds: float) -> None:
        with self._changed:
            client.held_seconds += seconds
            client.num_running -= 1
            if not client.num_running and not client.num_waiting and not self._is_closed:
                self._forget(client)
            self._changed.notify()

    def _forget(self, client: _Client) -> None:
        del self._clients[client.name]
        if client.held_seconds > self._virtual_time:  # it must not come back at once as if it had used less
            self._remembered[client.name] = client.held_seconds
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)
