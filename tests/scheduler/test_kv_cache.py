"""The block pool: paged KV accounting and the prefix cache."""

from __future__ import annotations

import hashlib
from random import Random

import pytest

from saccade.scheduler.block_hashes import BlockHashes, text_records
from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.kv_host_cache import HostCache
from tests.helpers.engine.scheduling import BLOCK, FakeImage, Part, make_prompt


def chain_of(*parts: Part, salt: bytes = b"", generated: list[int] | None = None) -> BlockHashes:
    prompt = make_prompt(parts, salt)
    return BlockHashes(prompt.identity, salt, BLOCK, generated or [])


def filled(pool: BlockPool, chain: BlockHashes, count: int) -> list[int]:
    """Blocks of a request that computed `count` whole blocks."""
    blocks = list(pool.allocate(count))
    pool.cache_blocks(blocks, chain, 0)
    return blocks


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_blocks=8, block_size=BLOCK, enable_caching=True, host=HostCache(0))


def test_free_idle_and_used_blocks_add_up_to_all(pool: BlockPool) -> None:
    pool.release(filled(pool, chain_of(8), 2))
    pool.allocate(1)
    stats = pool.stats()
    assert (stats["used"], stats["idle"], stats["free"], stats["total"]) == (1, 2, 5, 8)
    pool.check()


def test_a_digest_covers_its_block_and_everything_before_it() -> None:
    chain = chain_of(8)
    root = hashlib.sha256(b"").digest()
    first = hashlib.sha256(root + chain.records(0)).digest()
    assert chain.digest(1) == hashlib.sha256(first + chain.records(1)).digest()


def test_generated_tokens_are_hashed_like_the_same_tokens_in_a_prompt() -> None:
    generated = [7, 8, 9, 10, 11]
    answered = chain_of([1, 2, 3], generated=generated)
    asked = chain_of([1, 2, 3, 7, 8, 9, 10, 11])
    assert [answered.digest(i) for i in (0, 1)] == [asked.digest(i) for i in (0, 1)]


def test_a_text_record_has_no_content_key_and_ends_in_the_token_id() -> None:
    assert text_records([5]) == bytes(32) + (5).to_bytes(8, "little")


def test_an_equal_beginning_is_found_again(pool: BlockPool) -> None:
    blocks = filled(pool, chain_of(8), 2)
    assert pool.find(chain_of(12), num_tokens=12) == blocks


def test_a_request_that_needs_every_row_finds_nothing_and_others_find_its_blocks(pool: BlockPool) -> None:
    prompt = make_prompt((12,), b"")
    whole = BlockHashes(prompt.identity, b"", BLOCK, [], may_find=False)
    blocks = filled(pool, chain_of(12), 2)
    assert pool.find(whole, num_tokens=12) == [] and not pool.has_prefix(whole, 4, 12)
    assert pool.find_prefix(whole, num_tokens=12, first=1).num_blocks == 0
    assert pool.find(chain_of(12), num_tokens=12) == blocks


def test_the_search_ends_at_the_first_block_that_differs(pool: BlockPool) -> None:
    blocks = filled(pool, chain_of([1, 2, 3, 4, 5, 6, 7, 8]), 2)
    assert pool.find(chain_of([1, 2, 3, 4, 0, 6, 7, 8, 9]), num_tokens=9) == blocks[:1]


def test_the_last_token_is_never_found_so_that_one_is_computed(pool: BlockPool) -> None:
    blocks = filled(pool, chain_of(8), 2)
    assert pool.find(chain_of(8), num_tokens=8) == blocks[:1]


def test_a_block_is_found_before_and_after_its_user_lets_go(pool: BlockPool) -> None:
    blocks = filled(pool, chain_of(4), 1)
    assert pool.find(chain_of(5), num_tokens=5) == blocks
    pool.release(blocks)
    assert pool.find(chain_of(5), num_tokens=5) == blocks


def test_two_images_of_equal_size_never_share_a_block(pool: BlockPool) -> None:
    filled(pool, chain_of(FakeImage("cat", 8)), 2)
    assert pool.find(chain_of(FakeImage("dog", 8), 1), num_tokens=9) == []


def test_the_same_image_shifted_by_one_position_shares_no_block(pool: BlockPool) -> None:
    filled(pool, chain_of([1, 2, 3, 4], FakeImage("cat", 8)), 3)
    assert len(pool.find(chain_of([1, 2, 3, 4, 5], FakeImage("cat", 8)), num_tokens=13)) == 1


def test_a_salt_separates_tenants(pool: BlockPool) -> None:
    filled(pool, chain_of(8, salt=b"one"), 2)
    assert pool.find(chain_of(9, salt=b"two"), num_tokens=9) == []


