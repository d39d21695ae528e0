"""Embeddings in a folder that several processes may share: a file each, the oldest are removed first.

    DIR/3f/3fa9...c1.safetensors      mode 0600, written under another name and renamed

A file's time of change is that of its last use. Other files in the folder are neither read nor removed.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from saccade.errors import ConfigError
from saccade.runner.embedding_tiers.entry import Buffer
from saccade.runner.embedding_tiers.store import BadEntry, StoreError

_MAX_ENTRIES = 100_000
_SLACK = 16  # a tidy folder is 1/16 below its limits, and is looked through again after that much was written
_USED_SECONDS = 60  # a use within them of the last does not change the file's time
_LEFTOVER_SECONDS = 3600  # after which a file that was never renamed belongs to a process that has died
_FOLDER = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{64}\.safetensors")
_LEFTOVER = re.compile(r"\.[0-9a-f]{64}\.[0-9]+\.[0-9]+")


class _File(NamedTuple):
    used: float  # time of its last use
    size: int
    path: str


class FolderStore:
    label = "folder"

    def __init__(
        self, folder: str, max_bytes: int, max_age: float, *, max_entries: int = _MAX_ENTRIES
    ) -> None:
        self._root = Path(folder).expanduser()
        self.where = str(self._root)
        self._max_bytes = max_bytes
        self._max_age = max_age  # seconds since the last use
        self._max_entries = max_entries
        self._numbers = itertools.count()
        self._lock = Lock()
        self._bytes = 0  # at the last look, plus what was written since
        self._entries = 0
        self._written = 0  # bytes since then
        self.evictions = 0
        _prepare(self._root)

    @property
    def used_bytes(self) -> int:
        return self._bytes

    def read(self, name: str, header: bytearray, buffers: Sequence[Buffer]) -> bool:
        with _failing(self.where), suppress(FileNotFoundError), _opened(self._path(name)) as file:
            about = os.fstat(file.fileno())
            if about.st_size != len(header) + sum(buffer.nbytes for buffer in buffers):
                raise BadEntry
            if not all(_filled(file, part) for part in (memoryview(header), *buffers)):
                raise BadEntry  # another process has cut it meanwhile
            if time.time() - about.st_mtime > _USED_SECONDS:
                with suppress(OSError):
                    os.utime(file.fileno())
            return True
        return False

    def write(self, name: str, header: bytes, buffers: Sequence[Buffer]) -> None:
        path = self._path(name)
        partial = path.parent / f".{name}.{os.getpid()}.{next(self._numbers)}"
        with _failing(self.where):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with open(fd, "wb") as file:
                    file.write(header)
                    for buffer in buffers:
                        file.write(buffer)
                os.replace(partial, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial)
                raise
        size = len(header) + sum(buffer.nbytes for buffer in buffers)
        with self._lock:
            self._bytes += size
            self._written += size
            self._entries += 1
            is_due = self._written * _SLACK > self._max_bytes or self._is_over(self._bytes, self._entries)
        if is_due:
            self.tidy()

    def remove(self, name: str) -> None:
        path = self._path(name)
        with _failing(self.where), suppress(FileNotFoundError):
            size = path.lstat().st_size
            path.unlink()
            with self._lock:
                self._bytes -= size
                self._entries -= 1

    def tidy(self) -> None:
        """Remove what is too old, then the oldest until all limits are kept with some slack."""
        with _failing(self.where):
            files = sorted(self._files())
            size = sum(file.size for file in files)
            count = len(files)
            share = 1 - 1 / _SLACK if self._is_over(size, count) else 1.0
            oldest = time.time() - self._max_age
            for file in files:
                if file.used >= oldest and not self._is_over(size, count, share):
                    break
                with suppress(FileNotFoundError):  # another process was faster
                    os.unlink(file.path)
                    self.evictions += 1
                size -= file.size
                count -= 1
        with self._lock:
            self._bytes = size
            self._entries = count
            self._written = 0

    def _is_over(self, size: int, count: int, share: float = 1.0) -> bool:
        """Whether this is more than a share of the limits."""
        return size > share * self._max_bytes or count > share * self._max_entries

    def _files(self) -> Iterator[_File]:
        """All entries. Files that were never renamed are removed."""
        for folder in os.scandir(self._root):
            if not _FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                with suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    if _ENTRY.fullmatch(entry.name) and stat.S_ISREG(about.st_mode):
                        yield _File(about.st_mtime, about.st_size, entry.path)
                    elif _LEFTOVER.fullmatch(entry.name) and about.st_mtime < time.time() - _LEFTOVER_SECONDS:
                        os.unlink(entry.path)

    def make_cold(self, name: str) -> None:
        with _failing(self.where), open(self._path(name), "rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # macOS has none
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def advice(self) -> str | None:
        return None

    def close(self) -> None:
        pass

    def _path(self, name: str) -> Path:
        return self._root / name[:2] / f"{name}.safetensors"


def _prepare(root: Path) -> None:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = root.stat().st_mode
        is_usable = os.access(root, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        message = (
            f"embedding_dir={root} cannot be made or read ({error.strerror}); give another --embedding-dir"
        )
        raise ConfigError(message) from None
    if not is_usable:
        raise ConfigError(f"embedding_dir={root} cannot be written; change its owner or give another one")
    if mode & stat.S_IWOTH:
        reason = "every user of this machine may write to it, and so choose what the model sees"
        raise ConfigError(f"embedding_dir={root} has mode {mode & 0o7777:o}: {reason}; run chmod o-w {root}")


def _opened(path: Path) -> io.FileIO:
    """Does not wait at a pipe, nor follow a link."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise BadEntry from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadEntry
    return io.FileIO(fd)


def _filled(file: io.FileIO, buffer: memoryview) -> bool:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            return False
        buffer = buffer[count:]
    return True


@contextmanager
def _failing(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"the folder {where} failed: {error.strerror}") from error
