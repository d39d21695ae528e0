"""The border between an engine and an encoder worker, whatever carries the bytes. Knows no sockets.

Two things make a transport:

- A `Connect` function for the engine. It opens the worker's address and returns an `EncoderChannel`.
- A launcher for the front door (`Launcher` in `engine/ipc`). It starts a worker that takes `Start`, replies
  `Ready`, sends a `StepUpdate` with its counters twice a second, and ends at `Stop`. The worker hosts an
  `EncoderCore` and serves the address that `Start` names to all engines.

    front door ── Start, Stop ──► worker          supervised like an engine
    engine ── encode(item) ─────► worker          one channel for each engine and worker
           ◄── embedding ────────
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from saccade.types.media import MediaItem
from saccade.types.step import MediaTimes


class EncoderLost(Exception):
    """The worker is gone, or the channel to it."""

    def __init__(self, reason: str, *, was_begun: bool) -> None:
        super().__init__(reason)
        self.was_begun = was_begun  # the worker had begun with this image, so that may be why


class EncoderLate(Exception):
    """No embedding within the time allowed."""


class RemoteEmbedding(NamedTuple):
    data: memoryview  # its bytes, which the worker has finished writing
    shape: tuple[int, ...]
    dtype: str  # as in torch.<dtype>
    times: MediaTimes


class EncoderChannel(Protocol):
    """One encoder worker as one engine reaches it. Several threads use it at the same time."""

    @property
    def is_open(self) -> bool:
        """False: no image can be sent; every `encode` under way raises EncoderLost."""

    @property
    def seconds_per_patch(self) -> float:
        """What the worker measured at its start."""

    def encode(
        self, item: MediaItem, num_bytes: int, seconds: float
    ) -> AbstractContextManager[RemoteEmbedding]:
        """Reserve space for the embedding, send the image, wait for the result.

        Where the space is taken, calls wait in order. The data is valid inside the context; then its space is
        free again. Raises EncoderLost; EncoderLate after so many seconds, and then the space stays reserved
        until the worker is done with it; or the RequestError of an image that cannot be encoded.
        """

    def close(self) -> None: ...


Connect = Callable[[str, int], EncoderChannel]
"""(address, bytes of all embeddings under way) -> a channel to the worker there. OSError: it is not there."""
