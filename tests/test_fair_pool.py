"""Work of several owners is done in turn."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from saccade.fair_pool import FairPool, QueueFull


def blocked(threads: int = 1, max_waiting: int | None = None) -> tuple[FairPool, threading.Event]:
    """A pool whose only thread is busy until the event is set."""
    pool, go, is_busy = FairPool(threads, "test", max_waiting), threading.Event(), threading.Event()
    pool.submit("first", lambda: (is_busy.set(), go.wait(120)))
    assert is_busy.wait(120)
    return pool, go


def test_an_owner_with_one_piece_waits_for_one_piece_of_another_not_for_all() -> None:
    pool, go = blocked()
    done: list[str] = []
    pieces = [pool.submit("many", lambda: done.append("many")) for _ in range(20)]
    pieces.append(pool.submit("one", lambda: done.append("one")))
    go.set()
    for piece in pieces:
        piece.result(10)
    assert done.index("one") <= 1
    pool.close()


def test_an_owner_with_too_much_waiting_is_refused_and_others_are_not() -> None:
    pool, go = blocked(max_waiting=2)
    pieces = [pool.submit("many", int) for _ in range(2)]
    with pytest.raises(QueueFull) as caught:
        pool.submit("many", int)
    assert caught.value.count == 2
    pieces.append(pool.submit("one", int))
    assert pool.num_waiting == 3
    go.set()
    assert [piece.result(10) for piece in pieces] == [0, 0, 0]
    pool.submit("many", int).result(10)  # there is room again
    pool.close()


def test_what_is_cancelled_is_not_begun_and_an_error_is_the_owners() -> None:
    pool, go = blocked()
    begun: list[int] = []
    cancelled = pool.submit("a", lambda: begun.append(1))
    cancelled.cancel()
    broken = pool.submit("a", lambda: 1 // 0)
    fine = pool.submit("b", lambda: 5)
    go.set()
    assert fine.result(10) == 5
    with pytest.raises(ZeroDivisionError):
        broken.result(10)
    assert not begun
    pool.close()


def test_a_closed_pool_cancels_what_waits_and_what_comes() -> None:
    pool, go = blocked()
    waiting = pool.submit("a", int)
    pool.close()
    go.set()
    for piece in (waiting, pool.submit("a", int)):
        with pytest.raises(CancelledError):
            piece.result(10)
