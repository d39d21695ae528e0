"""When a tier is cheaper than encoding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from saccade.runner.embedding_tiers.rates import EmbeddingTime, best_of, verdict
from tests.helpers.engine.tiers import FREE, SLOW, MemoryStore, embedding, item, joined, open_tiers

SECONDS = st.floats(0, 10)


@given(SECONDS, SECONDS, st.integers(1, 100), st.integers(101, 10_000))
def test_a_line_goes_through_its_points_unless_it_would_fall(low: float, high: float, small: int, large: int) -> None:
    rate = EmbeddingTime.through([(small, low), (large, high)])
    assert rate.fixed >= 0 and rate.per_slot >= 0
    if low <= high and low - (high - low) / (large - small) * small >= 0:
        assert abs(rate.seconds(large) - high) < 1e-6 and abs(rate.seconds(small) - low) < 1e-6


def test_one_size_gives_a_line_through_nothing() -> None:
    assert EmbeddingTime.through([(10, 2.0), (10, 2.0)]).seconds(5) == 1.0


def test_a_tier_that_is_slower_for_small_images_is_used_for_large_ones_only() -> None:
    with open_tiers(is_open=False) as tiers:
        tiers.open(encode=EmbeddingTime(0.0, 1.0), host=EmbeddingTime(5.0, 0.1))
        small, large = item(5), item(6)
        tiers.put(small, embedding(5), None)
        tiers.put(large, embedding(6), None)
        assert tiers.load(small, joined) is None and small.key not in tiers.host
        assert tiers.load(large, joined) is not None


def test_a_store_that_is_slower_than_encoding_is_neither_read_nor_written() -> None:
    store = MemoryStore()
    with open_tiers(store, is_open=False) as tiers:
        tiers.open(encode=SLOW, host=FREE, store=EmbeddingTime(2.0, 0.0))
        wanted = item()
        tiers.put(wanted, embedding(), None)
        tiers.flush()
        assert not store.entries
        assert tiers.load(wanted, joined) is not None  # host memory pays
        tiers.load(item(), joined)
        assert tiers.stats()["fake"]["misses"] == 0


def test_tiers_that_were_not_measured_keep_nothing() -> None:
    with open_tiers(MemoryStore(), is_open=False) as tiers:
        wanted = item()
        tiers.put(wanted, embedding(), None)
        assert tiers.load(wanted, joined) is None and not len(tiers.host)


def test_the_log_says_which_and_why() -> None:
    used = verdict("a folder", EmbeddingTime(0.001, 0.0), EmbeddingTime(0.0, 0.001), 100)
    assert "used from 16 embeddings" in used and "1.00 ms" in used and "100.00 ms" in used
    assert "not used" in verdict("a folder", EmbeddingTime(0.2, 0.0), EmbeddingTime(0.0, 0.001), 100)


def test_the_best_lap_counts_and_what_comes_before_does_not() -> None:
    calls = []
    best_of(lambda: calls.append("run"), before=lambda: calls.append("before"))
    assert calls == ["before", "run"] * 3
