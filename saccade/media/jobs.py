"""What a process that reads clients' media is asked to do, and what it answers. msgpack, nothing pickled.

request: length, job, bytes of the image, video or PDF (none if it still has them)
reply:   msgpack; pixels are in the shared memory whose descriptor came with the job
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import msgspec

from saccade.types.media import MediaItem, Size

LENGTH = struct.Struct(">I")
SEND_AGAIN = b""
"""The body of a refusal: the process is a new one and has not the bytes that it was said to have."""


class Job(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all jobs. The first value on the wire is the class name."""


class PdfBoxes(Job, frozen=True):
    """Reply: the number of pages, and the boxes of at most `limit` of them."""

    limit: int


class PdfText(Job, frozen=True):
    """Reply: the text of a page."""

    page: int


class VideoHeader(Job, frozen=True):
    """Reply: a `VideoInfo`."""


class Decode(Job, frozen=True):
    """An image, a page or a frame group, without its bytes. Reply: the shape of its pixels."""

    item: MediaItem

    @classmethod
    def of(cls, item: MediaItem) -> Decode:
        return cls(replace(item, data=b""))


class Resize(Job, frozen=True):
    """A large JPEG, resized while it is decoded. Reply: the shape of its pixels."""

    item: MediaItem
    size: Size
    resampling: int
    threads: int


AnyJob = PdfBoxes | PdfText | VideoHeader | Decode | Resize
_JOBS = msgspec.msgpack.Decoder(tuple[bool, int, AnyJob])


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """A RequestError of the process."""

    message: str
    code: str | None
    param: str | None = None
    is_rest: bool = False  # of a sentence whose beginning the parent knows


def pack(job: Job, memory: int, *, has_data: bool) -> bytes:
    """`memory`: bytes that the job may take. `has_data`: the bytes are those of the job before."""
    body = msgspec.msgpack.encode((has_data, memory, job))
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> tuple[bool, int, AnyJob, bytes]:
    """The same, and the bytes that came with it."""
    (length,) = LENGTH.unpack_from(body)
    start = LENGTH.size + length
    has_data, memory, job = _JOBS.decode(memoryview(body)[LENGTH.size : start])
    return has_data, memory, job, body[start:]


def encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)
