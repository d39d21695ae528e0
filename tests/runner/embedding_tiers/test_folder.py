"""A folder of embeddings: permissions, limits, damage, and other processes."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from saccade.errors import ConfigError
from saccade.runner.embedding_tiers.entry import EntryForm
from saccade.runner.embedding_tiers.folder import FolderStore
from saccade.runner.embedding_tiers.store import BadEntry, StoreError
from saccade.runner.embedding_tiers.tiers import EmbeddingTiers
from tests.helpers.engine.tiers import be_patient, embedding, item, joined, open_tiers

HOUR = 3600.0
PAYLOAD = 1000


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


def name(number: int) -> str:
    return f"{number:064x}"


def folder_store(folder: Path, max_bytes: int = 1 << 20, **how: int) -> FolderStore:
    return FolderStore(str(folder), max_bytes, max_age=HOUR, **how)


def write(store: FolderStore, number: int, used: float | None = None) -> None:
    store.write(name(number), b"head", [memoryview(bytes([number]) * PAYLOAD)])
    if used is not None:
        os.utime(path_of(store, number), (used, used))


def read(store: FolderStore, number: int, size: int = PAYLOAD) -> bytes | None:
    header, payload = bytearray(4), bytearray(size)
    return bytes(header + payload) if store.read(name(number), header, [memoryview(payload)]) else None


def path_of(store: FolderStore, number: int) -> Path:
    return Path(store.where) / name(number)[:2] / f"{name(number)}.safetensors"


def present(store: FolderStore, count: int) -> set[int]:
    return {number for number in range(count) if path_of(store, number).exists()}


def test_what_was_written_is_read_by_another_process(tmp_path: Path) -> None:
    write(folder_store(tmp_path), 7)
    assert read(folder_store(tmp_path), 7) == b"head" + b"\x07" * PAYLOAD
    assert read(folder_store(tmp_path), 8) is None


def test_a_system_that_takes_no_advice_on_its_page_cache_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise")  # macOS
    write(store := folder_store(tmp_path), 7)
    store.make_cold(name(7))


def test_others_can_neither_list_nor_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = folder_store(tmp_path / "deep" / "er")
        write(store, 1)
    finally:
        os.umask(before)
    made = path_of(store, 1)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (made, made.parent, made.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_a_folder_that_every_user_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"777.*chmod o-w"):
        folder_store(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/inner"):
        folder_store(tmp_path / "file" / "inner")


def test_the_limit_of_bytes_evicts_the_oldest(tmp_path: Path) -> None:
    store = folder_store(tmp_path, max_bytes=10 * (PAYLOAD + 4))
    now = time.time()
    for number in range(12):
        write(store, number, used=now - 100 + number)
        assert store.used_bytes <= 10 * (PAYLOAD + 4)
    kept = present(store, 12)
    assert kept == set(range(min(kept), 12))
    assert store.evictions == 12 - len(kept) >= 2
    assert store.used_bytes == len(kept) * (PAYLOAD + 4)


def test_an_entry_that_was_used_lately_is_not_the_oldest(tmp_path: Path) -> None:
    store = folder_store(tmp_path, max_bytes=4 * (PAYLOAD + 4))
    now = time.time()
    for number in range(4):
        write(store, number, used=now - 1000 + number)
    assert read(store, 0)
    write(store, 4)
    assert 0 in present(store, 5) and 1 not in present(store, 5)


def test_the_limit_of_entries_evicts_too(tmp_path: Path) -> None:
    store = folder_store(tmp_path, max_entries=32)
    for number in range(40):
        write(store, number, used=time.time() - 100 + number)
    assert len(present(store, 40)) <= 32 and 39 in present(store, 40)


def test_entries_that_were_not_used_for_long_go_although_there_is_space(tmp_path: Path) -> None:
    store = folder_store(tmp_path)
    write(store, 1, used=time.time() - HOUR - 10)
    write(store, 2)
    store.tidy()
    assert present(store, 3) == {2}


def test_a_limit_holds_for_what_other_processes_wrote(tmp_path: Path) -> None:
    limit = 20 * (PAYLOAD + 4)
    stores = [folder_store(tmp_path, max_bytes=limit) for _ in range(3)]
    for number in range(90):
        write(stores[number % 3], number)
    total = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert total <= limit + 2 * (limit // 16 + PAYLOAD + 4)  # what the others have written since this one looked


def test_tidying_touches_no_file_of_another_kind(tmp_path: Path) -> None:
    store = folder_store(tmp_path, max_bytes=1)
    own = [
        tmp_path / "photo.safetensors",
        tmp_path / "00" / "notes.safetensors",
        tmp_path / "xy" / f"{name(1)}.safetensors",
    ]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    write(store, 1)
    store.tidy()
    assert all(path.read_text() == "mine" for path in own)
    assert not present(store, 2)


def test_what_a_dead_process_left_half_written_is_removed(tmp_path: Path) -> None:
    store = folder_store(tmp_path)
    write(store, 1)
    old, new = (path_of(store, 1).parent / f".{name(1)}.{pid}.0" for pid in (10, 11))
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (1, 1))
    store.tidy()
    assert not old.exists() and new.exists()


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder_store(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StoreError, match="No space left"):
        write(store, 1)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["link", "pipe", "socket", "folder"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder_store(tmp_path)
    path = path_of(store, 1)
    path.parent.mkdir()
    if kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        monkeypatch.chdir(path.parent)  # the path of a socket is short
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path.name)
    with pytest.raises(BadEntry):
        read(store, 1)


# --- damaged entries, through the tiers ---------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[EmbeddingTiers]:
    with open_tiers(folder_store(tmp_path)) as tiers:
        yield tiers


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    changed = {
        "truncated": data[:-1],
        "empty": b"",
        "oversized": data + b"\0",
        "huge": b"",
        "garbled header": data[:20] + b"x" + data[21:],
        "garbled data": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "foreign": os.urandom(len(data)),
        "pickle": b"\x80\x04\x95" + data[3:],
    }[how]
    path.write_bytes(changed)
    if how == "huge":
        os.truncate(path, 1 << 40)  # sparse


@pytest.mark.parametrize(
    "how",
    ["truncated", "empty", "oversized", "huge", "garbled header", "garbled data", "foreign", "pickle"],
)
def test_a_damaged_entry_is_ignored_and_removed(shared: EmbeddingTiers, tmp_path: Path, how: str) -> None:
    wanted = item()
    shared.put(wanted, embedding(), None)
    shared.flush()
    shared.host.discard(wanted.key)
    (path,) = tmp_path.rglob("*.safetensors")
    damage(path, how)
    assert shared.load(wanted, joined) is None
    assert not path.exists()
    assert shared.stats()["folder"]["ignored"] == 1 and shared.stats()["folder"]["errors"] == 0
    shared.put(wanted, embedding(), None)
    shared.flush()
    shared.host.discard(wanted.key)
    found = shared.load(wanted, joined)
    assert found is not None and torch.equal(found.embedding, embedding())


@pytest.mark.parametrize(
    "other", [EntryForm(4, 16, "float32"), EntryForm(4, 8, "bfloat16"), EntryForm(2, 8, "float32")]
)
def test_an_entry_of_another_shape_or_dtype_is_ignored_and_removed(
    shared: EmbeddingTiers, tmp_path: Path, other: EntryForm
) -> None:
    wanted = item()
    given = shared.namespace.name(wanted.key)
    assert shared.store is not None
    shared.store.write(given, other.header(given, 0), [memoryview(bytes(other.embedding_bytes))])
    assert shared.load(wanted, joined) is None
    assert not list(tmp_path.rglob("*.safetensors")) and shared.stats()["folder"]["ignored"] == 1
