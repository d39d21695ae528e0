"""The worker's side of the socket: serves several engines, writes embeddings to the places they reserved."""

from __future__ import annotations

import logging
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import BinaryIO

import torch

from saccade.engine.encoders.arena import mapped
from saccade.engine.encoders.encoder_core import EncoderCore, EncoderJob, EncoderOutcome
from saccade.engine.encoders.messages import Begun, Encode, Encoded, Failed, Reply, Welcome, encode_in
from saccade.engine.ipc.messages import WireError, frame, read_body

_SEND_TIMEOUT = struct.pack("ll", 5, 0)  # seconds, microseconds

logger = logging.getLogger("saccade.engine")


class SocketServer:
    def __init__(self, core: EncoderCore, address: str) -> None:
        """`address` is a path in a folder that only this user may enter."""
        self._core = core
        Path(address).unlink(missing_ok=True)  # of a worker before this one
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        Thread(target=self._accept, name="saccade-accept", daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
                Thread(target=self._serve, args=(connection,), name="saccade-engine", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                engine = _Engine(connection, self._core)
            except (OSError, WireError) as error:
                logger.warning("an engine could not connect: %s", error)
                return
            try:
                engine.read()
            except (OSError, WireError) as error:
                logger.warning("the connection to an engine broke: %s", error)
            finally:
                self._core.forget(engine)

    def close(self) -> None:
        self._listener.close()


class _Engine:
    """One connection, and the arena that came with it."""

    def __init__(self, connection: socket.socket, core: EncoderCore) -> None:
        self._core = core
        self._socket = connection
        self._sending = Lock()
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise WireError("the connection did not begin with an arena")
        self._memory = torch.frombuffer(mapped(fds[0]), dtype=torch.uint8)
        self._send(Welcome(core.seconds_per_patch))

    def read(self) -> None:
        with self._socket.makefile("rb") as stream:
            while self._take(stream):
                pass

    def _take(self, stream: BinaryIO) -> bool:
        """One message; False at the end. A function of its own: no local holds the image while waiting."""
        body = read_body(stream)
        if body is None:
            return False
        message = encode_in(body)
        if not 0 <= message.start <= message.start + message.num_bytes <= len(self._memory):
            raise WireError(f"the place of the job {message.job} is outside the arena")
        self._core.submit(
            EncoderJob(
                engine=self,
                item=message.item,
                begin=lambda: self._send(Begun(message.job)),
                done=lambda outcome: self._done(message, outcome),
            )
        )
        return True

    def _done(self, order: Encode, outcome: EncoderOutcome) -> None:
        """An embedding that is too large for its place is not written, only told of."""
        if outcome.embedding is None:
            assert outcome.error is not None
            self._send(Failed(order.job, outcome.error))
            return
        data = outcome.embedding.contiguous().view(torch.uint8).flatten()
        if data.numel() <= order.num_bytes:
            self._memory[order.start : order.start + data.numel()].copy_(data)
        assert outcome.times is not None
        dtype = str(outcome.embedding.dtype).removeprefix("torch.")
        self._send(Encoded(order.job, tuple(outcome.embedding.shape), dtype, data.numel(), outcome.times))

    def _send(self, message: Reply) -> None:
        """An engine that is gone, or does not read, is forgotten by the thread that reads from it."""
        try:
            with self._sending:
                self._socket.sendall(frame(message))
        except OSError:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
