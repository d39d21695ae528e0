"""What the caches tell outsiders: after any workload the sum of all changes is what both caches hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.errors import RequestError
from saccade.scheduler.cache_log import CacheChanges, CacheLog, entry_of
from tests.helpers.engine.random_workloads import BROKEN, CONFIGS, REQUESTS, drive
from tests.helpers.engine.scheduling import FakeImage, Rig, key_of


def applied(held: set[bytes], changes: CacheChanges | None) -> set[bytes]:
    if changes is None:
        return held
    return ((set() if changes.is_reset else held) - set(changes.removed)) | set(changes.added)


def held_by(rig: Rig) -> set[bytes]:
    rig.scheduler.index()
    resident = [key for key in rig.runner.embeddings if rig.scheduler._encoder_cache.is_resident(key)]
    pool = rig.scheduler._kv_cache
    return {entry_of(digest) for digest in (*pool.prefixes.by_digest, *pool.host.index.by_digest, *resident)}


@settings(max_examples=60, deadline=None)
@given(config=CONFIGS, requests=st.lists(REQUESTS, min_size=1, max_size=6), more=st.lists(REQUESTS, max_size=4))
def test_the_sum_of_all_changes_is_what_the_caches_hold(config: dict, requests: list, more: list) -> None:
    rig = Rig(broken=[BROKEN.name], **config)
    log = rig.scheduler.log_caches()
    drive(rig, requests)
    held = held_by(rig)
    assert applied(set(), log.take()) == held
    drive(rig, more)
    after = held_by(rig)
    assert applied(held, log.take()) == after


def test_a_broken_step_takes_all_entries_back() -> None:
    rig = Rig()
    log = rig.scheduler.log_caches()
    rig.add("a", 20, FakeImage("p", 8))
    rig.drain()
    held = applied(set(), log.take())
    assert entry_of(key_of("p")) in held and len(held) > 5
    rig.scheduler.fail_all(RequestError("the step broke"), rig.now)
    assert applied(held, log.take()) == set()


def test_an_engine_alone_logs_nothing() -> None:
    rig = Rig()
    rig.add("a", 20, FakeImage("p", 8))
    rig.drain()
    assert rig.scheduler._kv_cache.log is None and rig.scheduler._encoder_cache.log is None


def test_a_batch_is_bounded_and_an_overflow_resets() -> None:
    log = CacheLog(max_changes=3)
    for number in range(5):
        log.add(bytes([number]) * 32)
    changes = log.take()
    assert changes is not None and changes.is_reset and len(changes.added) == 2
    assert log.take() is None
