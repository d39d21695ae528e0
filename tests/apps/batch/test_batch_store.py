"""The folder of files and batches: owners are apart, limits hold, and a restart finds what was there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade.apps.batch import batch_store
from saccade.apps.batch.batch_records import FileRecord
from saccade.apps.batch.batch_store import BatchStore
from saccade.errors import ConfigError, RequestError
from tests.helpers.servers.full_disk import full_disk

CHAT = "/v1/chat/completions"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    store = BatchStore(tmp_path, 100, 1000)
    yield store
    store.check_conservation()
    store.close()


def saved(store: BatchStore, data: bytes = b"{}\n", owner: str = "a", name: str = "in.jsonl") -> FileRecord:
    with store.draft(owner) as draft:
        draft.write(data)
        return draft.save(name, "batch")


def test_a_file_of_another_owner_does_not_exist(store: BatchStore) -> None:
    record = saved(store, b"mine")
    assert store.file("a", record.id) is record and store.data(record.id).read_bytes() == b"mine"
    for act in (store.file, store.delete_file):
        with pytest.raises(RequestError, match="there is no file") as error:
            act("b", record.id)
        assert error.value.code == "file_not_found"
    with pytest.raises(RequestError, match="there is no file"):
        store.create_batch("b", CHAT, record.id, None)
    assert store.files("b") == [] and store.files("a") == [record]


def test_a_batch_of_another_owner_does_not_exist(store: BatchStore) -> None:
    batch = store.create_batch("a", CHAT, saved(store).id, None)
    assert store.batch("a", batch.id) is batch and store.batches("b") == []
    with pytest.raises(RequestError, match="there is no batch"):
        store.batch("b", batch.id)


def test_no_name_of_a_client_is_in_a_path(store: BatchStore, tmp_path: Path) -> None:
    record = saved(store, name="../../escape\n\0.jsonl", owner="../b")
    assert record.filename == "../../escape.jsonl"
    assert not [path for path in tmp_path.rglob("*") if "escape" in path.name or path.name.startswith("..")]
    assert store.data(record.id).stat().st_mode & 0o077 == 0


def test_an_owner_has_a_limit_of_bytes_and_files_being_written_count(store: BatchStore) -> None:
    saved(store, b"x" * 40)
    with store.draft("a") as draft:
        draft.write(b"x" * 50)
        with pytest.raises(RequestError, match="have 90 bytes, 11 would be added and 100 may be") as error:
            saved(store, b"x" * 11)
        assert error.value.code == "storage_full"
        saved(store, b"x" * 100, owner="b")
    saved(store, b"x" * 60)


def test_all_owners_together_have_a_limit_of_bytes_and_of_files(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy may name any number of owners."""
    for number in range(10):
        saved(store, b"x" * 100, owner=f"name-{number}")
    with pytest.raises(RequestError, match=r"all clients have 1000 bytes, 1 would .* \(--batch-dir-mb\)") as error:
        saved(store, b"x", owner="another")
    assert error.value.code == "storage_full"
    store.delete_file("name-0", store.files("name-0")[0].id)
    saved(store, b"x", owner="another")
    monkeypatch.setattr(batch_store, "MAX_ALL_FILES", 10)
    with pytest.raises(RequestError, match="this server has 10 files"):
        saved(store, b"", owner="third")


def test_results_that_are_being_made_count(store: BatchStore) -> None:
    batch = store.create_batch("a", CHAT, saved(store, b"x" * 50).id, None)
    store.results(batch).write_bytes(b"y" * 40)
    store.check_results(batch)
    store.check_conservation()
    with pytest.raises(RequestError, match="have 90 bytes"):
        saved(store, b"x" * 11)
    store.results(batch).write_bytes(b'{"error": null}\n' * 4)
    with pytest.raises(RequestError, match="have 114 bytes"):
        store.check_results(batch)


def test_a_full_disk_leaves_nothing_half_written(store: BatchStore, tmp_path: Path) -> None:
    kept = saved(store, b"x" * 90, owner="b")
    before = sorted(tmp_path.rglob("*"))
    with full_disk(50):  # a record has more
        for data in (b"x" * 60, b"x"):
            with pytest.raises(OSError, match="File too large"):
                saved(store, data)
        with pytest.raises(OSError, match="File too large"):
            store.create_batch("b", CHAT, kept.id, None)
    assert sorted(tmp_path.rglob("*")) == before and store.files("a") == [] and store.batches("b") == []
    saved(store, b"x" * 100)


@pytest.mark.parametrize(
    ("lines", "room", "status"), [(200, 1000, "failed"), (5, 150, "failed"), (5, 300, "completed")]
)
def test_a_batch_stops_at_a_full_disk_and_the_next_start_goes_on(
    lines: int, room: int, status: str, tmp_path: Path
) -> None:
    """At its output, at the record of that, and at its own record, which is the last."""
    before = BatchStore(tmp_path, 10_000, 10_000)
    batch = before.create_batch("a", CHAT, saved(before).id, None)
    before.move(batch, "in_progress")
    results = b'{"id": "1", "error": null}\n' * lines
    before.results(batch).write_bytes(results)
    before.check_results(batch)
    with full_disk(room):
        before.finish(batch, "completed")
    assert batch.status == status and (status == "completed" or "its results so far are kept" in str(batch.error))
    assert bool(batch.view()["output_file_id"]) == (len(before.files("a")) == 2) == (status == "completed")
    before.check_conservation()
    before.close()
    after = BatchStore(tmp_path, 10_000, 10_000)
    (again,) = after.unfinished()
    assert again.status == "in_progress" and after.results(again).read_bytes() == results
    after.finish(again, "completed")
    assert after.data(str(again.output_file_id)).read_bytes() == results and not after.results(again).exists()
    after.check_conservation()
    after.close()


