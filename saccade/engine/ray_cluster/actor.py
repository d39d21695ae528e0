"""The Ray actor of one worker: its loop on a TCP connection. Its process ends with the connection."""

from __future__ import annotations

import hmac
import importlib
import select
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ray

from saccade.util.logs import set_up_worker

NAMESPACE = "saccade"  # in which Ray knows encoder workers by name
TOKEN_BYTES = 32  # first on the connection: the port is open to the cluster's network
_CONNECT_SECONDS = 60.0
_MAX_WAITING = 64  # connections that have sent no token
_SILENT_SECONDS = 30  # without an acknowledgement: the connection is lost


class Endpoint(NamedTuple):
    """Where an actor listens."""

    node_id: str  # Ray's
    node: str  # name of the machine
    host: str
    port: int
    has_model: bool  # whether the model folder is there


class WorkerActor:
    def __init__(self, token: bytes, worker: str) -> None:
        """`worker` is the module whose `RayWorker` serves the connection."""
        self._token = token
        self._worker = importlib.import_module(worker).RayWorker()
        self._listener: socket.socket | None = None

    def listen(self, folder: str) -> Endpoint:
        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        node_id = ray.get_runtime_context().get_node_id()
        port = self._listener.getsockname()[1]
        return Endpoint(node_id, socket.gethostname(), host, port, Path(folder).is_dir())

    def serve(self) -> None:
        """Until the bridge stops the engine or is gone."""
        assert self._listener is not None, "listen() comes first"
        set_up_worker("engine")
        with self._listener as listener:
            connection = self._accept(listener)
        self._worker.serve(connection)
        connection.shutdown(socket.SHUT_RDWR)  # its reader sees that and ends the process

    def hello(self) -> float | None:
        """Of an encoder worker, for engines."""
        seconds: float | None = self._worker.hello()
        return seconds

    def encode(self, engine: str, body: bytes) -> Iterator[Any]:
        """Of an encoder worker, for engines."""
        yield from self._worker.encode(engine, body)

    def _accept(self, listener: socket.socket) -> socket.socket:
        """The first connection that has the token. TimeoutError if there is none in time.

        Others wait beside it, and of too many the oldest is closed: none can keep the server's out.
        """
        deadline = time.monotonic() + _CONNECT_SECONDS
        listener.setblocking(False)
        waiting: list[socket.socket] = []
        try:
            while (seconds := deadline - time.monotonic()) > 0:
                for connection in select.select(waiting, [], [], 0)[0]:
                    waiting.remove(connection)
                    if self._knows_token(connection):
                        keep_alive(connection)
                        return connection
                    connection.close()
                if len(waiting) > _MAX_WAITING:
                    waiting.pop(0).close()
                if listener in select.select([listener, *waiting], [], [], seconds)[0]:
                    waiting += _accepted(listener)
            raise TimeoutError(f"the server did not connect within {_CONNECT_SECONDS:g} s")
        finally:
            for connection in waiting:
                connection.close()

    def _knows_token(self, connection: socket.socket) -> bool:
        """It sent something, or is gone."""
        try:
            token = connection.recv(TOKEN_BYTES)
        except OSError:
            return False
        return hmac.compare_digest(token, self._token)


def _accepted(listener: socket.socket) -> list[socket.socket]:
    """None if it is gone already."""
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return []
    connection.setblocking(False)
    return [connection]


def keep_alive(connection: socket.socket) -> None:
    """Blocking, without delay, and closed by the system when the network between both ends is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS // 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS // 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_SECONDS * 1000)
