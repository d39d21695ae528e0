"""A router's side of KV events: vLLM's classes as it defines them, and an index that is built from what arrives."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import zmq

# As in vLLM 0.26 (vllm/distributed/kv_events.py). Defined again here, so that the two forms are compared.


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_DECODER = msgspec.msgpack.Decoder(Batch)


class Block(NamedTuple):
    parent: int | None
    token_ids: list[int]
    extra_keys: tuple[Any, ...] | None


class Index:
    """What a router knows of one engine. Every event must fit what came before it."""

    def __init__(self) -> None:
        self.device: dict[int, Block] = {}
        self.host: set[int] = set()
        self.known: set[int] = set()  # on the device now or before
        self.num_cleared = 0
        self.rank: int | None = None

    def apply(self, payload: bytes) -> None:
        batch = _DECODER.decode(payload)
        assert batch.events, "an empty batch"
        self.rank = batch.data_parallel_rank
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.device = {}
                self.host = set()
                self.known = set()
                self.num_cleared += 1
            elif isinstance(event, BlockRemoved):
                held: Any = {"GPU": self.device, "CPU": self.host}[event.medium or ""]
                for name in event.block_hashes:
                    assert name in held, "a block is removed that was not there"
                    held.pop(name) if event.medium == "GPU" else held.remove(name)
            elif event.medium == "CPU":
                assert not event.token_ids and not self.host & set(event.block_hashes)
                assert self.device.keys() >= set(event.block_hashes), "a block that no event has told of before"
                self.host |= set(event.block_hashes)
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        assert event.medium == "GPU"
        parent = event.parent_block_hash
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        extra_keys = event.extra_keys or [None] * len(event.block_hashes)
        assert len(extra_keys) == len(event.block_hashes)
        for index, (name, keys) in enumerate(zip(event.block_hashes, extra_keys, strict=True)):
            assert name not in self.device, "a block is stored twice"
            assert parent is None or parent in self.known, "no event has told of the parent"
            self.known.add(name)
            self.device[name] = Block(parent, event.token_ids[index * size : (index + 1) * size], keys)
            parent = name


class Reader:
    """Subscribes, and asks for what it missed, as Dynamo's indexer does."""

    def __init__(self, publish: str, replay: str, topic: bytes = b"") -> None:
        self.index = Index()
        self.next = 0  # number
        self._context = zmq.Context()
        self._subscription = self._context.socket(zmq.SUB)
        self._subscription.subscribe(topic)
        self._subscription.connect(publish)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay)

    def read(self) -> bool:
        """One batch, and those before it that did not come; False if none comes soon: the subscription may be late."""
        if not self._subscription.poll(200):
            return False
        _, number, payload = self._subscription.recv_multipart()
        if int.from_bytes(number, "big") > self.next:
            self.replay()
        if int.from_bytes(number, "big") == self.next:
            self.index.apply(payload)
            self.next += 1
        return True

    def replay(self) -> list[int]:
        """All that is kept from the next number on; returns the numbers."""
        self._replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        numbers = []
        while True:
            assert self._replay.poll(20_000), "the replay has no end"
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if not payload:
                assert number == b"\xff" * 8
                return numbers
            numbers.append(int.from_bytes(number, "big"))
            if numbers[-1] == self.next:
                self.index.apply(payload)
                self.next += 1

    def close(self) -> None:
        self._context.destroy(linger=0)
