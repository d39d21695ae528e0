"""Random workloads for the scheduler, and what must hold once they have drained."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from saccade.errors import RequestError
from saccade.types.attention_reach import AttentionReach
from saccade.types.request import NO_TENANT, Tenant
from tests.helpers.engine.scheduling import FakeImage, Rig

IMAGES = [
    FakeImage("a", 3),
    FakeImage("b", 3),
    FakeImage("c", 6),
    FakeImage("d", 9, 7),
    FakeImage("e", 12),
    FakeImage("f", 3, made=12),
]
BROKEN = FakeImage("broken", 5)
PARTS = st.one_of(
    st.integers(1, 9),
    st.lists(st.integers(100, 101), min_size=1, max_size=6),
    st.sampled_from([*IMAGES, BROKEN]),
)
REQUESTS = st.tuples(
    st.lists(PARTS, min_size=1, max_size=5),
    st.integers(1, 12),  # max_tokens
    st.integers(0, 12),  # the step at which it arrives
    st.one_of(st.none(), st.integers(0, 20)),  # the step at which its client leaves
    st.sampled_from([b"", b"", b"other"]),
)
CONFIGS = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([1, 3, 8, 30, 200]),
        "max_num_seqs": st.integers(1, 6),
        "block_size": st.sampled_from([1, 2, 4]),
        "num_blocks": st.sampled_from([20, 40, 300]),
        "encoder_budget": st.sampled_from([12, 20, 100]),
        "encoder_cache_slots": st.sampled_from([12, 15, 25, 100]),
        "keep_idle_embeddings": st.booleans(),
        "enable_prefix_caching": st.booleans(),
        "encode_layers_per_step": st.sampled_from([None, 1, 3]),
        "is_bounded": st.booleans(),
        "reach": st.sampled_from(
            [None, None, AttentionReach(1), AttentionReach(6), AttentionReach(6, has_prompt=True)]
        ),
        "host_blocks": st.sampled_from([0, 0, 3, 20, 200]),
        "min_restored_blocks": st.sampled_from([1, 3]),
    }
)


def drive(rig: Rig, requests: list, senders: Sequence[tuple[Tenant, int]] = ()) -> list[str]:
    """Feed arrivals and departures at their steps, then let everything drain. Senders: tenant and priority of each."""
    accepted: list[str] = []
    for moment in range(21):
        for number, (parts, max_tokens, arrival, leaving, salt) in enumerate(requests):
            if arrival == moment:
                tenant, priority = senders[number] if senders else (NO_TENANT, 0)
                whose = {"tenant": tenant, "priority": priority}
                try:
                    rig.add(f"r{number}", *parts, max_tokens=max_tokens, salt=salt, **whose)
                    accepted.append(f"r{number}")
                except RequestError as error:
                    assert "KV blocks" in error.message
            if leaving == moment:
                rig.take(rig.scheduler.abort(f"r{number}", rig.now))
        rig.step()
    rig.drain()
    rig.step()  # the runner hears of the last endings
    return accepted


def assert_nothing_is_held(rig: Rig) -> None:
    stats = rig.scheduler.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["kv"]["used"] == 0
    assert stats["encoder_cache"]["slots_pinned"] == 0
    assert not rig.runner.requests, "the runner was not told to forget a request"
