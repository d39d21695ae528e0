"""Work of several owners is done in turn."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial

import pytest

from saccade.util.fair_pool import FairPool, Owner, QueueFull


def blocked(threads: int = 1, max_waiting: float = math.inf) -> tuple[FairPool, threading.Event]:
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


def test_the_client_that_held_the_threads_least_goes_first_and_its_requests_take_turns() -> None:
    now = [0.0]
    pool, go, busy = FairPool(1, "test", clock=lambda: now[0]), threading.Event(), threading.Event()
    done: list[str] = []

    def takes(name: str, seconds: float) -> None:
        now[0] += seconds
        done.append(name)

    pool.submit("first", lambda: (busy.set(), go.wait(120)))
    assert busy.wait(120)
    pieces = [pool.submit(Owner("heavy", f"{i % 2}"), partial(takes, f"heavy {i % 2}", 5.0)) for i in range(4)]
    pieces += [pool.submit(Owner("light"), partial(takes, "light", 1.0)) for _ in range(8)]
    go.set()
    for piece in pieces:
        piece.result(10)
    assert done[:7] == ["heavy 0", *["light"] * 5, "heavy 1"]
    pool.close()


def test_a_client_with_twice_the_weight_has_twice_the_time() -> None:
    now = [0.0]
    pool, go, busy = FairPool(1, "test", clock=lambda: now[0]), threading.Event(), threading.Event()
    done: list[str] = []

    def takes(name: str) -> None:
        now[0] += 1.0
        done.append(name)

    pool.submit("first", lambda: (busy.set(), go.wait(120)))
    assert busy.wait(120)
    pieces = [
        pool.submit(Owner(name, weight=weight), partial(takes, name))
        for _ in range(20)
        for name, weight in (("one", 1.0), ("two", 2.0))
    ]
    go.set()
    for piece in pieces:
        piece.result(10)
    assert 9 <= done[:15].count("two") <= 11
    pool.close()


def test_a_client_that_comes_back_at_once_has_not_forgotten_what_it_used() -> None:
    now = [0.0]
    pool = FairPool(1, "test", clock=lambda: now[0])
    done: list[str] = []

    def takes(name: str, seconds: float) -> None:
        now[0] += seconds
        done.append(name)

    pool.submit("heavy", partial(takes, "heavy", 100.0)).result(10)  # alone, and forgotten
    go, busy = threading.Event(), threading.Event()
    pool.submit("first", lambda: (busy.set(), go.wait(120)))
    assert busy.wait(120)
    pieces = [pool.submit("heavy", partial(takes, "heavy", 1.0))]
    pieces += [pool.submit("light", partial(takes, "light", 1.0)) for _ in range(5)]
    go.set()
    for piece in pieces:
        piece.result(10)
    assert done == ["heavy", *["light"] * 5, "heavy"]
    pool.close()


def test_a_client_holds_no_more_threads_than_it_may_and_others_have_the_rest() -> None:
    pool, go = FairPool(3, "test", max_running=2), threading.Event()
    held = [pool.submit("many", lambda: go.wait(120)) for _ in range(5)]
    assert pool.submit("one", lambda: 7).result(10) == 7
    assert sum(future.running() for future in held) == 2
    go.set()
    for future in held:
        future.result(10)
    pool.close()


def test_who_has_nothing_to_do_in_a_pool_is_forgotten() -> None:
    pool = FairPool(2, "test")
    for i in range(1000):
        pool.submit(f"client {i}", int).result(10)
    last = pool.submit("last", int)
    last.result(10)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(AssertionError):
            pool.check_idle()
            break
        time.sleep(0.01)
    pool.check_idle()
    pool.close()
