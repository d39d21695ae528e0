"""Host memory and a store together: order, deadlines, queues, tenants."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from saccade.media.hashing import salt_of
from saccade.runner.embedding_tiers import tiers as module
from saccade.runner.embedding_tiers.tiers import EmbeddingTiers
from saccade.types.media import Size
from tests.helpers.engine.tiers import FREE, SLOW, MemoryStore, be_patient, embedding, item, joined, open_tiers


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


def test_host_memory_is_asked_before_the_store() -> None:
    store = MemoryStore()
    with open_tiers(store) as tiers:
        wanted = item()
        tiers.put(wanted, embedding(), None)
        tiers.flush()
        assert torch.equal(tiers.load(wanted, joined).embedding, embedding())
        assert tiers.stats()["fake"]["hits"] == 0
        tiers.host.discard(wanted.key)
        assert torch.equal(tiers.load(wanted, joined).embedding, embedding())
        assert tiers.stats()["fake"]["hits"] == 1
        assert wanted.key in tiers.host  # and is there for the next one
        assert tiers.stats()["host"]["hits"] == 1 and tiers.stats()["host"]["misses"] == 1


def test_coordinates_of_a_pruned_frame_group_come_back() -> None:
    store = MemoryStore()
    cells = np.array([[0, 0, 1, 1], [0, 2, 1, 2]])
    with open_tiers(store) as tiers:
        wanted = item(cells=Size(width=3, height=2))
        tiers.put(wanted, embedding(), cells)
        tiers.flush()
        tiers.host.discard(wanted.key)
        assert tiers.load(wanted, joined).coordinates.tolist() == cells.tolist()


def test_an_engine_with_other_weights_finds_nothing() -> None:
    store = MemoryStore()
    wanted = item()
    with open_tiers(store, weights=b"one") as tiers:
        tiers.put(wanted, embedding(), None)
        tiers.flush()
    with open_tiers(store, weights=b"other") as tiers:
        assert tiers.load(wanted, joined) is None
    with open_tiers(store, weights=b"one") as tiers:
        assert tiers.load(wanted, joined) is not None


def test_a_store_that_is_late_is_left_alone_and_host_memory_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmbeddingTiers, "read_seconds", 0.01)
    gate = threading.Event()
    store = MemoryStore()
    now = 0.0
    with open_tiers(store, clock=lambda: now) as tiers:
        wanted = item()
        tiers.put(wanted, embedding(), None)
        tiers.flush()
        tiers.host.discard(wanted.key)
        store.before_read = gate.wait
        assert tiers.load(wanted, joined) is None
        assert tiers.stats()["fake"]["errors"] == 1
        assert tiers.load(item(), joined) is None  # is not even asked
        assert tiers.stats()["fake"]["errors"] == 1
        gate.set()
        now = module.PAUSE_SECONDS + 1
        be_patient(monkeypatch)
        assert tiers.load(wanted, joined) is not None


def test_a_store_that_fails_is_tried_again_later() -> None:
    store = MemoryStore()
    now = 0.0
    with open_tiers(store, clock=lambda: now) as tiers:
        store.fails = True
        tiers.put(item(), embedding(), None)
        tiers.flush()
        assert tiers.stats()["fake"]["errors"] == 1
        store.fails = False
        tiers.put(item(), embedding(), None)
        tiers.flush()
        assert not store.entries
        now = module.PAUSE_SECONDS + 1
        tiers.put(item(), embedding(), None)
        tiers.flush()
        assert len(store.entries) == 1


def test_an_error_of_another_kind_means_encoding_too() -> None:
    store = MemoryStore()

    def broken() -> None:
        raise ValueError("a mistake of ours")

    store.before_read = store.before_write = broken
    with open_tiers(store) as tiers:
        tiers.put(item(), embedding(), None)
        tiers.flush()
        for _ in range(10):  # more than there are threads
            assert tiers.load(item(), joined) is None
        assert tiers.stats()["fake"]["errors"] == 11
        store.before_read = store.before_write = lambda: None
        tiers.put(wanted := item(), embedding(), None)
        tiers.flush()
        tiers.host.discard(wanted.key)
        assert tiers.load(wanted, joined) is not None


def hold_writes(store: MemoryStore) -> tuple[threading.Event, threading.Event]:
    """Writes wait for the first event; the second says that one has begun."""
    gate, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert gate.wait(120)

    store.before_write = hold
    return gate, begun


def test_a_full_queue_drops_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUEUED", 2)
    store = MemoryStore()
    gate, begun = hold_writes(store)
    with open_tiers(store) as tiers:
        tiers.put(item(), embedding(), None)
        assert begun.wait(120)
        for _ in range(5):  # two wait, three do not fit
            tiers.put(item(), embedding(), None)
        assert tiers.stats()["fake"]["dropped"] == 3
        gate.set()
        tiers.flush()
        assert len(store.entries) == 3


def test_what_was_evicted_before_it_could_be_written_is_dropped() -> None:
    store = MemoryStore()
    gate, begun = hold_writes(store)
    with open_tiers(store, host_bytes=4 * 64) as tiers:  # two embeddings
        for _ in range(4):
            tiers.put(item(), embedding(), None)
            assert begun.wait(120)
        gate.set()
        tiers.flush()
        assert len(store.entries) == 2 and tiers.stats()["fake"]["dropped"] == 2
        assert tiers.stats()["host"]["evictions"] == 2


def test_what_is_queued_is_written_before_the_end() -> None:
    store = MemoryStore()
    with open_tiers(store) as tiers:
        for _ in range(20):
            tiers.put(item(), embedding(), None)
    assert len(store.entries) == 20


def test_an_embedding_larger_than_host_memory_is_not_kept() -> None:
    with open_tiers(MemoryStore(), host_bytes=64) as tiers:
        wanted = item()
        tiers.put(wanted, embedding(), None)
        assert tiers.stats()["host"]["dropped"] == 1
        assert tiers.load(wanted, joined) is None
        assert tiers.stats()["host"]["dropped"] == 2  # nor is one read that does not fit


def test_a_device_without_memory_means_encoding() -> None:
    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with open_tiers() as tiers:
        wanted = item()
        tiers.put(wanted, embedding(), None)
        assert tiers.load(wanted, full) is None
        assert tiers.load(wanted, joined) is not None


def test_measuring_counts_for_nothing() -> None:
    with open_tiers() as tiers:
        tiers.load(item(), joined)
        tiers.open(SLOW, FREE)
        assert tiers.stats()["host"]["misses"] == 0


def test_salts_of_two_tenants_make_two_names() -> None:
    """The content key holds the salt; names are made of it."""
    assert salt_of("a", "") != salt_of("b", "")
    with open_tiers() as tiers:
        keys = [salt_of(tenant, "") for tenant in "ab"]  # as long as content keys
        assert tiers.namespace.name(keys[0]) != tiers.namespace.name(keys[1])