def test_a_status_that_cannot_be_written_is_still_told(store: BatchStore) -> None:
    batch = store.create_batch("a", CHAT, saved(store).id, None)
    with full_disk(50):
        store.finish(batch, "cancelled")
    assert store.batch("a", batch.id).status == "cancelled"


def test_an_owner_has_a_limit_of_files(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "MAX_FILES", 1)
    saved(store)
    with pytest.raises(RequestError, match="you have 1 files"):
        saved(store)


def test_the_oldest_finished_batch_makes_place(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "MAX_BATCHES", 1)
    file = saved(store)
    first = store.create_batch("a", CHAT, file.id, None)
    with pytest.raises(RequestError, match="1 of your batches are unfinished"):
        store.create_batch("a", CHAT, file.id, None)
    store.finish(first, "completed")
    second = store.create_batch("a", CHAT, file.id, None)
    assert store.batches("a") == [second]
    monkeypatch.setattr(batch_store, "MAX_ALL_BATCHES", 1)
    other = saved(store, owner="b")
    with pytest.raises(RequestError, match="1 of all clients' batches are unfinished"):
        store.create_batch("b", CHAT, other.id, None)
    store.finish(second, "completed")
    assert store.batches("b") == [] and store.create_batch("b", CHAT, other.id, None) and store.batches("a") == []


def test_the_input_of_an_unfinished_batch_is_not_deleted(store: BatchStore) -> None:
    file = saved(store)
    batch = store.create_batch("a", CHAT, file.id, None)
    with pytest.raises(RequestError, match="cancel that first"):
        store.delete_file("a", file.id)
    store.finish(batch, "cancelled")
    store.delete_file("a", file.id)
    assert store.files("a") == [] and not store.data(file.id).exists()


def test_a_restart_finds_all_records_and_removes_what_was_not_saved(tmp_path: Path) -> None:
    before = BatchStore(tmp_path, 100, 1000)
    file = saved(before)
    batch = before.create_batch("a", CHAT, file.id, {"k": "v"})
    before.move(batch, "in_progress")
    before.finish(done := before.create_batch("a", CHAT, file.id, None), "completed")
    before.close()
    (tmp_path / "files" / "file-lost.data").write_bytes(b"x")
    (tmp_path / "files" / f"{file.id}.partial").write_bytes(b"x")
    for name in ("batch_lost.jsonl", f"{done.id}.jsonl", f"{batch.id}.new"):
        (tmp_path / "batches" / name).write_bytes(b"x")
    after = BatchStore(tmp_path, 100, 1000)
    assert after.files("a") == [file] and after.unfinished() == [batch]
    assert after.batch("a", done.id).status == "completed"
    assert {path.name for path in (tmp_path / "files").iterdir()} == {f"{file.id}.json", f"{file.id}.data"}
    assert {path.name for path in (tmp_path / "batches").iterdir()} == {f"{batch.id}.json", f"{done.id}.json"}
    after.close()


def test_two_servers_do_not_share_a_folder(store: BatchStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another server"):
        BatchStore(tmp_path, 100, 1000)


def test_a_pipe_in_the_place_of_the_lock_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(ConfigError, match="cannot be used: No such device"):
        BatchStore(tmp_path, 100, 1000)


def test_results_become_two_files_and_a_second_try_replaces_them(store: BatchStore) -> None:
    batch = store.create_batch("a", CHAT, saved(store).id, None)
    lines = (b'{"id": "1", "error": null}\n', b'{"id": "2", "error": {}}\n', b'{"cut')
    for _ in range(2):
        batch.status = "finalizing"
        store.results(batch).write_bytes(b"".join(lines))
        store.finish(batch, "completed")
    assert batch.output_file_id and store.data(batch.output_file_id).read_bytes() == lines[0]
    assert batch.error_file_id and store.data(batch.error_file_id).read_bytes() == lines[1]
    assert len(store.files("a")) == 3 and not store.results(batch).exists()
    batch.status = "finalizing"
    store.results(batch).write_bytes(lines[0])
    with full_disk(150):  # the output has place, and its record none
        store.finish(batch, "completed")
    assert batch.status == "failed" and not store.data(f"file-{batch.id[6:]}-output").exists()
    assert len(store.files("a")) == 2


def test_a_finished_batch_changes_no_more(store: BatchStore) -> None:
    batch = store.create_batch("a", CHAT, saved(store).id, None)
    store.finish(batch, "completed")
    store.move(batch, "cancelling")
    assert batch.status == "completed" and batch.view()["completed_at"] and not batch.view()["cancelling_at"]
