"""Accepts connections from the listening socket, in place of Uvicorn's loop.

When the process has no descriptors left, uvloop silently closes pending connections. Here they wait in the
socket's backlog until a descriptor is free, and the log says so.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from saccade.server.http.connections import Connections, at_most_every

logger = logging.getLogger("saccade.server")

_MAX_ACCEPTS = 128  # per callback, so that the event loop stays responsive
_PAUSE_SECONDS = 0.1
_LOG_SECONDS = 10.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    def __init__(
        self, sock: socket.socket, make_protocol: Callable[[], asyncio.Protocol], connections: Connections
    ) -> None:
        self._sock = sock
        self._make_protocol = make_protocol
        self._connections = connections
        self._opening: set[asyncio.Task[object]] = set()
        self._may_log = at_most_every(_LOG_SECONDS)

    def open(self) -> None:
        self._sock.setblocking(False)
        self._resume()

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                self._pause(error)
                return
            self._open(sock)

    def _open(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        task: asyncio.Task[object] = loop.create_task(loop.connect_accepted_socket(self._make_protocol, sock))
        self._opening.add(task)
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[object]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.debug("a connection was lost before it was accepted: %s", task.exception())

    def _pause(self, error: OSError) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)  # it would be reported as readable all the time
        loop.call_later(_PAUSE_SECONDS, self._resume)
        self._connections.drop_idle()
        if self._may_log():
            text = "new connections wait: %s; raise the limit (ulimit -n) or lower --max-connections, now %d"
            logger.error(text, error.strerror, self._connections.maximum)
