"""Accepts connections from the listening socket, in place of Uvicorn's loop.

When the process has no descriptors left, uvloop silently closes pending connections. Here they wait in the
socket's backlog until a descriptor is free, and the log says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from saccade.server.http.auth import peer_of
from saccade.server.http.connections import Access, HttpConnection, OpenConnections, at_most_every

logger = logging.getLogger("saccade.server")

_MAX_ACCEPTS = 128  # per callback, so that the event loop stays responsive
_PAUSE_SECONDS = 0.1
_SHUTDOWN_SECONDS = 3.0  # for the client's last word in TLS
_LOG_SECONDS = 10.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(eq=False, slots=True)
class _Handshake:
    """A connection before TLS is set up. It counts as idle: the oldest one gives way."""

    sock: socket.socket

    def drop(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Listener:
    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[HttpConnection | None], asyncio.Protocol],
        connections: OpenConnections,
        tls: ssl.SSLContext | None = None,
        handshake_timeout: float = 15.0,
    ) -> None:
        """`make_protocol` gets the handshake that its connection follows, if there is one."""
        self._sock = sock
        self._tls = tls
        self._handshake_timeout = handshake_timeout
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
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                self._pause(error)
                return
            sock.setblocking(False)
            if self._tls is None:
                self._open(sock, None)
            else:
                self._begin_handshake(sock, address[:2])

    def _begin_handshake(self, sock: socket.socket, address: tuple[str, int]) -> None:
        handshake = _Handshake(sock)
        if self._connections.admit(handshake, peer_of(address)) is Access.REFUSED:
            self._connections.refused()
            sock.close()
        else:
            self._open(sock, handshake)

    def _open(self, sock: socket.socket, handshake: _Handshake | None) -> None:
        loop = asyncio.get_running_loop()
        limits: dict[str, float] = {}
        if self._tls is not None:
            limits["ssl_handshake_timeout"] = self._handshake_timeout
            limits["ssl_shutdown_timeout"] = _SHUTDOWN_SECONDS
        make_protocol = partial(self._make_protocol, handshake)
        opening = loop.connect_accepted_socket(make_protocol, sock, ssl=self._tls, **limits)
        task: asyncio.Task[object] = loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(partial(self._opened, handshake))

    def _opened(self, handshake: _Handshake | None, task: asyncio.Task[object]) -> None:
        self._opening.discard(task)
        if handshake is not None:
            self._connections.remove(handshake)
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
