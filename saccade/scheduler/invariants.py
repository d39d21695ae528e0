"""What holds between steps: caches agree with what requests hold; only running requests hold anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from saccade.scheduler.encoder_cache import EncoderCache
from saccade.scheduler.kv_cache import BlockPool
from saccade.scheduler.request import ScheduledRequest


def check_held(requests: Collection[ScheduledRequest], pool: BlockPool, encoder_cache: EncoderCache) -> None:
    users = Counter(block for seq in requests for block in seq.held_blocks)
    assert pool.users() == users, "users miscounted"
    holders = {seq.holder(index) for seq in requests for index in seq.pins}
    assert holders == encoder_cache.holders(), "pins miscounted"


def check_running(
    requests: Collection[ScheduledRequest], running: Sequence[ScheduledRequest], max_running: int
) -> None:
    """`running` is in order of arrival, as all requests are; each has the blocks it needs."""
    assert running == [seq for seq in requests if seq.is_running], "wrong order"
    idle = [seq for seq in requests if not seq.is_running]
    assert not any(seq.blocks or seq.pins for seq in idle), "a waiting request holds something"
    for seq in running:
        seq.check()
    assert len(running) <= max_running, "too many requests run"
