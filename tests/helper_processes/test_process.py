"""A helper process answers, and what ends it costs one request."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade.helpers.main import limit_address_space
from saccade.helpers.process import HelperPool, HelperProcess, Outcome, Reply


@pytest.fixture
def helper() -> Iterator[HelperProcess]:
    helper = HelperProcess("tests.helpers.servers.odd_helper", "hello")
    yield helper
    helper.close()


def ask(helper: HelperProcess, body: bytes, seconds: float = 5.0) -> Reply:
    return helper.ask([body], seconds)


def test_it_answers_with_the_parts_as_one_body_and_is_the_same_process_again(helper: HelperProcess) -> None:
    assert helper.ask([b"a", b"b" * 100_000], 5.0).body == b"hello a" + b"b" * 100_000
    pid = helper.pid
    assert ask(helper, b"").body == b"hello "
    assert ask(helper, b"oom score").body == b"1000\n", "where memory runs out, the kernel ends helpers first"
    assert helper.pid == pid


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (b"spin", Outcome.SLOW),
        (b"die", Outcome.DIED),
        (b"fill", Outcome.MEMORY),
        (b"refuse", Outcome.FAILED),
        (b"kill", Outcome.UNAVAILABLE),
    ],
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
    assert sum(ask(helper, b"x" * 100_000).seconds for _ in range(20)) > 0  # also of what is over before a tick


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
    assert 0 < replies[0].seconds < 60, "what it took, not what it may take"
    assert ask(helper, b"x").body == b"hello x"


def test_what_nobody_wants_any_more_is_not_begun(helper: HelperProcess) -> None:
    reply = helper.ask([b"spin"], 60.0, is_cancelled=lambda: True)
    assert reply == Reply(Outcome.CANCELLED, 0.0) and helper.pid is None
    assert ask(helper, b"x").body == b"hello x"


def test_one_that_was_cancelled_without_work_answers_the_next_request(helper: HelperProcess) -> None:
    for _ in range(5):
        assert ask(helper, b"x").body == b"hello x"
        helper.cancel()


def test_a_closed_helper_has_ended_and_starts_no_process(helper: HelperProcess) -> None:
    ask(helper, b"")
    pid = helper.pid
    helper.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RuntimeError):
        ask(helper, b"")


def test_work_in_python_ends_alone() -> None:
    helper = HelperProcess("tests.helpers.servers.odd_helper", "python")
    pids = set()
    for _ in range(3):
        assert ask(helper, b"spin", 0.1).outcome is Outcome.SLOW
        assert ask(helper, b"x").body == b"python x"
        pids.add(helper.pid)
    assert len(pids) == 1
    helper.close()


def test_what_filled_its_memory_starts_anew(helper: HelperProcess) -> None:
    ask(helper, b"")
    pid = helper.pid
    assert ask(helper, b"fill").outcome is Outcome.MEMORY
    assert ask(helper, b"x").body == b"hello x" and helper.pid != pid


def test_a_reply_is_no_longer_than_it_may_be() -> None:
    helper = HelperProcess("tests.helpers.servers.odd_helper", max_reply=10)
    assert ask(helper, b"x" * 10).body == b"x" * 10
    assert ask(helper, b"x" * 11).outcome is Outcome.DIED
    helper.close()


def test_one_that_stands_still_or_cannot_be_started_is_not_the_requests_fault(
    helper: HelperProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.helpers.process._HUNG_SECONDS", 0.0)
    ask(helper, b"", 60.0)
    os.kill(helper.pid or 0, signal.SIGSTOP)
    assert ask(helper, b"x", 0.1).outcome is Outcome.UNAVAILABLE
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limits[1]))
    try:
        outcome = ask(helper, b"x", 60.0).outcome
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert outcome is Outcome.UNAVAILABLE
    assert ask(helper, b"x", 60.0).body == b"hello x"
    assert ask(helper, b"plod", 0.6).body == b"hello plod", "it does not stand still, it gets little time"


def test_a_limit_of_memory_that_the_system_refuses_ends_no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS does, and Linux beyond the limit that it was started with."""

    def refuse(kind: int, limits: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_AS
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    limit_address_space(1 << 30)


def test_a_pool_starts_no_more_helpers_than_are_asked_at_once(helper: HelperProcess) -> None:
    other = HelperProcess("tests.helpers.servers.odd_helper")
    pool = HelperPool([helper, other])
    for _ in range(3):
        assert pool.use(lambda one: ask(one, b"x")).body == b"hello x"
    assert other.pid is None
