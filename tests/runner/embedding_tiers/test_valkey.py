"""A real Valkey or Redis server as a store."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import torch

from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.runner.embedding_tiers.store import StoreError
from saccade.runner.embedding_tiers.valkey import ValkeyStore
from tests.helpers.engine.tiers import be_patient, embedding, item, joined, open_tiers
from tests.helpers.servers.valkey import PASSWORD, RunningValkey, running_valkey

DAY = 86400.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningValkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture
def server(started: RunningValkey) -> RunningValkey:
    started.client.flushall()
    return started


def test_another_process_finds_an_embedding_and_its_expiry_moves(server: RunningValkey) -> None:
    wanted = item()
    with open_tiers(ValkeyStore(server.url, DAY)) as tiers:
        tiers.put(wanted, embedding(), None)
        tiers.flush()
    (key,) = server.client.keys()
    assert key.startswith(b"saccade:embedding:")
    server.client.expire(key, 10)
    with open_tiers(ValkeyStore(server.url, DAY)) as tiers:
        found = tiers.load(wanted, joined)
        assert found is not None and torch.equal(found.embedding, embedding())
        stats = tiers.stats()["valkey"]
    assert stats["hits"] == 1 and stats["read_bytes"] == len(server.client.get(key))
    assert server.client.ttl(key) > 10


def test_entries_of_another_kind_or_size_are_ignored_and_removed(server: RunningValkey) -> None:
    with open_tiers(ValkeyStore(server.url, DAY)) as tiers:
        wanted = item()
        key = f"saccade:embedding:{tiers.namespace.name(wanted.key)}"
        size = tiers.namespace.form(wanted).size
        server.client.rpush(key, "a", "list")
        assert tiers.load(wanted, joined) is None and not server.client.exists(key)
        for value in (b"short", bytes(size), bytes(size + 1), bytes(1 << 20)):
            server.client.set(key, value)
            assert tiers.load(wanted, joined) is None and not server.client.exists(key)
        assert tiers.stats()["valkey"]["ignored"] == 5 and tiers.stats()["valkey"]["errors"] == 0
        server.client.set("mine", "stays")
        assert tiers.load(wanted, joined) is None and server.client.get("mine") == b"stays"


def test_when_the_server_dies_images_are_encoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_valkey(tmp_path) as server, open_tiers(ValkeyStore(server.url, DAY)) as tiers:
        first, second = item(), item()
        tiers.put(first, embedding(), None)
        tiers.flush()
        server.kill()
        tiers.host.discard(first.key)
        with caplog.at_level(logging.WARNING):
            assert tiers.load(first, joined) is None
            assert tiers.load(second, joined) is None  # without another try
        tiers.put(second, embedding(), None)
        assert tiers.load(second, joined) is not None
        stats = tiers.stats()
    assert stats["valkey"]["errors"] == 1 and stats["host"]["hits"] == 1
    assert len(caplog.records) == 1 and PASSWORD not in caplog.text


def test_a_wrong_password_is_told_without_any_password(server: RunningValkey) -> None:
    store = ValkeyStore(server.url.replace(PASSWORD, "wrong-secret"), DAY)
    with pytest.raises(StoreError) as told:
        store.write("ab" * 32, b"", [])
    assert "AuthenticationError" in str(told.value) and "secret" not in str(told.value)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("valkey://h", redis.Connection),
        ("redis://h:1/2", redis.Connection),
        ("valkeys://u:p@h", redis.SSLConnection),
        ("rediss://h", redis.SSLConnection),
        ("unix:///a/b.sock", redis.UnixDomainSocketConnection),
    ],
)
def test_schemes_with_and_without_tls(url: str, kind: type) -> None:
    assert ValkeyStore(url, DAY)._client.connection_pool.connection_class is kind


def test_a_url_that_cannot_be_read_is_an_error_without_its_password() -> None:
    with pytest.raises(ConfigError) as told:
        ValkeyStore("valkey://user:hunter2@host/0?socket_timeout=never", DAY)
    assert "hunter2" not in str(told.value) and "valkey://host" in str(told.value)


@pytest.mark.parametrize("url", ["hunter2", "http://u:hunter2@h", "hunter2://x", "valkey"])
def test_options_refuse_other_urls_without_repeating_them(url: str) -> None:
    with pytest.raises(ConfigError, match="embedding_store must be a URL with valkey") as told:
        Options(embedding_store=url)
    assert "u:hunter2" not in str(told.value)


def test_options_do_not_show_the_url() -> None:
    assert "hunter2" not in repr(Options(embedding_store="valkey://u:hunter2@h"))


def test_a_folder_and_a_store_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="both given"):
        Options(embedding_store="valkey://u:p@h", embedding_dir="/d")


def test_an_operator_is_told_of_a_server_without_a_limit(server: RunningValkey) -> None:
    store = ValkeyStore(server.url, DAY)
    assert "no maxmemory" in str(store.advice())
    server.client.config_set("maxmemory", "100mb")
    assert "noeviction" in str(store.advice())
    server.client.config_set("maxmemory-policy", "allkeys-lru")
    assert store.advice() is None
    server.client.config_set("maxmemory", "0")
