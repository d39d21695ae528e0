"""KV blocks in host memory: what is copied there, what comes back, and that no block is lost or mixed up."""

from __future__ import annotations

import random
from typing import Any

import pytest

from saccade.errors import RequestError
from saccade.scheduler.block_hashes import BlockHashes
from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.kv_host_cache import HostCache
from saccade.scheduler.prefix_index import CachedBlock
from saccade.types.step import KVCopy, StepPlan
from tests.helpers.engine.async_scheduling import PACE, AheadRig, add
from tests.helpers.engine.scheduling import BLOCK, FakeImage, Rig, make_prompt, unchecked

PROMPT = 6 * BLOCK + 1


def block_of(block: int, digest: bytes) -> CachedBlock:
    return CachedBlock(block, b"parent", digest, b"")


def small(kind: type[Rig] = Rig, **changes: Any) -> Any:
    """Eight blocks on the device: one conversation, and not the next."""
    return kind(**{"num_blocks": 8, "max_num_seqs": 2, "host_blocks": 40, **changes})


def talk(rig: Rig, name: str, tokens: int = PROMPT, **how: Any) -> list[StepPlan]:
    """A conversation alone; each name has its own text."""
    first = len(rig.plans)
    rig.add(name, tokens, **{"max_tokens": 2, "first_token": 1_000 * ord(name[0]), **how})
    rig.drain()
    return rig.plans[first:]


def computed(plans: list[StepPlan]) -> int:
    return sum(work.end - work.start for plan in plans for work in plan.prefill)


def test_a_conversation_that_left_the_device_comes_back_from_host_memory() -> None:
    rig = small()
    talk(rig, "a")
    talk(rig, "b")
    back = talk(rig, "a2")
    assert computed(back) == 1, "only the last token"
    assert len(back[0].restored) > 0
    assert rig.scheduler.stats()["kv_offload"]["blocks_in"] == len(back[0].restored)
    assert rig.events["a2"][-1].usage.cached_tokens == 6 * BLOCK


def test_without_host_blocks_it_is_computed_again() -> None:
    rig = small(host_blocks=0)
    talk(rig, "a")
    talk(rig, "b")
    assert computed(talk(rig, "a2")) > BLOCK
    assert not any(plan.offloaded or plan.restored for plan in rig.plans)


def test_a_block_that_has_a_copy_is_not_copied_again() -> None:
    rig = small()
    for name in "abab":
        talk(rig, name + str(len(rig.plans)))
    before = rig.scheduler.stats()["kv_offload"]["blocks_out"]
    for name in "abab":
        talk(rig, name + str(len(rig.plans)))
    after = rig.scheduler.stats()["kv_offload"]
    assert after["blocks_out"] == before
    assert after["blocks_in"] > 0


def test_fewer_blocks_than_are_worth_a_copy_are_computed() -> None:
    rig = small(min_restored_blocks=7)
    talk(rig, "a")
    talk(rig, "b")
    assert computed(talk(rig, "a2")) > BLOCK
    assert rig.scheduler.stats()["kv_offload"]["blocks_in"] == 0


def test_a_salt_separates_tenants_in_host_memory_too() -> None:
    rig = small()
    talk(rig, "a", salt=b"one")
    talk(rig, "b", salt=b"one")
    assert computed(talk(rig, "a2", salt=b"two")) == PROMPT
    assert rig.scheduler.stats()["kv_offload"]["blocks_in"] == 0


def test_beside_decodes_a_conversation_comes_back_over_several_steps_and_computes_nothing_meanwhile() -> None:
    rig = small(num_blocks=20, latency=PACE, restore_ms_per_block=0.6)  # 1.5 ms are spare
    talk(rig, "a", 10 * BLOCK + 1)
    talk(rig, "b", 18 * BLOCK)
    rig.add("other", 5, max_tokens=30, first_token=5)
    rig.step()
    rig.add("a2", 10 * BLOCK + 1, max_tokens=2, first_token=97_000)
    first = len(rig.plans)
    while "a2" not in rig.events:
        rig.step()
    plans = rig.plans[first:]
    restoring = [plan for plan in plans if plan.restored]
    assert len(restoring) > 2 and all(len(plan.restored) <= 2 for plan in restoring)
    assert all("other" in rig.windows(plan) for plan in plans)
    assert computed(plans) == 1
    rig.drain()


