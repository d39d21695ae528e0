"""A channel to an encoder worker on Ray: calls of its actor, embeddings through the object store."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayError

from saccade.engine.encoders.messages import Encode, Encoded, Failed, reply_in
from saccade.engine.ipc.messages import HEADER, frame
from saccade.engine.ray_cluster.actor import NAMESPACE
from saccade.runner.encoder.encoder_channel import EncoderLate, EncoderLost, RemoteEmbedding
from saccade.types.media import MediaItem

_HELLO_SECONDS = 5.0

# Ray's arrays are views of its object store; they are only read.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class ActorChannel:
    def __init__(self, address: str, arena_bytes: int) -> None:
        """`address` is the actor's name. The object store holds the embeddings: no arena is made."""
        self.is_open = True
        self._engine = secrets.token_hex(8)
        try:
            self._actor = ray.get_actor(address, NAMESPACE)
            seconds = ray.get(self._actor.hello.remote(), timeout=_HELLO_SECONDS)
        except (ValueError, RayError) as error:
            raise ConnectionError(f"no encoder worker is called {address}: {type(error).__name__}") from None
        if seconds is None:
            raise ConnectionError(f"the encoder worker {address} is not ready")
        self.seconds_per_patch: float = seconds

    @contextmanager
    def encode(self, item: MediaItem, num_bytes: int, seconds: float) -> Iterator[RemoteEmbedding]:
        deadline = monotonic() + seconds
        body = bytes(frame(Encode(0, item, 0, num_bytes))[HEADER.size :])
        if not self.is_open:
            raise EncoderLost("its actor is gone", was_begun=False)
        news = self._actor.encode.options(num_returns="streaming").remote(self._engine, body)
        self._next(news, deadline, was_begun=False)
        data, reply = self._next(news, deadline, was_begun=True)
        message = reply_in(reply)
        if isinstance(message, Failed):
            raise message.error
        assert isinstance(message, Encoded)
        yield RemoteEmbedding(memoryview(data)[:num_bytes], message.shape, message.dtype, message.times)

    def _next(self, news: Any, deadline: float, *, was_begun: bool) -> Any:
        ready, _ = ray.wait([news], timeout=max(deadline - monotonic(), 0.0))
        if not ready:
            raise EncoderLate("no embedding in time")
        try:
            return ray.get(next(news))
        except (StopIteration, RayError) as error:
            self.is_open = False
            raise EncoderLost(f"its actor is gone ({type(error).__name__})", was_begun=was_begun) from None

    def close(self) -> None:
        self.is_open = False
