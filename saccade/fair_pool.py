"""A thread pool that serves its owners round-robin, so that one with much work delays only itself."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class QueueFull(Exception):
    """An owner's queue is full, with `count` items."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} wait")
        self.count = count


class FairPool:
    """Takes one item of each owner in turn. Threads start on demand and are daemons, so none delays exit."""

    def __init__(self, threads: int, name: str, max_waiting: int | None = None) -> None:
        """`max_waiting`: items that one owner may have queued."""
        self._num_threads = threads
        self._name = name
        self._max_waiting = max_waiting
        self._queues: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Items that no thread has taken yet."""
        with self._changed:
            return sum(len(queue) for queue in self._queues.values())

    def submit(self, owner: str, work: Callable[[], Result]) -> Future[Result]:
        """Raises QueueFull if the owner's queue is full. A future may be cancelled until its work starts."""
        future: Future[Result] = Future()
        with self._changed:
            waiting = len(self._queues.get(owner, ()))
            if self._max_waiting is not None and waiting >= self._max_waiting:
                raise QueueFull(waiting)
            if self._is_closed:
                future.cancel()
                return future
            self._queues.setdefault(owner, deque()).append((future, work))
            self._start_thread()
            self._changed.notify()
        return future

    def close(self, *, wait: bool = False) -> None:
        """Cancel queued work. Running work goes on; with `wait` until it is done."""
        with self._changed:
            self._is_closed = True
            waiting = [future for queue in self._queues.values() for future, _ in queue]
            self._queues.clear()
            self._changed.notify_all()
        for future in waiting:
            future.cancel()
        if wait:
            for thread in self._threads:
                thread.join()

    def _start_thread(self) -> None:
        if len(self._threads) < self._num_threads:
            name = f"{self._name}-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            future, work = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del taken, future, work  # or they would stay alive until the next item

    def _take(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The next item; its owner moves to the end. None when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queues or self._is_closed)
            if self._is_closed:
                return None
            owner, queue = self._queues.popitem(last=False)
            taken = queue.popleft()
            if queue:
                self._queues[owner] = queue
            return taken