def test_with_none_decoding_it_comes_back_in_one_step() -> None:
    rig = small(num_blocks=20, latency=PACE, restore_ms_per_block=0.6)
    talk(rig, "a", 10 * BLOCK + 1)
    talk(rig, "b", 18 * BLOCK)
    back = talk(rig, "a2", 10 * BLOCK + 1)
    assert len(back[0].restored) > 2 and "a2" in rig.windows(back[0])


@pytest.mark.parametrize("kind", [Rig, AheadRig])
def test_a_preempted_request_comes_back_with_its_generated_tokens(kind: type[Rig]) -> None:
    rig = small(kind, num_blocks=10)
    for name in "ab":
        rig.add(name, 2 * BLOCK, max_tokens=6 * BLOCK, first_token=1_000 * ord(name), temperature=0)
    rig.drain()
    stats = rig.scheduler.stats()
    assert stats["preemptions"] > 0
    assert stats["kv_offload"]["blocks_in"] > 2, "more than its prompt"
    assert all(rig.finish_of(name) == "length" for name in "ab")


def test_blocks_that_are_evicted_next_are_copied_ahead() -> None:
    rig = small(num_blocks=40, max_model_len=40)  # ten blocks ahead
    for name in "abcdefg":
        talk(rig, name, 6 * BLOCK)
    copied = {copy.block for plan in rig.plans for copy in plan.offloaded}
    last = talk(rig, "h", 7 * BLOCK)
    taken = [block for plan in last for work in plan.windows for block in work.new_blocks]
    assert rig.scheduler.stats()["prefix_cache"]["evictions"] > 0
    assert {copy.block for copy in last[0].offloaded}.isdisjoint(taken), "nothing waits for a copy"
    assert copied


def test_of_a_full_host_memory_the_longest_unused_block_goes() -> None:
    cache = HostCache(2)
    for block, digest in enumerate((b"a", b"b")):
        cache.offload(block_of(block, digest))
    cache.offload(block_of(0, b"a"))  # used again
    cache.drain()
    cache.offload(block_of(2, b"c"))
    assert list(cache.index.by_digest) == [b"a", b"c"]
    assert cache.stats()["evictions"] == 1
    cache.check()


def test_what_the_next_plan_restores_is_not_overwritten_by_what_it_copies_out() -> None:
    cache = HostCache(1)
    cache.offload(block_of(3, b"a"))
    cache.drain()
    cache.pin([b"a"])
    cache.offload(block_of(4, b"b"))  # it cannot be kept
    cache.restore([b"a"], (4,))
    assert cache.drain() == ((), (KVCopy(4, 0),))
    cache.offload(block_of(4, b"b"))
    assert b"a" not in cache.index.by_digest and cache.drain() == ((KVCopy(4, 0),), ())


def test_of_two_copies_to_one_host_block_in_a_plan_the_later_one_is_made() -> None:
    cache = HostCache(1)
    cache.offload(block_of(3, b"a"))
    cache.offload(block_of(4, b"b"))
    assert cache.drain() == ((KVCopy(4, 0),), ())
    assert cache.stats()["blocks_out"] == 1
    cache.check()


def offloaded_pool(tokens: list[int]) -> tuple[BlockPool, HostCache, BlockHashes]:
    """A device with one block, whose text is in host memory alone."""
    host = HostCache(4)
    pool = BlockPool(1, BLOCK, enable_caching=True, host=host)
    hashes = BlockHashes(make_prompt([tokens]).identity, b"", BLOCK, [])
    pool.cache_blocks(pool.allocate(1), hashes, 0)
    pool.release([0])
    pool.release(pool.allocate(1))
    assert pool.drain_copies() == ((KVCopy(0, 0),), ())
    return pool, host, hashes


def test_a_block_that_another_request_takes_in_the_same_plan_is_not_restored() -> None:
    pool, host, hashes = offloaded_pool([1] * 5)
    pool.release(pool.restore(hashes, 0, 1))
    pool.allocate(1)
    pool.check()
    assert pool.drain_copies() == ((), ())
    assert host.stats()["blocks_in"] == 0


def test_a_hit_in_host_memory_needs_equal_records_and_not_only_an_equal_digest() -> None:
    pool, _, own = offloaded_pool([1] * 5)
    other = BlockHashes(make_prompt([[2] * 5]).identity, b"", BLOCK, [])
    assert pool.count_offloaded(own, num_tokens=5, first=0) == 1
    other._digests = [b"", own.digest(0)]
    assert pool.count_offloaded(other, num_tokens=5, first=0) == 0


