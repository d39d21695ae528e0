"""Frame groups of which few embeddings stay: budget and pace count what the tower makes, the cache what stays."""

from __future__ import annotations

import pytest

from saccade.errors import RequestError
from saccade.types.latency import LatencyProfile
from tests.helpers.engine.scheduling import FakeImage, Rig, names

GROUPS = [FakeImage(name, 3, made=12) for name in "abcd"]  # a quarter stays
WHOLE = [FakeImage(name, 12) for name in "abcd"]


def encoded(rig: Rig) -> list[list[str]]:
    """By step, until all is done."""
    rig.drain()
    return [names(plan.encode, *"abcd") for plan in rig.plans if plan.encode]


def test_a_step_gives_the_tower_as_many_pruned_groups_as_whole_ones() -> None:
    steps = []
    for groups in (GROUPS, WHOLE):
        rig = Rig(encoder_budget=24)
        rig.add("video", *groups, 2)
        steps.append(encoded(rig))
    assert steps[0] == steps[1] == [["a", "b"], ["c", "d"]]


def test_a_window_ends_before_the_group_that_the_tower_has_no_time_for() -> None:
    rig = Rig(encoder_budget=30)
    rig.add("video", 1, *GROUPS, 2)
    assert rig.windows(rig.step()) == {"video": (0, 7)}


def test_the_cache_counts_what_stays() -> None:
    rig = Rig(encoder_budget=12, encoder_cache_slots=12)
    rig.add("video", *GROUPS, 2)
    assert encoded(rig) == [["a"], ["b"], ["c"], ["d"]]
    stats = rig.scheduler.stats()["encoder_cache"]
    assert (stats["slots_used"], stats["entries"], stats["evictions"]) == (12, 4, 0)


def test_looking_ahead_in_slices_keeps_to_the_budget_of_whole_groups() -> None:
    rig = Rig(encoder_budget=24, encode_layers_per_step=1, is_bounded=True)
    rig.add("video", *GROUPS, 2)
    rig.add("other", FakeImage("e", 3), 2)
    rig.step()
    assert names(rig.plans[0].encode, *"abcde") == ["a", "b"]
    assert not rig.step().encode  # nothing has landed, and the small picture does not pass the groups in front of it
    rig.drain()
    assert rig.finish_of("video") == rig.finish_of("other") == "length"


def test_no_more_is_decoded_ahead_than_a_step_may_encode() -> None:
    rig = Rig(encoder_budget=24, max_num_batched_tokens=3)
    rig.add("video", *GROUPS, 2)
    plan = rig.step()
    assert names(plan.encode, *"abcd") == ["a"]
    assert names(plan.prefetch, *"abcd") == ["b", "c"]


def test_the_pace_is_that_of_whole_groups() -> None:
    """Beside running answers a layer over what stays would look four times as quick as it is."""
    latency = LatencyProfile(
        decode_ms=((1, 1.0),), prefill_ms=((64, 1.0),), layer_ms=((3, 0.1), (12, 0.4)), ceiling_ms=2.2
    )
    layers = []
    for groups in (GROUPS, WHOLE):
        rig = Rig(encoder_budget=12, latency=latency, layers=50)
        rig.add("answer", 4, max_tokens=40)
        rig.step()
        rig.add("video", *groups, 2, first_token=500)
        layers.append([rig.step().encode_layers for _ in range(3)])
    assert layers[0] == layers[1] == [3, 3, 3]


def test_a_group_that_the_tower_may_not_see_whole_is_refused_with_the_number() -> None:
    with pytest.raises(RequestError, match="has 12 embeddings, but 11 may be encoded in one step"):
        Rig(encoder_budget=11).add("video", GROUPS[0])
    with pytest.raises(RequestError, match="has 3 embeddings, but 2 fit in the encoder cache"):
        Rig(encoder_cache_slots=2).add("video", GROUPS[0])


def test_what_was_in_flight_when_a_step_broke_is_not_counted_any_more() -> None:
    rig = Rig(encoder_budget=24, encode_layers_per_step=1, is_bounded=True)
    rig.add("video", *GROUPS, 2)
    rig.step()
    rig.scheduler.fail_all(RequestError("the step broke"), rig.now)
    rig.runner.reset()
    rig.scheduler.check()
    rig.add("again", *GROUPS, 2)
    rig.drain()
    assert rig.finish_of("again") == "length"


def test_a_group_that_cannot_be_decoded_gives_its_share_of_the_budget_back() -> None:
    rig = Rig(broken=["a"], encoder_budget=12, encode_layers_per_step=1, is_bounded=True)
    rig.add("bad", GROUPS[0], 2)
    rig.add("good", GROUPS[1], 2)
    rig.drain()
    assert (rig.finish_of("bad"), rig.finish_of("good")) == ("error", "length")
