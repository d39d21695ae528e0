"""The folder with the sockets of a server's encoder workers. Knows nothing of what passes through them.

A server that is killed cannot remove its folder: the next one does. A lock tells whether its server lives.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from saccade.errors import ConfigError

_PREFIX = "saccade-encoders-"
_MAX_PATH = 90  # bytes; a socket's whole path may have 107
_NEW_SECONDS = 60.0  # in which a folder may not be locked yet


class SocketFolder:
    """Only this user may enter it."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise ConfigError("encoders need shared memory as Linux has it; leave out --encoders")
        _remove_those_left()
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self.name = self._folder.name
        if len(os.fsencode(self.name)) > _MAX_PATH:
            self._folder.cleanup()
            problem = f"{self.name} is too long for the path of a socket"
            raise ConfigError(f"{problem}; set TMPDIR to a shorter one")
        self._lock = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)  # no child process inherits it
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        self._folder.cleanup()
        os.close(self._lock)


def _remove_those_left() -> None:
    """Folders of this user whose server is gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another server's, or removed by another one
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(fd)
                if status.st_uid == os.getuid() and status.st_mtime < time.time() - _NEW_SECONDS:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
