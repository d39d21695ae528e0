"""The encoder stage with tiers: what they have is neither decoded nor encoded, and waits for no pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from saccade.runner.embedding_tiers.entry import Namespace
from saccade.runner.embedding_tiers.host import HostTier
from saccade.runner.embedding_tiers.tiers import EmbeddingTiers
from saccade.runner.encoder.encoder_runner import EncoderResults, LocalEncoder
from saccade.types.media import MediaItem
from tests.helpers.engine.tiers import CPU, FREE, SLOW, MemoryStore, be_patient
from tests.helpers.fakes.fake_tower import FakeTower, picture


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def tower() -> FakeTower:
    return FakeTower()


def stage(tower: FakeTower, store: MemoryStore, max_patches: int = 32) -> LocalEncoder:
    tiers = EmbeddingTiers(HostTier(1 << 16, CPU, page_bytes=64), store, Namespace(1, "float32", b"w"))
    tiers.open(SLOW, FREE, FREE)
    return LocalEncoder(tower, max_patches, threads=2, tiers=tiers)  # type: ignore[arg-type]


@pytest.fixture
def encoder(tower: FakeTower, store: MemoryStore) -> Iterator[LocalEncoder]:
    made = stage(tower, store)
    yield made
    made.close()
    assert made.tiers is not None
    made.tiers.host.check()


def encoded(encoder: LocalEncoder, *items: MediaItem) -> EncoderResults:
    encoder.submit(items)
    encoder.advance(None)
    return encoder.poll()


def wait_for(encoder: LocalEncoder, key: bytes) -> None:
    encoder._stage._begun[key].future.result(20)


def test_an_image_that_comes_again_is_neither_decoded_nor_encoded(encoder: LocalEncoder, tower: FakeTower) -> None:
    first = encoded(encoder, picture("a"), picture("b", value=9))
    again = encoded(encoder, picture("a"), picture("b", value=9))
    assert again.restored == {b"a", b"b"} and not first.restored
    assert all(torch.equal(first.embeddings[key], again.embeddings[key]) for key in (b"a", b"b"))
    assert set(again.times) == {b"a", b"b"} and again.times[b"a"] == (0.0, 0.0)
    assert encoder.counters.decoded == encoder.counters.encoded == encoder.counters.restored == 2
    assert tower.passes == [[16, 16]]


def test_a_new_process_finds_what_an_earlier_one_wrote(tower: FakeTower, store: MemoryStore) -> None:
    before = stage(FakeTower(), store)
    first = encoded(before, picture("a"))
    before.close()
    after = stage(tower, store)
    again = encoded(after, picture("a"), picture("new"))
    assert again.restored == {b"a"} and torch.equal(first.embeddings[b"a"], again.embeddings[b"a"])
    assert tower.passes == [[16]]
    after.close()


def test_a_restored_image_does_not_wait_for_the_pass_that_runs(encoder: LocalEncoder) -> None:
    encoded(encoder, picture("a"))
    encoder.submit([picture("slow")])
    wait_for(encoder, b"slow")
    encoder.advance(1)  # its pass has begun
    encoder.submit([picture("a")])
    wait_for(encoder, b"a")
    encoder.advance(0)
    assert list(encoder.poll().embeddings) == [b"a"]
    encoder.advance(None)
    assert list(encoder.poll().embeddings) == [b"slow"]


def test_a_slice_does_not_wait_for_a_store(encoder: LocalEncoder, store: MemoryStore) -> None:
    gate = threading.Event()
    store.before_read = gate.wait
    encoder.submit([picture("a")])
    encoder.advance(1, may_wait=False)
    assert not encoder.poll().embeddings and not encoder.is_idle
    gate.set()
    encoder.advance(None)
    assert list(encoder.poll().embeddings) == [b"a"]


def test_a_prefetched_embedding_that_is_not_wanted_is_forgotten(encoder: LocalEncoder) -> None:
    encoded(encoder, picture("a"))
    encoder.prefetch([picture("a")])
    wait_for(encoder, b"a")
    encoder.prefetch([])
    assert not encoder._stage._begun and not encoder.poll().embeddings


def test_a_store_that_fails_means_encoding(encoder: LocalEncoder, store: MemoryStore) -> None:
    store.fails = True
    done = encoded(encoder, picture("a"), picture("b"))
    assert set(done.embeddings) == {b"a", b"b"} and not done.restored and not done.errors


def test_what_fails_is_not_kept(encoder: LocalEncoder, tower: FakeTower, store: MemoryStore) -> None:
    tower.break_on = {16}
    assert set(encoded(encoder, picture("a")).errors) == {b"a"}
    assert encoder.tiers is not None
    encoder.tiers.flush()
    assert not store.entries and not len(encoder.tiers.host)


def test_without_tiers_nothing_is_counted(tower: FakeTower) -> None:
    encoder = LocalEncoder(tower, 32, threads=1)  # type: ignore[arg-type]
    assert encoder.tier_stats() == {} and not encoded(encoder, picture("a")).restored
