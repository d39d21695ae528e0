"""An encoder worker that a test plays: it decides what becomes of each image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from saccade.runner.embedding_tiers.entry import Namespace
from saccade.runner.encoder.encoder_channel import EncoderLost, RemoteEmbedding
from saccade.runner.encoder.encoder_runner import LocalEncoder
from saccade.runner.encoder.remote_encoders import RemoteEncoders
from saccade.types.media import MediaItem
from saccade.types.step import MediaTimes
from tests.helpers.fakes.fake_tower import FakeTower

FORM = Namespace(1, "float32", b"")
WORKER_VALUE = 99.0  # of embeddings that come from a worker; the fake tower's are others


def embedding(item: MediaItem, slots: int | None = None, dtype: torch.dtype = torch.float32) -> RemoteEmbedding:
    made = torch.full((slots or item.geometry.slots, 1), WORKER_VALUE, dtype=dtype)
    data = memoryview(bytearray(made.numpy().tobytes()))
    return RemoteEmbedding(data, tuple(made.shape), str(dtype).removeprefix("torch."), MediaTimes(1.0, 2.0))


class FakeChannel:
    """`respond` returns an embedding, or raises what a channel raises."""

    seconds_per_patch = 0.001

    def __init__(self, respond: Callable[[MediaItem], RemoteEmbedding] = embedding) -> None:
        self.is_open = True
        self.respond = respond
        self.sent: list[bytes] = []  # keys, in order
        self.seconds: list[float] = []
        self.inside: set[bytes] = set()
        self.together: list[set[bytes]] = []  # what was inside with each image when it came

    @contextmanager
    def encode(self, item: MediaItem, num_bytes: int, seconds: float) -> Iterator[RemoteEmbedding]:
        if not self.is_open:
            raise EncoderLost("closed", was_begun=False)
        self.sent.append(item.key)
        self.seconds.append(seconds)
        self.together.append(set(self.inside))
        self.inside.add(item.key)
        try:
            yield self.respond(item)
        finally:
            self.inside.discard(item.key)

    def die(self, *, was_begun: bool = True) -> None:
        self.is_open = False
        raise EncoderLost("it died", was_begun=was_begun)

    def close(self) -> None:
        self.is_open = False


class Workers:
    """Some fake workers, and the encoder stage of an engine that uses them."""

    def __init__(self, *channels: FakeChannel, clock: Callable[[], float] | None = None, **how: Any) -> None:
        self.channels = list(channels)
        self.tower = FakeTower()
        waiting = {str(index): channel for index, channel in enumerate(channels)}

        def connect(address: str, arena_bytes: int) -> FakeChannel:
            if address not in waiting:
                raise FileNotFoundError(address)
            return waiting.pop(address)

        options = {"clock": clock} if clock else {}
        addresses = tuple(waiting)
        self.remote = RemoteEncoders(addresses, connect, FORM, 1 << 20, **options)
        with self.remote._changed:
            assert self.remote._changed.wait_for(lambda: len(self.remote._workers) == len(channels), 20)
        self.stage = LocalEncoder(self.tower, 32, 2, remote=self.remote, **how)  # type: ignore[arg-type]

    def encode(self, *items: MediaItem) -> Any:
        self.stage.submit(items)
        self.stage.advance(None)
        return self.stage.poll()
