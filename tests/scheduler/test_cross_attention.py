"""Pictures that later tokens look at too: pinned as long as someone reads them, wherever the work is cut."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saccade.errors import RequestError
from saccade.processor.families.base import cross_attended
from saccade.scheduler.encoder_cache import EncoderCache
from saccade.scheduler.encoder_scheduler import EncoderScheduler
from saccade.scheduler.request import ScheduledRequest
from saccade.scheduler.tenant_share import TenantShare
from saccade.types.prompt import TO_THE_END, Span
from tests.helpers.engine.random_workloads import CONFIGS
from tests.helpers.engine.scheduling import BLOCK, EOS, Part, Rig, key_of, make_request, names, seen


def pinned(rig: Rig) -> int:
    return int(rig.scheduler.stats()["encoder_cache"]["slots_pinned"])


def cached(rig: Rig, request_id: str) -> int:
    usage = rig.events[request_id][-1].usage
    assert usage is not None
    return usage.cached_tokens


# --- which tokens read a picture ----------------------------------------------------------------------------------


def test_a_image_is_read_until_the_next_and_neighbours_go_together() -> None:
    at = [Span(start, 1, bytes([start]) * 32, 8) for start in (2, 6, 7, 12)]
    assert [span.pinned_until for span in cross_attended(at)] == [6, 12, 12, TO_THE_END]


def test_a_span_without_later_readers_is_needed_to_its_own_end() -> None:
    span = Span(3, 4, bytes(32), 4)
    assert span.pinned_until == span.end == 7 and not span.is_cross_attended


# --- pins ---------------------------------------------------------------------------------------------------------


def test_the_pin_stays_while_the_answer_is_decoded_and_goes_with_the_request() -> None:
    rig = Rig()
    rig.add("a", 3, seen("p"), 5, max_tokens=4)
    for _ in range(3):
        rig.step()
        assert pinned(rig) == 8
    rig.drain()
    assert pinned(rig) == 0 and rig.scheduler.stats()["encoder_cache"]["slots_idle"] == 8


def test_a_image_is_given_back_when_the_next_one_takes_its_place() -> None:
    rig = Rig(max_num_batched_tokens=4)
    rig.add("a", seen("p"), 7, seen("q"), 7, max_tokens=2)
    held = []
    while rig.scheduler.has_unfinished():
        rig.step()
        held.append(set(rig.scheduler._encoder_cache._held.values()))
    assert held[0] == {key_of("p")} and held[2] == {key_of("q")}


def test_a_request_that_shares_the_whole_prompt_still_pins_its_image() -> None:
    rig = Rig()
    rig.add("a", seen("p"), 11, max_tokens=1)
    rig.drain()
    rig.add("b", seen("p"), 11, max_tokens=4)
    rig.step()
    assert pinned(rig) == 8
    rig.drain()
    assert cached(rig, "b") == 8 and rig.runner.encoded == [key_of("p")]


def test_a_image_evicted_since_is_encoded_again_although_its_prefix_is_found() -> None:
    rig = Rig(encoder_cache_slots=8)
    for name, image in (("a", "p"), ("b", "q"), ("c", "p")):
        rig.add(name, seen(image), 11, max_tokens=2)
        rig.drain()
    assert cached(rig, "c") == 8
    assert rig.runner.encoded == [key_of("p"), key_of("q"), key_of("p")]


def test_a_image_that_the_found_prefix_ends_behind_is_not_encoded() -> None:
    rig = Rig(encoder_cache_slots=8)
    rig.add("a", seen("p"), 7, seen("q"), 7, max_tokens=1)
    rig.drain()
    rig.add("b", seen("p"), 7, seen("q"), 7, max_tokens=3)
    rig.drain()
    assert cached(rig, "b") == 12
    assert rig.runner.encoded == [key_of("p"), key_of("q")], "nobody reads the first one again"


def test_preemption_releases_the_pin_and_resumption_takes_it_again() -> None:
    rig = Rig(num_blocks=8, encoder_cache_slots=100)
    rig.add("a", seen("p"), 9, max_tokens=12, ignore_eos=True)
    rig.add("b", seen("q"), 9, max_tokens=12, ignore_eos=True)
    rig.drain()
    assert rig.scheduler.stats()["preemptions"] > 0
    assert rig.finish_of("a") == rig.finish_of("b") == "length"


def test_while_one_reads_a_image_another_cannot_take_its_room() -> None:
    rig = Rig(encoder_cache_slots=8)
    rig.add("a", seen("p"), 3, max_tokens=5)
    rig.add("b", 2, seen("q"), 3, max_tokens=1)
    rig.add("text", 4, max_tokens=1)
    first = rig.step()
    assert rig.windows(first)["b"] == (0, 2), "the text before its picture runs"
    assert "text" in rig.events, "others go on"
    for _ in range(3):
        assert set(rig.windows(rig.step())) == {"a"}
    rig.drain()
    assert rig.finish_of("b") == "length"


def test_a_image_that_fails_when_encoded_again_ends_only_its_request() -> None:
    rig = Rig(encoder_cache_slots=8)
    rig.add("a", seen("p"), 11, max_tokens=1)
    rig.drain()
    rig.add("b", seen("q"), 11, max_tokens=1)
    rig.drain()
    rig.runner.broken = {key_of("p")}
    rig.add("c", seen("p"), 11, max_tokens=3)
    rig.add("d", 5, max_tokens=3)
    rig.drain()
    assert rig.finish_of("c") == "error" and rig.finish_of("d") == "length"


# --- standing in each other's way ---------------------------------------------------------------------------------


def held_up(**changes: Any) -> Rig:
    """Each has its first picture and lacks room for its second, as long as the other holds its own."""
    rig = Rig(encoder_cache_slots=18, encoder_budget=12, **changes)
    rig.add("a", seen("p"), seen("q"), 3, max_tokens=2)
    rig.add("b", seen("r", 4), seen("s"), 3, max_tokens=2)
    assert rig.windows(rig.step()) == {"a": (0, 1), "b": (0, 1)}
    return rig


def test_of_two_requests_that_each_hold_what_the_other_needs_the_later_gives_way() -> None:
    rig = held_up()
    rig.drain(20)
    assert rig.finish_of("a") == rig.finish_of("b") == "length"
    assert [rig.events[name][-1].usage.num_preemptions for name in "ab"] == [0, 1]


def test_a_stream_of_text_does_not_hide_that_two_requests_wait_for_each_other() -> None:
    rig = held_up()
    for number in range(20):
        rig.add(f"text{number}", 3, max_tokens=3)
        rig.step()
    assert rig.finish_of("a") == rig.finish_of("b") == "length"


def test_who_stands_in_line_for_room_does_not_bar_the_request_that_holds_it() -> None:
    cache = EncoderCache(24)
    encoder_scheduler = EncoderScheduler(cache, encoder_budget=24)
    share = TenantShare()
    early = ScheduledRequest(make_request("early", seen("large", 20), 2), 0, 0.0, BLOCK, share)
    late = ScheduledRequest(make_request("late", seen("p", 6), seen("q", 6), 2), 1, 0.0, BLOCK, share)
    other = ScheduledRequest(make_request("other", seen("r", 6), 2), 2, 0.0, BLOCK, share)
    encoder_scheduler.begin_step(is_sliced=False)
    encoder_scheduler.enter(late, encoder_scheduler.window_limit(late, 0, 1).spans)
    assert encoder_scheduler.window_limit(early, 0, 3).end == 0
    assert encoder_scheduler.window_limit(late, 1, 4).end == 4
    assert encoder_scheduler.window_limit(other, 0, 3).end == 0, "who holds nothing waits behind it"


def test_images_side_by_side_that_can_never_be_resident_together_are_refused_with_the_numbers() -> None:
    rig = Rig(encoder_cache_slots=20)
    with pytest.raises(RequestError, match=r"3 pictures .* 24 embeddings, but 20 fit") as caught:
        rig.add("a", seen("p"), seen("q"), seen("r"), 3)
    assert caught.value.code == "image_too_large"
    rig.add("apart", seen("p"), 1, seen("q"), 1, seen("r"), 3)
    rig.add("twice", seen("p"), seen("p"), seen("p"), 3)
    rig.drain()
    assert rig.finish_of("apart") == rig.finish_of("twice") == "length"


def test_images_of_waiting_requests_are_encoded_ahead_even_where_their_prefix_is_found() -> None:
    rig = Rig(encoder_cache_slots=40, max_num_seqs=1, encode_layers_per_step=4)
    for name in ("p", "q"):
        rig.add(name, seen(name), 11, max_tokens=1)
        rig.drain()
    rig.add("more", seen("x", 40), 11, max_tokens=1)  # throws both out
    rig.drain()
    rig.add("text", 3, max_tokens=9, ignore_eos=True)
    rig.step()
    rig.add("again", seen("p"), 11, max_tokens=1)
    assert names(rig.step().encode, "p", "q", "x") == ["p"]
    rig.drain()


def test_images_of_a_found_prefix_are_brought_back_in_as_many_steps_as_the_encoder_needs() -> None:
    rig = Rig(encoder_budget=12, encoder_cache_slots=25, keep_idle_embeddings=False)
    parts = (seen("p", 6), seen("q", 9), 11)
    rig.add("a", *parts, max_tokens=1)
    rig.drain()
    rig.add("b", *parts, max_tokens=2)
    first = rig.step()
    assert names(first.encode, "p", "q") == ["p"] and not first.windows, "no token can be computed yet"
    assert names(rig.step().encode, "p", "q") == ["q"]
    rig.drain(10)
    assert cached(rig, "b") == 12 and rig.finish_of("b") == "length"


# --- random workloads ---------------------------------------------------------------------------------------------

IMAGES = [seen("a", 3), seen("b", 3), seen("c", 6), seen("d", 9), seen("broken", 5)]
PARTS = st.one_of(st.integers(1, 9), st.sampled_from(IMAGES))
REQUESTS = st.tuples(
    st.lists(PARTS, min_size=1, max_size=6),
    st.integers(1, 12),  # max_tokens
    st.integers(0, 12),  # the step at which it arrives
    st.one_of(st.none(), st.integers(0, 20)),  # the step at which its client leaves
)


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIGS, st.lists(REQUESTS, min_size=1, max_size=14))
def test_any_workload_of_lasting_images_drains_and_leaves_nothing_held(config: dict, requests: list) -> None:
    rig = Rig(broken=["broken"], **config)
    accepted: list[str] = []
    for moment in range(21):
        for number, (parts, max_tokens, arrival, leaving) in enumerate(requests):
            if arrival == moment:
                try:
                    rig.add(f"r{number}", *parts, max_tokens=max_tokens)
                    accepted.append(f"r{number}")
                except RequestError as error:
                    assert "KV blocks" in error.message or "stand together" in error.message
            if leaving == moment:
                rig.take(rig.scheduler.abort(f"r{number}", rig.now))
        rig.step()
    rig.drain()
    rig.step()
    assert all(Counter(bool(e.finish_reason) for e in rig.events[name])[True] == 1 for name in accepted)
    assert pinned(rig) == rig.scheduler.stats()["kv"]["used"] == 0 and not rig.runner.requests


@pytest.mark.parametrize("sliced", [None, 1])
@pytest.mark.parametrize("seed", range(3))
def test_long_streams_through_a_tiny_cache_drain(seed: int, sliced: int | None) -> None:
    rng = random.Random(seed)
    rig = Rig(
        broken=["broken"],
        max_num_batched_tokens=16,
        max_num_seqs=5,
        num_blocks=24,
        encoder_budget=12,
        encoder_cache_slots=rng.choice([18, 24]),
        encode_layers_per_step=sliced,
    )
    rig.runner.next_token = lambda _, position: EOS if rng.random() < 0.1 else 1_000 + position % 3
    accepted = []
    for number in range(120):
        parts: list[Part] = [rng.choice([rng.randint(1, 8), rng.choice(IMAGES[:4])]) for _ in range(rng.randint(1, 5))]
        try:
            rig.add(f"r{number}", *parts, max_tokens=rng.randint(1, 30))
            accepted.append(f"r{number}")
        except RequestError as error:
            assert "stand together" in error.message
        if rng.random() < 0.7:
            rig.step()
    rig.drain()
    assert all(rig.finish_of(name) in ("stop", "length") for name in accepted) and len(accepted) > 100
