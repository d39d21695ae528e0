"""Messages between an engine and an encoder worker, in the frames of `engine/ipc`.

engine                        worker
a byte, with the arena's descriptor ─►
                           ◄─ Welcome
Encode ─────────────────────────────►
               ◄─ Begun, then Encoded or Failed
"""

from __future__ import annotations

import msgspec

from saccade.engine.ipc.messages import Message, decode_error, decoded
from saccade.errors import RequestError
from saccade.types.media import MediaItem
from saccade.types.step import MediaTimes


class Welcome(Message, frozen=True):
    seconds_per_patch: float  # measured


class Encode(Message, frozen=True):
    job: int  # of this connection
    item: MediaItem
    start: int  # where its embedding goes in the arena
    num_bytes: int  # that are reserved there


class Begun(Message, frozen=True):
    """From now on this image may be why the worker dies."""

    job: int


class Encoded(Message, frozen=True):
    """The embedding is in its place."""

    job: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    times: MediaTimes


class Failed(Message, frozen=True):
    job: int
    error: RequestError


Reply = Welcome | Begun | Encoded | Failed

_ENCODE: msgspec.msgpack.Decoder[Encode] = msgspec.msgpack.Decoder(Encode, dec_hook=decode_error)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply, dec_hook=decode_error)


def encode_in(body: bytes) -> Encode:
    return decoded(_ENCODE, body)


def reply_in(body: bytes) -> Reply:
    return decoded(_REPLY, body)
