"""KV events in the form that vLLM publishes and routers such as Dynamo and llm-d read.

A batch is the msgpack array [time, events, rank]; an event is a map with its class name under "type". Fields
without a default are always sent: readers that decode into vLLM's own classes expect them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from saccade.scheduler.block_hashes import text_records
from saccade.scheduler.kv_event_log import BlocksRemoved, BlocksStored, KVEvent

MediaKey = tuple[str, int]  # an image's content key in hex, and its start relative to that of the block

_RECORD = struct.Struct("<32sQ")
_NO_KEY = bytes(32)  # of a text position


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[MediaKey] | None] | None = None  # for each block; None: all are text


class BlockRemoved(msgspec.Struct, tag=True, frozen=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    pass


_ENCODER = msgspec.msgpack.Encoder()


def encode_events(events: Sequence[KVEvent], block_size: int) -> bytes:
    """The events of a batch; no bytes if there are none."""
    return _ENCODER.encode([_wire_form(event, block_size) for event in events]) if events else b""


def encode_batch(time: float, events: bytes, rank: int) -> bytes:
    return _ENCODER.encode((time, msgspec.Raw(events), rank))


CLEARED = _ENCODER.encode([AllBlocksCleared()])


def _wire_form(event: KVEvent, block_size: int) -> BlockStored | BlockRemoved | AllBlocksCleared:
    if isinstance(event, BlocksStored):
        hashes = [block_hash(digest) for digest in event.digests]
        parent = block_hash(event.parent) if event.parent is not None else None
        is_text = b"".join(event.records) == text_records(event.token_ids)  # a quick look: most are
        extra_keys = None if is_text else [_media_keys(records) for records in event.records]
        return BlockStored(hashes, parent, event.token_ids, block_size, None, event.medium, None, extra_keys)
    if isinstance(event, BlocksRemoved):
        return BlockRemoved([block_hash(digest) for digest in event.digests], event.medium)
    return AllBlocksCleared()


def block_hash(digest: bytes) -> int:
    """Routers keep 64 bits: the last ones, as vLLM cuts its own SHA-256 digests."""
    return int.from_bytes(digest[-8:], "big")


def _media_keys(records: bytes) -> list[MediaKey] | None:
    """Keys of the images in a block; None for text."""
    keys: list[MediaKey] = []
    count = len(records) // _RECORD.size
    last_key, last_offset = _RECORD.unpack_from(records, (count - 1) * _RECORD.size)
    previous: tuple[bytes, int] | None = None
    for position in range(count):
        key, offset = _RECORD.unpack_from(records, position * _RECORD.size)
        image = (key, position - offset)
        if key != _NO_KEY and image != previous:
            keys.append((key.hex(), position - offset))
            if image == (last_key, count - 1 - last_offset):
                break  # it fills the rest of the block, as nearly always
            previous = image
    return keys or None