def test_an_image_in_host_memory_is_neither_encoded_nor_decoded_again() -> None:
    rig = small()
    parts = (FakeImage("cat", 5 * BLOCK), 3)
    rig.add("a", *parts)
    rig.drain()
    talk(rig, "b", 7 * BLOCK)
    rig.scheduler._encoder_cache.reset(untold=[])
    rig.add("a2", *parts)
    assert rig.scheduler.missing("a2") == ()
    first = len(rig.plans)
    rig.drain()
    assert not any(plan.encode or plan.prefetch for plan in rig.plans[first:])


def test_blocks_of_an_image_that_failed_never_go_to_host_memory() -> None:
    rig = small(broken=["bad"])
    rig.add("a", FakeImage("bad", 5 * BLOCK), 3)
    rig.drain()
    talk(rig, "b", 7 * BLOCK)
    talk(rig, "c", 7 * BLOCK)
    assert rig.finish_of("a") == "error"
    rig.add("a2", FakeImage("bad", 5 * BLOCK), 3)
    rig.drain()
    assert rig.finish_of("a2") == "error"


def test_a_broken_step_empties_host_memory() -> None:
    rig = small()
    talk(rig, "a")
    talk(rig, "b")
    rig.add("a2", PROMPT, first_token=97_000)
    assert rig.scheduler.schedule(rig.now).restored, "this plan is lost"
    rig.scheduler.fail_all(RequestError("the step broke"), rig.now)
    rig.runner.reset()
    rig.scheduler.check()
    assert rig.scheduler.stats()["kv_offload"]["used"] == 0
    assert computed(talk(rig, "a3")) == PROMPT


@pytest.mark.parametrize("kind", [Rig, AheadRig])
def test_a_request_may_be_aborted_while_its_blocks_come_back(kind: type[Rig]) -> None:
    rig = small(kind, num_blocks=20, latency=PACE, restore_ms_per_block=0.6)
    talk(rig, "a", 10 * BLOCK + 1, temperature=0)
    talk(rig, "b", 18 * BLOCK, temperature=0)
    add(rig, "other", [5] * 5, max_tokens=30)
    for _ in range(3):
        rig.step()
    rig.add("a2", 10 * BLOCK + 1, first_token=97_000, temperature=0)
    first = len(rig.plans)
    while not any(plan.restored for plan in rig.plans[first:]):
        rig.step()
    assert "a2" not in rig.events
    rig.leave("a2") if isinstance(rig, AheadRig) else rig.take(rig.scheduler.abort("a2", rig.now))
    rig.scheduler.check()
    rig.drain()
    assert computed(talk(rig, "a3", 10 * BLOCK + 1, temperature=0)) == 1


@pytest.mark.parametrize("kind", [Rig, AheadRig])
@pytest.mark.parametrize("host_blocks", [1, 7, 60])
def test_long_streams_of_conversations_through_small_caches_read_their_own_text(
    kind: type[Rig], host_blocks: int
) -> None:
    """The fake runner compares every record that a window reads."""
    rng = random.Random(host_blocks)
    rig = kind(
        num_blocks=24, max_num_seqs=4, host_blocks=host_blocks, max_num_batched_tokens=24, latency=PACE,
        restore_ms_per_block=0.4, max_model_len=60,
    )  # fmt: skip
    for number in range(150):
        salt = rng.choice([b"", b"other"])
        text = [rng.randint(1, 2)] * (rng.randint(1, 6) * BLOCK) + [3] * rng.randint(1, 9)
        rig.add(f"r{number}", text, max_tokens=rng.randint(1, 20), salt=salt, temperature=0)
        if rng.random() < 0.7:
            rig.step()
        if rng.random() < 0.05 and kind is Rig:
            rig.take(rig.scheduler.abort(f"r{rng.randint(0, number)}", rig.now))
    rig.drain()
    stats = rig.scheduler.stats()["kv_offload"]
    assert stats["blocks_out"] > 20
    assert stats["blocks_in"] > 0 or host_blocks == 1
    assert stats["evictions"] > 0 or host_blocks == 60


def test_host_memory_raises_the_share_that_is_found() -> None:
    shares = []
    for host_blocks in (0, 400):
        rng = random.Random(3)
        rig = unchecked(num_blocks=40, host_blocks=host_blocks)
        for number in range(80):
            talk(rig, f"{rng.choice('abcdefghijkl')}{number}", 8 * BLOCK)
        stats = rig.scheduler.stats()["prefix_cache"]
        shares.append(stats["hits"] / stats["queries"])
    assert shares[0] < 0.5 < shares[1]
