"""Encoder workers in the process of the test, behind real sockets: one that works, and one that a test plays."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from saccade.engine.encoders.encoder_core import EncoderCore
from saccade.engine.encoders.messages import Welcome
from saccade.engine.encoders.socket_server import SocketServer
from saccade.engine.ipc.messages import frame
from saccade.runner.encoder.encoder_runner import LocalEncoder
from tests.helpers.fakes.fake_tower import FakeTower


class Worker:
    """A core that serves a socket, stepped by a thread."""

    def __init__(self, address: Path, encoder: LocalEncoder | None = None, seconds_per_patch: float = 0.25) -> None:
        self.address = str(address)
        self.tower = FakeTower()
        encoder = encoder or LocalEncoder(self.tower, 64, 2)  # type: ignore[arg-type]
        self.core = EncoderCore(encoder, seconds_per_patch)
        self.server = SocketServer(self.core, self.address)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.core.step()

    def close(self) -> None:
        self._is_over.set()
        with self.core._arrived:
            self.core._arrived.notify_all()
        self._thread.join()
        self.server.close()
        self.core.close()


class Puppet:
    """The other end of a channel, played by the test."""

    def __init__(self, address: Path) -> None:
        self.address = str(address)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.address)
        self.listener.listen()

    def accept(self) -> None:
        self.connection, _ = self.listener.accept()
        _, fds, _, _ = socket.recv_fds(self.connection, 1, 1)
        os.close(fds[0])
        self.connection.sendall(frame(Welcome(0.5)))

    def close(self) -> None:
        self.listener.close()
