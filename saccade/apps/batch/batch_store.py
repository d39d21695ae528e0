"""A folder of files and batches, each of one owner: another owner's do not exist. Sends nothing.

DIR/files/ID.data, ID.json     a file and its record, which is written last: data without one is removed
DIR/batches/ID.json, ID.jsonl  a batch and the results it has so far
DIR/lock                       held while a server uses the folder
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from saccade.apps.batch.batch_file import result_lines
from saccade.apps.batch.batch_records import STOPPABLE, BatchRecord, FileRecord
from saccade.errors import ConfigError, RequestError, quoted
from saccade.util.plain_files import open_plain, read_plain

logger = logging.getLogger("saccade.server")

MAX_FILES = 1000  # of one owner
MAX_BATCHES = 1000  # of one owner; the oldest finished one makes place for a new one
MAX_ALL_FILES = 20_000  # their records are in memory, as those of batches
MAX_ALL_BATCHES = 20_000
WINDOW = "24h"
_WINDOW_SECONDS = 24 * 3600
_MAX_NAME_CHARS = 255
_MAX_RECORD_BYTES = 1 << 20

Record = TypeVar("Record", FileRecord, BatchRecord)


class BatchStore:
    """May be called from several threads. Reading takes no lock, so that it never waits for a disk."""

    def __init__(self, folder: Path, max_bytes: int, max_all_bytes: int) -> None:
        """The bytes of one owner and of all: files, and results that are being made."""
        self._max_bytes = max_bytes
        self._max_all_bytes = max_all_bytes
        self._bytes: Counter[str] = Counter()  # of files and results, by owner
        self._num_files: Counter[str] = Counter()  # by owner
        self._results: dict[str, int] = {}  # bytes of a batch's results so far
        self._lock = threading.RLock()
        self._drafts: dict[FileDraft, str] = {}  # owners of files that are being written
        try:
            for part in ("files", "batches"):
                (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._guard = open_plain(folder / "lock", "wb")
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another server uses the folder of batch_dir={folder}; name another") from None
        except OSError as error:
            raise ConfigError(f"batch_dir={folder} cannot be used: {error.strerror}") from None
        self._folder = folder
        self._files = _load(folder / "files", FileRecord)
        self._batches = _load(folder / "batches", BatchRecord)
        for record in self._files.values():
            self._add(record, 1)
        for batch in self.unfinished():
            self._count_results(batch)
        keep = {f"{name}{kind}" for name in self._files for kind in (".json", ".data")}
        keep |= {f"{name}.json" for name in self._batches}
        keep |= {self.results(batch).name for batch in self.unfinished()}
        for path in (*(folder / "files").iterdir(), *(folder / "batches").iterdir()):
            if path.name not in keep:
                path.unlink()

    def close(self) -> None:
        self._guard.close()

    def check_conservation(self) -> None:
        """What is counted is what the folder has."""
        with self._lock:
            sizes: Counter[str] = Counter()
            for file in self._files.values():
                sizes[file.owner] += self.data(file.id).stat().st_size
            for batch in self._batches.values():
                sizes[batch.owner] += self._results_size(batch)
            assert +self._bytes == +sizes, (self._bytes, sizes)
            assert +self._num_files == Counter(file.owner for file in self._files.values())

    # --- files ----------------------------------------------------------------------------------------------

    def file(self, owner: str, file_id: str, param: str = "file_id") -> FileRecord:
        return _owned(self._files, owner, file_id, "file", param)

    def files(self, owner: str) -> list[FileRecord]:
        """The newest first."""
        return [record for record in list(self._files.values())[::-1] if record.owner == owner]

    def data(self, file_id: str) -> Path:
        return self._folder / "files" / f"{file_id}.data"

    @contextmanager
    def draft(self, owner: str) -> Iterator[FileDraft]:
        """A file to write into. What is not saved is removed."""
        count = self._num_files[owner] + list(self._drafts.values()).count(owner)
        if count >= MAX_FILES:
            message = f"you have {count} files and {MAX_FILES} may be; delete some"
            raise RequestError(message, code="storage_full")
        if len(self._files) + len(self._drafts) >= MAX_ALL_FILES:
            message = f"this server has {MAX_ALL_FILES} files and no more may be; delete some"
            raise RequestError(message, code="storage_full")
        draft = FileDraft(self, owner, f"file-{secrets.token_hex(12)}")
        self._drafts[draft] = owner
        try:
            yield draft
        finally:
            draft.close()
            del self._drafts[draft]

    def check_bytes(self, owner: str, more: int) -> None:
        """RequestError if the owner, or the server, may not store so many more."""
        drafts = list(self._drafts.items())
        size = self._bytes[owner] + sum(draft.size for draft, of in drafts if of == owner)
        if size + more > self._max_bytes:
            limit = f"{self._max_bytes} may be (--batch-storage-mb)"
            message = f"your files have {size} bytes, {more} would be added and {limit}; delete some"
            raise RequestError(message, code="storage_full")
        size = self._bytes.total() + sum(draft.size for draft, _ in drafts)
        if size + more > self._max_all_bytes:
            limit = f"{self._max_all_bytes} may be (--batch-dir-mb)"
            message = f"the files of all clients have {size} bytes, {more} would be added and {limit}"
            raise RequestError(message, code="storage_full")

    def add_file(self, record: FileRecord) -> None:
        with self._lock:
            _write(self._folder / "files" / f"{record.id}.json", msgspec.json.encode(record))
            if record.id in self._files:
                self._add(self._files[record.id], -1)
            self._files[record.id] = record
            self._add(record, 1)

    def _add(self, record: FileRecord, count: int) -> None:
        self._num_files[record.owner] += count
        if not self._num_files[record.owner]:
            del self._num_files[record.owner]
        self._add_bytes(record.owner, count * record.size)

    def _add_bytes(self, owner: str, count: int) -> None:
        self._bytes[owner] += count
        if not self._bytes[owner]:  # an owner without files takes no memory
            del self._bytes[owner]

    def delete_file(self, owner: str, file_id: str) -> None:
        with self._lock:
            self.file(owner, file_id)
            for batch in self._batches.values():
                if batch.input_file_id == file_id and not batch.is_final:
                    reason = f"{batch.id} reads it and is {batch.status}; cancel that first"
                    message = f"{file_id} cannot be deleted: {reason}"
                    raise RequestError(message, code="file_in_use", param="file_id")
            self.remove_file(file_id)

    def remove_file(self, file_id: str) -> None:
        """Also one without a record."""
        with self._lock:
            (self._folder / "files" / f"{file_id}.json").unlink(missing_ok=True)
            self.data(file_id).unlink(missing_ok=True)
            if file_id in self._files:
                self._add(self._files.pop(file_id), -1)

    # --- batches --------------------------------------------------------------------------------------------

    def batch(self, owner: str, batch_id: str) -> BatchRecord:
        return _owned(self._batches, owner, batch_id, "batch", "batch_id")

    def batches(self, owner: str) -> list[BatchRecord]:
        """The newest first."""
        return [record for record in self._newest() if record.owner == owner]

    def _newest(self) -> list[BatchRecord]:
        return list(self._batches.values())[::-1]

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
        limits = (
            ("your", self.batches(owner), MAX_BATCHES),
            ("all clients'", self._newest(), MAX_ALL_BATCHES),
        )
        for whose, records, maximum in limits:
            if len(records) < maximum:
                continue
            finished = [record for record in records if record.is_final]
            if not finished:
                message = f"{len(records)} of {whose} batches are unfinished and {maximum} may be"
                raise RequestError(message, code="overloaded")
            self._forget(finished[-1])

    def _forget(self, record: BatchRecord) -> None:
        (self._folder / "batches" / f"{record.id}.json").unlink(missing_ok=True)
        self.results(record).unlink(missing_ok=True)
        self._count_results(record)
        del self._batches[record.id]

    def results(self, record: BatchRecord) -> Path:
        return self._folder / "batches" / f"{record.id}.jsonl"

    def _results_size(self, record: BatchRecord) -> int:
        results = self.results(record)
        return results.stat().st_size if results.exists() else 0

    def check_results(self, record: BatchRecord) -> None:
        """RequestError if its results so far are more than may be stored."""
        self._count_results(record)
        self.check_bytes(record.owner, 0)

    def _count_results(self, record: BatchRecord) -> None:
        with self._lock:
            size = self._results_size(record)
            self._add_bytes(record.owner, size - self._results.pop(record.id, 0))
            if size:
                self._results[record.id] = size

    def save(self, record: BatchRecord) -> None:
        with self._lock:
            _write(self._folder / "batches" / f"{record.id}.json", msgspec.json.encode(record))

    def move(self, record: BatchRecord, status: str) -> bool:
        """Move it into another status; return whether the disk has it. One that ends stays as it is."""
        with self._lock:
            if record.is_final or (status == "cancelling" and record.status not in STOPPABLE):
                return False
            record.status = status
            record.times = {**record.times, status: int(time.time())}
            try:
                self.save(record)
            except OSError as failure:
                again = "the next start of the server takes it up as it was before"
                logger.error("%s is %s, which cannot be written: %s; %s", record.id, status, failure, again)
                return False
            return True

    def finish(self, record: BatchRecord, status: str, error: str | None = None) -> None:
        """Makes files of the results. Under ids of the batch's own: a second try replaces the first's."""
        unique = record.id.removeprefix("batch_")
        results = self.results(record)
        try:
            if results.exists():
                record.output_file_id = self._save_results(record, f"file-{unique}-output", has_error=False)
                record.error_file_id = self._save_results(record, f"file-{unique}-error", has_error=True)
        except OSError as failure:
            self.suspend(record, failure)
            return
        record.error = error
        with self._lock:  # when its end shows, its bytes are counted
            if self.move(record, status):  # else the next start needs them
                results.unlink(missing_ok=True)
            self._count_results(record)

    def suspend(self, record: BatchRecord, failure: OSError) -> None:
        """The disk is full: it has failed for this run of the server. On the disk it stays as it is."""
        with self._lock:
            remedy = "its results so far are kept, and the next start of the server goes on"
            record.error = f"the folder of --batch-dir cannot be written: {failure.strerror}; {remedy}"
            record.output_file_id = record.error_file_id = None
            record.status = "failed"
            self._count_results(record)
            record.times = {**record.times, "failed": int(time.time())}
            logger.error("%s stops: %s", record.id, record.error)

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
        name = "".join(char for char in filename if char.isprintable())[:_MAX_NAME_CHARS]
        record = FileRecord(self._id, self._owner, name, purpose, self.size, int(time.time()))
        try:
            self._store.add_file(record)
        except OSError:
            self._store.remove_file(self._id)  # with the record of an earlier try: it was of other data
            raise
        return record

    def close(self) -> None:
        with suppress(OSError):  # what finds no place is not wanted either
            self._out.close()
        self._partial.unlink(missing_ok=True)


def _owned(records: Mapping[str, Record], owner: str, name: str, kind: str, param: str) -> Record:
    record = records.get(name)
    if record is None or record.owner != owner:
        raise RequestError(f"there is no {kind} {quoted(name)}", code=f"{kind}_not_found", param=param)
    return record


def _load(folder: Path, kind: type[Record]) -> dict[str, Record]:
    """The records, in the order of creation."""
    records = []
    for path in folder.glob("*.json"):
        try:
            records.append(msgspec.json.decode(read_plain(path, _MAX_RECORD_BYTES), type=kind))
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"batch_dir: {path} cannot be read ({error}); remove it") from None
    return {
        record.id: record for record in sorted(records, key=lambda record: (record.created_at, record.id))
    }


def _write(path: Path, content: bytes) -> None:
    """A reader sees the old content or the new, also after a crash."""
    partial = path.with_suffix(".new")
    try:
        with open(partial, "wb", opener=_private) as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
