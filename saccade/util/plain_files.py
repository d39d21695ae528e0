"""Files that an operator or a client names: opened without waiting, read up to a limit, written whole.

A pipe may hold its reader for ever and a device may never end, so neither is read. The `strerror` of an
OSError says what is wrong.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import cast

from saccade.errors import ConfigError

_KINDS = {
    stat.S_IFIFO: "pipe",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
    stat.S_IFDIR: "folder",
}


def open_plain(path: str | Path, mode: str = "rb") -> io.BufferedIOBase:
    """A regular file, or a link to one. Writing may create it."""
    try:
        return cast(io.BufferedIOBase, open(path, mode, opener=_opened))
    except ValueError:
        raise OSError(errno.EINVAL, "its name is not a valid path") from None


def read_plain(path: str | Path, maximum: int) -> bytes:
    with open_plain(path) as stream:
        data = stream.read(maximum + 1)
    if len(data) > maximum:
        raise OSError(errno.EFBIG, f"it has more than {maximum} bytes")
    return data


def read_text(path: str | Path, maximum: int, what: str = "") -> str:
    """ConfigError that calls the file `what` says."""
    try:
        return read_plain(path, maximum).decode()
    except OSError as error:
        reason = error.strerror
    except ValueError:
        reason = "it is not UTF-8 text"
    raise ConfigError(f"{what or path} cannot be read: {reason}")


def write_whole(path: str | Path, text: str) -> None:
    """Without place for all of it on the disk the file stays as it was. Pipes and devices are written too."""
    try:
        _write(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _write(path: str | Path, data: bytes) -> None:
    is_new = not os.path.exists(path)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb", buffering=0) as out:
        about = os.fstat(out.fileno())
        is_plain = stat.S_ISREG(about.st_mode)
        try:
            if is_plain and data:
                _allocate(out.fileno(), about.st_size, len(data))
            view = memoryview(data)
            while view:
                view = view[out.write(view) :]
            if is_plain:
                out.truncate(len(data))
        except OSError:
            if is_new:
                os.unlink(path)
            elif is_plain:
                out.truncate(about.st_size)
            raise


def _allocate(fd: int, size: int, end: int) -> None:
    """Place on the disk; its content up to `size` stays."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, end)
        return
    while size < end:  # macOS
        size += os.pwrite(fd, bytes(end - size), size)


def _opened(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        raise OSError(errno.EINVAL, f"it is a {_KINDS.get(kind, 'special file')}, not a plain file", path)
    return fd
