"""KV events: after any workload a router that decodes them with vLLM's classes knows exactly the blocks there are."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.ipc.kv_events import block_hash, encode_batch, encode_events
from saccade.errors import RequestError
from saccade.scheduler.kv_event_log import KVEventLog
from saccade.types.prompt import RECORD_BYTES
from tests.helpers.engine.random_workloads import BROKEN, CONFIGS, REQUESTS, drive
from tests.helpers.engine.scheduling import PLACEHOLDER, FakeImage, Rig, key_of
from tests.helpers.servers.kv_event_reader import Index

ROOTS = {hashlib.sha256(salt).digest() for salt in (b"", b"other")}  # of the salts in REQUESTS


class LoggingRig(Rig):
    """A router reads after every step, as the engine's loop sends."""

    def __init__(self, **how: object) -> None:
        super().__init__(**how)  # type: ignore[arg-type]
        self.log = self.scheduler.log_kv_events()
        self.index = Index()

    def step(self) -> object:
        plan = super().step()
        self.tell()
        return plan

    def tell(self) -> None:
        events = encode_events(self.log.take(), self.config.block_size)
        if events:
            self.index.apply(encode_batch(1.0, events, 0))

    def compare(self) -> None:
        self.scheduler.index()
        self.tell()
        pool = self.scheduler._kv_cache
        assert self.index.device.keys() == {block_hash(digest) for digest in pool.prefixes.by_digest}
        assert self.index.host == {block_hash(digest) for digest in pool.host.index.by_digest}
        for digest, cached in pool.prefixes.by_digest.items():
            block = self.index.device[block_hash(digest)]
            assert block.parent == (None if cached.parent in ROOTS else block_hash(cached.parent))
            assert (block.token_ids, list(block.extra_keys or ())) == told_by(cached.records)


def told_by(records: bytes) -> tuple[list[int], list]:
    """Token ids and images of a block, one position after the other."""
    ids = []
    images: list = []
    for position in range(len(records) // RECORD_BYTES):
        record = records[position * RECORD_BYTES : (position + 1) * RECORD_BYTES]
        number = int.from_bytes(record[32:], "little")
        is_text = record[:32] == bytes(32)
        ids.append(number if is_text else PLACEHOLDER)
        image = [record[:32].hex(), position - number]
        if not is_text and image not in images:
            images.append(image)
    return ids, images


@settings(max_examples=60, deadline=None)
@given(config=CONFIGS, requests=st.lists(REQUESTS, min_size=1, max_size=6), more=st.lists(REQUESTS, max_size=4))
def test_a_router_knows_the_blocks_there_are(config: dict, requests: list, more: list) -> None:
    rig = LoggingRig(broken=[BROKEN.name], **config)
    drive(rig, requests)
    rig.compare()
    drive(rig, more)
    rig.compare()


def test_a_broken_step_clears_everything() -> None:
    rig = LoggingRig(host_blocks=50, num_blocks=20)
    for number in range(4):
        rig.add(str(number), [number] * 40)
        rig.drain()
    rig.compare()
    assert rig.index.device and rig.index.host
    rig.scheduler.fail_all(RequestError("the step broke"), rig.now)
    rig.compare()
    assert not rig.index.device and rig.index.num_cleared == 2  # the first when it began


def test_images_are_named_with_their_start_in_each_block() -> None:
    rig = LoggingRig()
    rig.add("a", 2, FakeImage("p", 5), FakeImage("p", 3), 6, max_tokens=1)
    rig.drain()
    rig.compare()
    p = key_of("p").hex()
    first, second, third, fourth = rig.index.device.values()
    assert first.extra_keys == ([p, 2],) and first.token_ids == [100, 101, PLACEHOLDER, PLACEHOLDER]
    assert second.extra_keys == ([p, -2], [p, 3])
    assert third.extra_keys == ([p, -1],)
    assert fourth.extra_keys is None


def test_generated_tokens_are_told_too() -> None:
    rig = LoggingRig()
    rig.add("a", 6, max_tokens=8)
    rig.drain()
    rig.compare()
    told = [token for block in rig.index.device.values() for token in block.token_ids]
    assert told == [*range(100, 106), *rig.tokens_of("a")[:6]]


def test_blocks_that_follow_each_other_are_one_event() -> None:
    rig = Rig()
    log = rig.scheduler.log_kv_events()
    rig.add("a", 400, max_tokens=1)
    rig.drain()
    _, stored = log.take()
    assert len(stored.digests) == 100  # type: ignore[union-attr]
    assert log.take() == []


def test_without_a_flag_nothing_is_logged() -> None:
    rig = Rig()
    rig.add("a", 40)
    rig.drain()
    assert rig.scheduler._kv_cache.events is None and rig.scheduler._kv_cache.host.events is None


def test_a_log_begins_with_all_blocks_cleared() -> None:
    assert len(KVEventLog().take()) == 1
