"""A helper process answers, and what ends it costs one request."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade.helpers.process import HelperPool, HelperProcess, Outcome, Reply


@pytest.fixture
def helper() -> Iterator[HelperProcess]:
    helper = HelperProcess("tests.helpers.odd_helper", "hello")
    yield helper
    helper.close()


def ask(helper: HelperProcess, body: bytes, seconds: float = 5.0) -> Reply:
    return helper.ask([body], seconds)


def test_it_answers_with_the_parts_as_one_body_and_is_the_same_process_again(helper: HelperProcess) -> None:
    assert helper.ask([b"a", b"b" * 100_000], 5.0).body == b"hello a" + b"b" * 100_000
    pid = helper.pid
    assert ask(helper, b"").body == b"hello "
    assert helper.pid == pid


@pytest.mark.parametrize(
    ("body", "outcome"),
    [(b"spin", Outcome.SLOW), (b"die", Outcome.DIED), (b"fill", Outcome.MEMORY), (b"refuse", Outcome.FAILED)],
)
def test_what_goes_wrong_is_named_and_the_next_request_is_answered(
    helper: HelperProcess, body: bytes, outcome: Outcome
) -> None:
    assert ask(helper, body, 0.3).outcome is outcome
    assert ask(helper, b"x").body == b"hello x"


def test_the_time_that_counts_is_of_the_processor(helper: HelperProcess) -> None:
    ask(helper, b"")  # started
    assert 0.2 < ask(helper, b"spin", 0.3).seconds <= 0.4  # what it may take: that is what it took
    assert ask(helper, b"x").seconds < 0.3


def test_descriptors_go_with_a_request_and_are_closed_after_it(helper: HelperProcess) -> None:
    before = ask(helper, b"descriptors").body
    for _ in range(5):
        ours, theirs = os.pipe()
        os.write(theirs, b"through a pipe")
        assert helper.ask([b"fds"], 5.0, fds=[ours]).body == b"through a pipe"
        os.close(ours)
        os.close(theirs)
    assert ask(helper, b"descriptors").body == before


def test_another_thread_ends_what_it_works_on(helper: HelperProcess) -> None:
    ask(helper, b"")
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(ask(helper, b"spin", 60.0)))
    thread.start()
    while helper.pid is not None and Path(f"/proc/{helper.pid}/stat").read_text().split()[2] != "R":
        time.sleep(0.01)
    helper.cancel()
    thread.join(60)
    assert [reply.outcome for reply in replies] == [Outcome.CANCELLED]
    assert ask(helper, b"x").body == b"hello x"


def test_a_closed_helper_starts_no_process(helper: HelperProcess) -> None:
    ask(helper, b"")
    helper.close()
    with pytest.raises(RuntimeError):
        ask(helper, b"")


def test_a_pool_starts_no_more_helpers_than_are_asked_at_once(helper: HelperProcess) -> None:
    other = HelperProcess("tests.helpers.odd_helper")
    pool = HelperPool([helper, other])
    for _ in range(3):
        assert pool.use(lambda one: ask(one, b"x")).body == b"hello x"
    assert other.pid is None
