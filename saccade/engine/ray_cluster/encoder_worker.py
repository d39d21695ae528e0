"""An encoder worker in a Ray actor: the loop of a local one. Engines call the actor; no socket is served."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from saccade.engine.encoders.encoder_core import EncoderCore, EncoderJob, EncoderOutcome
from saccade.engine.encoders.messages import Encoded, Failed, encode_in
from saccade.engine.encoders.worker import EncoderLoop, build
from saccade.engine.ipc.loop import serve_connection
from saccade.engine.ipc.messages import HEADER, frame

_BEGUN = object()


class RayWorker:
    def __init__(self) -> None:
        self._core: EncoderCore | None = None  # None: not warm yet

    def serve(self, connection: socket.socket) -> None:
        serve_connection(connection, build, partial(EncoderLoop, publish=self._publish))

    def _publish(self, core: EncoderCore, address: str) -> RayWorker:
        self._core = core
        return self

    def close(self) -> None:
        self._core = None

    def hello(self) -> float | None:
        """Seconds for a patch; None: not ready."""
        core = self._core
        return core.seconds_per_patch if core is not None else None

    def encode(self, engine: str, body: bytes) -> Iterator[tuple[np.ndarray[Any, Any], bytes] | None]:
        """None when it has begun, then the embedding's bytes and the reply that describes them.

        Several threads are here, one for each image. Bytes go through Ray's object store.
        """
        core = self._core
        if core is None:
            raise RuntimeError("the encoder worker is not ready")
        message = encode_in(body)
        news: SimpleQueue[Any] = SimpleQueue()
        job = EncoderJob(
            engine=engine,
            item=message.item,
            begin=lambda: news.put(_BEGUN),
            done=lambda outcome: news.put(_packed(outcome)),
        )
        core.submit(job)
        assert news.get() is _BEGUN
        yield None
        yield news.get()


def _packed(outcome: EncoderOutcome) -> tuple[np.ndarray[Any, Any], bytes]:
    """Called in the thread of the encoder's steps, which knows when the embedding is complete."""
    if outcome.embedding is None or outcome.times is None:
        assert outcome.error is not None
        return np.empty(0, np.uint8), bytes(frame(Failed(0, outcome.error))[HEADER.size :])
    data = outcome.embedding.contiguous().view(torch.uint8).flatten().cpu().numpy()
    dtype = str(outcome.embedding.dtype).removeprefix("torch.")
    reply = Encoded(0, tuple(outcome.embedding.shape), dtype, data.size, outcome.times)
    return data.copy(), bytes(frame(reply)[HEADER.size :])