def test_a_hit_needs_equal_records_and_not_only_an_equal_digest(pool: BlockPool) -> None:
    filled(pool, chain_of([1, 2, 3, 4]), 1)
    forged = chain_of([5, 6, 7, 8, 9])
    forged._digests = [b"", chain_of([1, 2, 3, 4]).digest(0)]
    assert pool.find(forged, num_tokens=5) == []


def test_without_caching_nothing_is_found_and_nothing_stays_idle() -> None:
    pool = BlockPool(8, BLOCK, enable_caching=False, host=HostCache(0))
    pool.release(filled(pool, chain_of(8), 2))
    assert pool.find(chain_of(9), num_tokens=9) == []
    assert pool.stats()["free"] == 8


def test_a_shared_block_is_given_back_when_its_last_user_leaves(pool: BlockPool) -> None:
    blocks = filled(pool, chain_of(8), 2)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.stats()["used"] == 2
    pool.release(blocks)
    assert pool.stats()["used"] == 0
    pool.check()


def test_sharing_takes_an_idle_block_back(pool: BlockPool) -> None:
    blocks = filled(pool, chain_of(8), 2)
    pool.release(blocks)
    pool.share(blocks)
    assert pool.stats()["idle"] == 0
    assert pool.num_available == 6


def test_room_beside_found_idle_blocks_does_not_count_them_twice(pool: BlockPool) -> None:
    blocks = filled(pool, chain_of(8), 2)
    pool.release(blocks)
    assert pool.can_allocate(6, shared=blocks)
    assert not pool.can_allocate(7, shared=blocks)


def test_free_blocks_are_given_out_before_idle_ones(pool: BlockPool) -> None:
    blocks = filled(pool, chain_of(8), 2)
    pool.release(blocks)
    assert not set(pool.allocate(6)) & set(blocks)
    assert pool.stats()["evictions"] == 0


def test_the_longest_unused_request_is_evicted_first(pool: BlockPool) -> None:
    old, new = chain_of([1] * 16), chain_of([2] * 16)
    first, second = filled(pool, old, 4), filled(pool, new, 4)
    pool.release(first)
    pool.release(second)
    assert set(pool.allocate(4)) == set(first)
    assert len(pool.find(new, num_tokens=17)) == 4


def test_of_one_request_the_tail_is_evicted_before_the_head(pool: BlockPool) -> None:
    chain = chain_of(32)
    blocks = filled(pool, chain, 8)
    pool.release(blocks)
    assert list(pool.allocate(3)) == blocks[:4:-1]
    assert pool.find(chain, num_tokens=33) == blocks[:5]
    assert pool.stats()["evictions"] == 3


def test_of_two_equal_blocks_the_second_is_not_kept(pool: BlockPool) -> None:
    first = filled(pool, chain_of(4), 1)
    second = filled(pool, chain_of(4), 1)
    pool.release(second)
    assert pool.find(chain_of(5), num_tokens=5) == first
    assert pool.stats()["idle"] == 0
    pool.check()


def test_an_uncached_block_is_not_found_and_becomes_free(pool: BlockPool) -> None:
    blocks = filled(pool, chain_of(8), 2)
    pool.evict(blocks[1])
    pool.release(blocks)
    assert pool.find(chain_of(9), num_tokens=9) == blocks[:1]
    assert (pool.stats()["idle"], pool.stats()["free"]) == (1, 7)
    pool.evict(blocks[0])
    assert pool.stats()["free"] == 8
    pool.check()


def test_after_a_reset_nothing_is_found(pool: BlockPool) -> None:
    pool.release(filled(pool, chain_of(8), 2))
    pool.reset()
    assert pool.find(chain_of(9), num_tokens=9) == []
    assert pool.stats()["free"] == 8
    pool.check()


def test_covering_is_judged_by_the_block_of_the_last_position(pool: BlockPool) -> None:
    chain = chain_of(12)
    filled(pool, chain, 2)
    assert pool.has_prefix(chain, end=8, num_tokens=12)
    assert not pool.has_prefix(chain, end=9, num_tokens=12)
    assert not pool.has_prefix(chain, end=8, num_tokens=8), "the last token must be computed"


def test_lookups_are_counted_in_tokens(pool: BlockPool) -> None:
    pool.count_lookup(12, 8)
    pool.count_lookup(5, 0)
    assert (pool.stats()["queries"], pool.stats()["hits"]) == (17, 8)


def test_a_prompt_that_misses_early_is_not_hashed_to_its_end(pool: BlockPool) -> None:
    chain = chain_of(400)
    pool.find(chain, num_tokens=400)
    assert len(chain._digests) == 2, "the root and the block that was not found"


