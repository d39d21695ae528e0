"""A folder of files and batches, each of one owner: another owner's do not exist. Sends nothing.

DIR/files/ID.data, ID.json     a file and its record, which is written last: data without one is removed
DIR/batches/ID.json, ID.jsonl  a batch and the results it has so far
DIR/lock                       held while a server uses the folder
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from saccade.batch.batch_file import result_lines
from saccade.batch.batch_records import STOPPABLE, BatchRecord, FileRecord
from saccade.errors import ConfigError, RequestError, quoted

MAX_FILES = 1000  # of one owner
MAX_BATCHES = 1000  # of one owner; the oldest finished one makes place for a new one
WINDOW = "24h"
_WINDOW_SECONDS = 24 * 3600
_MAX_NAME_CHARS = 255

Record = TypeVar("Record", FileRecord, BatchRecord)


class BatchStore:
    """May be called from several threads. Reading takes no lock, so that it never waits for a disk."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`max_bytes`: of all files of one owner, results that are being made included."""
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._drafts: dict[FileDraft, str] = {}  # owners of files that are being written
        try:
            for part in ("files", "batches"):
                (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._guard = (folder / "lock").open("w")
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another server uses the folder of batch_dir={folder}; name another") from None
        except OSError as error:
            raise ConfigError(f"batch_dir={folder} cannot be used: {error.strerror}") from None
        self._folder = folder
        self._files = _load(folder / "files", FileRecord)
        self._batches = _load(folder / "batches", BatchRecord)
        for path in (folder / "files").iterdir():
            is_known = path.stem in self._files and path.suffix in (".json", ".data")
            if not is_known:
                path.unlink()

    def close(self) -> None:
        self._guard.close()

    # --- files ----------------------------------------------------------------------------------------------

    def file(self, owner: str, file_id: str, param: str = "file_id") -> FileRecord:
        record = self._files.get(file_id)
        if record is None or record.owner != owner:
            raise RequestError(f"there is no file {quoted(file_id)}", code="file_not_found", param=param)
        return record

    def files(self, owner: str) -> list[FileRecord]:
        """The newest first."""
        return [record for record in list(self._files.values())[::-1] if record.owner == owner]

    def data(self, file_id: str) -> Path:
        return self._folder / "files" / f"{file_id}.data"

    @contextmanager
    def draft(self, owner: str) -> Iterator[FileDraft]:
        """A file to write into. What is not saved is removed."""
        count = len(self.files(owner)) + list(self._drafts.values()).count(owner)
        if count >= MAX_FILES:
            message = f"you have {count} files and {MAX_FILES} may be; delete some"
            raise RequestError(message, code="storage_full")
        draft = FileDraft(self, owner, f"file-{secrets.token_hex(12)}")
        self._drafts[draft] = owner
        try:
            yield draft
        finally:
            draft.close()
            del self._drafts[draft]

    def check_bytes(self, owner: str, more: int) -> None:
        """RequestError if the owner may not store so many more."""
        held = sum(record.size for record in self.files(owner))
        held += sum(draft.size for draft, of in list(self._drafts.items()) if of == owner)
        if held + more > self._max_bytes:
            limit = f"{self._max_bytes} may be (--batch-storage-mb)"
            message = f"your files have {held} bytes, {more} would be added and {limit}; delete some"
            raise RequestError(message, code="storage_full")

    def add_file(self, record: FileRecord) -> None:
        with self._lock:
            _write(self._folder / "files" / f"{record.id}.json", msgspec.json.encode(record))
            self._files[record.id] = record

    def delete_file(self, owner: str, file_id: str) -> None:
        with self._lock:
            self.file(owner, file_id)
            for batch in self._batches.values():
                if batch.input_file_id == file_id and not batch.is_final:
                    reason = f"{batch.id} reads it and is {batch.status}; cancel that first"
                    message = f"{file_id} cannot be deleted: {reason}"
                    raise RequestError(message, code="file_in_use", param="file_id")
            (self._folder / "files" / f"{file_id}.json").unlink(missing_ok=True)
            self.data(file_id).unlink(missing_ok=True)
            del self._files[file_id]

    # --- batches --------------------------------------------------------------------------------------------

    def batch(self, owner: str, batch_id: str) -> BatchRecord:
        record = self._batches.get(batch_id)
        if record is None or record.owner != owner:
            message = f"there is no batch {quoted(batch_id)}"
            raise RequestError(message, code="batch_not_found", param="batch_id")
        return record

    def batches(self, owner: str) -> list[BatchRecord]:
        """The newest first."""
        return [record for record in list(self._batches.values())[::-1] if record.owner == owner]

    def unfinished(self) -> list[BatchRecord]:
        return [record for record in list(self._batches.values()) if not record.is_final]

    def create_batch(
        self, owner: str, endpoint: str, input_file_id: str, metadata: dict[str, str] | None
    ) -> BatchRecord:
        with self._lock:
            source = self.file(owner, input_file_id, "input_file_id")
            if source.purpose != "batch":
                message = f"input_file_id names a file with the purpose {source.purpose}, not batch"
                raise RequestError(message, param="input_file_id")
            self._make_place(owner)
            now = int(time.time())
            name = f"batch_{secrets.token_hex(12)}"
            record = BatchRecord(
                name, owner, endpoint, input_file_id, WINDOW, now, now + _WINDOW_SECONDS, metadata
            )
            self.save(record)
            self._batches[record.id] = record
            return record

    def _make_place(self, owner: str) -> None:
        own = self.batches(owner)
        if len(own) < MAX_BATCHES:
            return
        finished = [record for record in own if record.is_final]
        if not finished:
            message = f"{len(own)} of your batches are unfinished and {MAX_BATCHES} may be"
            raise RequestError(message, code="overloaded")
        (self._folder / "batches" / f"{finished[-1].id}.json").unlink(missing_ok=True)
        del self._batches[finished[-1].id]

    def results(self, record: BatchRecord) -> Path:
        return self._folder / "batches" / f"{record.id}.jsonl"

    def save(self, record: BatchRecord) -> None:
        with self._lock:
            _write(self._folder / "batches" / f"{record.id}.json", msgspec.json.encode(record))

    def move(self, record: BatchRecord, status: str) -> None:
        """Into another status. One that ends stays as it is."""
        with self._lock:
            if record.is_final or (status == "cancelling" and record.status not in STOPPABLE):
                return
            record.status = status
            record.times = {**record.times, status: int(time.time())}
            self.save(record)

    def finish(self, record: BatchRecord, status: str, error: str | None = None) -> None:
        """Makes files of the results. Under ids of the batch's own: a second try replaces the first's."""
        unique = record.id.removeprefix("batch_")
        results = self.results(record)
        if results.exists():
            record.output_file_id = self._save_results(record, f"file-{unique}-output", has_error=False)
            record.error_file_id = self._save_results(record, f"file-{unique}-error", has_error=True)
        record.error = error
        self.move(record, status)
        results.unlink(missing_ok=True)

    def _save_results(self, record: BatchRecord, file_id: str, *, has_error: bool) -> str | None:
        draft = FileDraft(self, record.owner, file_id, is_limited=False)
        try:
            for line, is_error in result_lines(self.results(record)):
                if is_error == has_error:
                    draft.write(line)
            if not draft.size:
                return None
            return draft.save(f"{record.id}_{'error' if has_error else 'output'}.jsonl", "batch_output").id
        finally:
            draft.close()


class FileDraft:
    """A file that is being written."""

    def __init__(self, store: BatchStore, owner: str, file_id: str, *, is_limited: bool = True) -> None:
        self.size = 0
        self._store = store
        self._owner = owner
        self._id = file_id
        self._is_limited = is_limited
        self._partial = store.data(file_id).with_suffix(".partial")
        self._out: BinaryIO = open(self._partial, "wb", opener=_private)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        if self._is_limited:
            self._store.check_bytes(self._owner, len(data))
        self._out.write(data)
        self.size += len(data)

    def save(self, filename: str, purpose: str) -> FileRecord:
        self._out.flush()
        os.fsync(self._out.fileno())
        os.replace(self._partial, self._store.data(self._id))
        shown = "".join(char for char in filename if char.isprintable())[:_MAX_NAME_CHARS]
        record = FileRecord(self._id, self._owner, shown, purpose, self.size, int(time.time()))
        self._store.add_file(record)
        return record

    def close(self) -> None:
        self._out.close()
        self._partial.unlink(missing_ok=True)


def _load(folder: Path, kind: type[Record]) -> dict[str, Record]:
    """In the order of creation."""
    records = []
    for path in folder.glob("*.json"):
        try:
            records.append(msgspec.json.decode(path.read_bytes(), type=kind))
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"batch_dir: {path} cannot be read ({error}); remove it") from None
    return {
        record.id: record for record in sorted(records, key=lambda record: (record.created_at, record.id))
    }


def _write(path: Path, content: bytes) -> None:
    """A reader sees the old content or the new, also after a crash."""
    partial = path.with_suffix(".new")
    with open(partial, "wb", opener=_private) as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