def test_what_was_published_last_is_found_by_its_records_without_hashing(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, chain = filled(pool, chain_of(12), 3), chain_of(13)
    pool.prefixes.enter_all()
    monkeypatch.setattr(chain, "content", None)  # what hashes
    assert pool.find(chain, num_tokens=13) == blocks


def test_of_what_is_published_only_the_first_block_is_hashed_until_there_is_time(pool: BlockPool) -> None:
    chain = chain_of(32)
    filled(pool, chain, 8)
    assert chain.num_known == 1
    pool.prefixes.enter_all()
    assert chain.num_known == 8


def test_looking_for_something_else_hashes_nothing_of_what_was_published(pool: BlockPool) -> None:
    chain = chain_of(12)
    filled(pool, chain, 3)
    assert pool.find(chain_of([1, 2, 3, 4, 5]), num_tokens=5) == []
    assert not pool.has_prefix(chain_of([5, 6, 7, 8, 9]), end=4, num_tokens=5)
    assert chain.num_known == 1


def test_a_look_ahead_hashes_no_more_of_a_prompt_than_up_to_the_first_block_that_is_missing(pool: BlockPool) -> None:
    filled(pool, chain_of([1, 2, 3, 4]), 1)
    chain = chain_of([1, 2, 3, 4], 16)
    assert not pool.has_prefix(chain, end=16, num_tokens=20)
    assert chain.num_known == 2


def test_a_prompt_that_is_looked_for_again_finds_what_came_since_and_not_what_went(pool: BlockPool) -> None:
    chain = chain_of(13)
    assert pool.find(chain, num_tokens=13) == []
    blocks = filled(pool, chain_of(8), 2)
    assert pool.find(chain, num_tokens=13) == blocks
    more = filled(pool, chain_of(12), 3)[2:]
    assert pool.find(chain, num_tokens=13) == blocks + more
    pool.evict(blocks[1])
    assert pool.find(chain, num_tokens=13) == blocks[:1]


def test_what_was_found_already_is_not_compared_again(pool: BlockPool, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, chain = filled(pool, chain_of(12), 3), chain_of(13)
    pool.find(chain, num_tokens=13)
    monkeypatch.setattr(chain, "_identity", b"")
    assert pool.find(chain, num_tokens=13) == blocks


def admitted(pool: BlockPool, tokens: list[int], windows: int) -> tuple[int, list[int]]:
    """How many blocks a prompt found, and all of its blocks, published in so many windows."""
    chain, count = chain_of(tokens), len(tokens) // BLOCK
    found = pool.find(chain, len(tokens))
    pool.share(found)
    table = [*found, *pool.allocate(count - len(found))]
    step = -(-(count - len(found)) // windows) or 1
    for first in range(len(found), count, step):
        pool.cache_blocks(table[first : first + step], chain, first)
    return len(found), table


def test_what_is_found_does_not_depend_on_when_it_is_indexed() -> None:
    """Of few different blocks, so that many prompts begin alike and then go on differently."""
    rng, at_once, later = Random(0), *(BlockPool(256, BLOCK, True, HostCache(0)) for _ in range(2))
    held: list[tuple[list[int], list[int]]] = []
    for _ in range(300):
        tokens = [token for _ in range(rng.randrange(1, 8)) for token in BLOCK * [rng.randrange(2)]]
        windows = rng.randrange(1, 4)
        (found, table), (found_later, table_later) = (admitted(pool, tokens, windows) for pool in (at_once, later))
        assert found == found_later
        at_once.prefixes.enter_all()
        held.append((table, table_later))
        if len(held) > 16:
            for pool, blocks in zip((at_once, later), held.pop(rng.randrange(16)), strict=True):
                pool.release(blocks)
        at_once.check()
        later.check()


def test_digests_that_were_taken_over_are_those_that_hashing_gives(pool: BlockPool) -> None:
    filled(pool, chain_of(12), 3)
    chain, hashed = chain_of(17), chain_of(17)
    pool.find(chain, num_tokens=17)
    assert [chain.digest(i) for i in range(4)] == [hashed.digest(i) for i in range(4)]


def test_of_several_continuations_each_is_found(pool: BlockPool) -> None:
    prompts = [[1, 2, 3, 4, last, 6, 7, 8, 9] for last in (10, 20, 30)]
    (head,) = filled(pool, chain_of(prompts[0]), 1)
    tails = []
    for prompt in prompts:
        (tail,) = pool.allocate(1)
        pool.cache_blocks([tail], chain_of(prompt), 1)
        tails.append(tail)
    assert [pool.find(chain_of(prompt), num_tokens=9) for prompt in prompts] == [[head, tail] for tail in tails]


def test_when_the_last_continuation_is_gone_an_older_one_is_still_found(pool: BlockPool) -> None:
    old, new = chain_of([1, 2, 3, 4, 5, 6, 7, 8, 9]), chain_of([1, 2, 3, 4, 0, 6, 7, 8, 9])
    blocks, (other,) = filled(pool, old, 2), pool.allocate(1)
    pool.cache_blocks([other], new, 1)
    pool.evict(other)
    assert pool.find(chain_of([1, 2, 3, 4, 5, 6, 7, 8, 9]), num_tokens=9) == blocks
    pool.check()
