"""The scheduler's rules for windows and pictures, one by one, with a fake runner that checks every plan."""

from __future__ import annotations

import pytest

from tests.helpers.engine.scheduling import FakeImage, Rig, key_of, names

CAT, DOG, OWL = FakeImage("cat", 8), FakeImage("dog", 8), FakeImage("owl", 8)
KNOWN = ("cat", "dog", "owl")


def encoder_stats(rig: Rig) -> dict[str, int]:
    return rig.scheduler.stats()["encoder_cache"]


# --- windows ----------------------------------------------------------------------------------------------------------


def test_a_text_request_is_computed_then_decodes_one_token_a_step() -> None:
    rig = Rig()
    rig.add("r", 10, max_tokens=3)
    windows = [rig.windows(rig.step())["r"] for _ in range(3)]
    assert windows == [(0, 10), (10, 11), (11, 12)]
    assert rig.finish_of("r") == "length"


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.add("r", 40, max_tokens=1)
    rig.drain()
    assert [rig.windows(plan)["r"] for plan in rig.plans] == [(0, 16), (16, 32), (32, 40)]


def test_only_the_window_that_reaches_the_last_token_samples() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.add("r", 20, max_tokens=1)
    rig.drain()
    assert [plan.windows[0].samples for plan in rig.plans] == [False, True]


def test_running_requests_come_before_waiting_ones_in_the_token_budget() -> None:
    rig = Rig(max_num_batched_tokens=10)
    rig.add("old", 4, max_tokens=5)
    rig.step()
    rig.add("new", [7] * 30)
    assert rig.windows(rig.step()) == {"old": (4, 5), "new": (0, 9)}


def test_no_more_requests_run_than_allowed() -> None:
    rig = Rig(max_num_seqs=2)
    for name in "abc":
        rig.add(name, 4)
    assert set(rig.windows(rig.step())) == {"a", "b"}
    assert rig.scheduler.stats()["waiting"] == 1


def test_a_image_beyond_the_window_touches_neither_the_item_nor_the_chunk() -> None:
    rig = Rig(max_num_batched_tokens=2048)
    rig.add("r", 5000, FakeImage("far", 500))
    rig.step()
    plan = rig.step()
    assert rig.windows(plan) == {"r": (2048, 4096)}
    assert plan.encode == ()
    assert encoder_stats(rig)["slots_used"] == 0
    assert names(rig.step().encode, "far") == ["far"]


def test_a_window_may_end_inside_a_image() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("r", 4, CAT, 3)
    assert rig.windows(rig.step()) == {"r": (0, 8)}
    assert encoder_stats(rig)["slots_pinned"] == 8
    assert rig.windows(rig.step()) == {"r": (8, 15)}
    assert encoder_stats(rig)["slots_pinned"] == 0


def test_a_window_may_be_told_to_end_before_a_image_that_fits_in_part() -> None:
    rig = Rig(max_num_batched_tokens=8, encoder_budget=16, disable_chunked_mm_input=True)
    rig.add("r", 4, CAT, 2, FakeImage("long", 12), 1, max_tokens=1)
    rig.drain()
    windows = [rig.windows(plan)["r"] for plan in rig.plans]
    assert windows == [(0, 4), (4, 12), (12, 14), (14, 22), (22, 27)]  # what no step can hold is cut all the same


def test_a_reset_prefix_cache_finds_nothing_again() -> None:
    rig = Rig()
    for name in ("first", "again", "after"):
        rig.add(name, 16, max_tokens=1)
        rig.drain()
        if name == "again":
            assert rig.scheduler.stats()["prefix_cache"]["hits"] == 12
            rig.scheduler.reset_prefix_cache()
    assert rig.scheduler.stats()["prefix_cache"]["hits"] == 12
    rig.scheduler.check()


def test_an_embedding_is_pinned_until_its_span_is_computed_and_idle_afterwards() -> None:
    rig = Rig(max_num_batched_tokens=6)
    rig.add("r", 4, CAT, 8)
    rig.step()
    assert encoder_stats(rig)["slots_pinned"] == 8
    rig.step()
    assert (encoder_stats(rig)["slots_pinned"], encoder_stats(rig)["slots_idle"]) == (0, 8)


# --- encoder budget and cache room ------------------------------------------------------------------------------------


def test_when_the_encoder_budget_is_used_up_text_goes_on_and_the_image_enters_next_step() -> None:
    rig = Rig(encoder_budget=10)
    rig.add("r", 4, CAT, 3, DOG, 2)
    plan = rig.step()
    assert rig.windows(plan) == {"r": (0, 15)}
    assert names(plan.encode, *KNOWN) == ["cat"]
    plan = rig.step()
    assert rig.windows(plan) == {"r": (15, 25)}
    assert names(plan.encode, *KNOWN) == ["dog"]


def test_when_the_cache_is_full_a_image_enters_as_soon_as_someone_releases() -> None:
    rig = Rig(encoder_cache_slots=12, max_num_batched_tokens=10)
    rig.add("first", 4, CAT, 2)
    rig.add("second", 1, DOG, 2)
    assert rig.windows(rig.step()) == {"first": (0, 10)}
    assert rig.windows(rig.step()) == {"first": (10, 14), "second": (0, 1)}, "the cat is still pinned"
    plan = rig.step()
    assert names(plan.encode, *KNOWN) == ["dog"]
    assert plan.evicted == (key_of("cat"),)


def test_a_image_that_waits_for_room_does_not_stop_text_behind_it() -> None:
    rig = Rig(encoder_cache_slots=12, max_num_batched_tokens=10)
    rig.add("first", 4, CAT, 2)
    rig.step()
    rig.add("blocked", DOG, 2)
    rig.add("text", 3)
    assert set(rig.windows(rig.step())) == {"first", "text"}
    assert set(rig.windows(rig.step())) == {"first", "text", "blocked"}


def test_a_waiting_request_kept_by_its_image_holds_nothing() -> None:
    rig = Rig(encoder_cache_slots=12, max_num_batched_tokens=10)
    rig.add("first", 4, CAT, 2)
    rig.step()
    used = rig.scheduler.stats()["kv"]["used"]
    rig.add("blocked", DOG, 2)
    rig.scheduler.schedule(rig.now)
    assert rig.scheduler.stats()["waiting"] == 1
    assert rig.scheduler.stats()["kv"]["used"] == used + 1, "only the running request grew"


def steps_until_served(rig: Rig, lead: int, image: int, tail: int, *, is_fresh: bool) -> int:
    """How long a picture of 12 slots at the very start of a prompt waits in a stream of smaller ones.

    19 tokens a step remain beside the decoding request and each small request has 19, shifted by nine: there is always
    one that runs already and comes before whoever waits.
    """
    rig.add("decoding", 2, max_tokens=900)
    rig.step()
    rig.add("shift", [5] * 9, max_tokens=1)
    for number in range(100):
        name = f"s{number}" if is_fresh else "s"
        rig.add(f"r{number}", lead, FakeImage(name, image), tail, max_tokens=1, first_token=1000 * (number + 1))
        if number == 4:
            rig.add("large", FakeImage("large", 12), 1, max_tokens=1)
        rig.step()
        if "large" in rig.events:
            return number - 4
    raise AssertionError("the large picture starved")


def test_a_stream_of_images_cannot_keep_the_encoder_budget_from_a_large_one() -> None:
    rig = Rig(encoder_budget=12, max_num_batched_tokens=20)
    assert steps_until_served(rig, 14, 4, 1, is_fresh=True) <= 3


def test_of_images_that_have_just_come_only_those_are_missing_whose_turn_is_soon() -> None:
    """The others would be decoded, forgotten with the next step's guesses, and decoded again."""
    rig = Rig(encoder_budget=8)
    missing = []
    for name in "abc":
        rig.add(name, FakeImage(name, 3), 2)
        missing.append([item.key for item in rig.scheduler.missing(name)])
    assert missing == [[key_of("a")], [key_of("b")], []]


def test_images_behind_one_that_was_refused_go_on_as_soon_as_it_is_served() -> None:
    rig = Rig(encoder_budget=8)
    for name in "abcdefg":
        rig.add(name, FakeImage(name, 3), 2)
    assert [len(rig.step().encode) for _ in range(4)] == [2, 2, 2, 1]


@pytest.mark.parametrize("sliced", [None, 1])
def test_a_stream_of_hits_cannot_keep_cache_room_from_a_large_image(sliced: int | None) -> None:
    rig = Rig(encoder_cache_slots=12, max_num_batched_tokens=20, encode_layers_per_step=sliced, layers=1)
    assert steps_until_served(rig, 6, 8, 5, is_fresh=False) <= 3


def test_entering_a_resident_image_never_evicts_another_of_the_same_window() -> None:
    rig = Rig(encoder_cache_slots=24, enable_prefix_caching=False)
    rig.add("warm", CAT, DOG, OWL, 1, max_tokens=1)
    rig.drain()
    rig.add("r", FakeImage("new", 8), CAT, 1, DOG, 1, max_tokens=1)
    plan = rig.step()
    assert names(plan.encode, "new") == ["new"]
    assert plan.evicted == (key_of("owl"),)


# --- a picture is worked on once --------------------------------------------------------------------------------------


def test_the_same_image_in_two_requests_of_one_step_is_encoded_once() -> None:
    rig = Rig()
    rig.add("a", 3, CAT, 2)
    rig.add("b", 5, CAT, 2)
    plan = rig.step()
    assert names(plan.encode, *KNOWN) == ["cat"]
    assert rig.windows(plan) == {"a": (0, 13), "b": (0, 15)}
    assert (encoder_stats(rig)["misses"], encoder_stats(rig)["hits"]) == (1, 1)


def test_the_same_image_twice_in_one_request_is_encoded_once() -> None:
    rig = Rig()
    rig.add("r", 3, CAT, 2, CAT, 2)
    plan = rig.step()
    assert names(plan.encode, *KNOWN) == ["cat"]
    assert rig.windows(plan) == {"r": (0, 23)}


def test_a_image_seen_before_is_not_encoded_again() -> None:
    rig = Rig()
    rig.add("a", 3, CAT, 2)
    rig.drain()
    rig.add("b", 5, CAT, 2)
    rig.drain()
    assert rig.runner.encoded == [key_of("cat")]


def test_an_idle_embedding_wanted_again_is_taken_back_and_not_evicted() -> None:
    rig = Rig(encoder_cache_slots=16, max_num_batched_tokens=12)
    rig.add("a", 3, CAT, 2, max_tokens=1)
    rig.drain()
    rig.add("b", 5, CAT, 2)
    rig.step()
    assert encoder_stats(rig)["slots_pinned"] == 8
    rig.add("c", 6, DOG, 2)
    rig.add("d", 7, OWL, 2)
    rig.drain()
    assert rig.runner.encoded.count(key_of("cat")) == 1


def test_without_room_for_idle_embeddings_each_is_dropped_after_use() -> None:
    rig = Rig(keep_idle_embeddings=False)
    rig.add("a", 3, CAT, 2)
    rig.drain()
    rig.step()
    assert rig.runner.dropped == [key_of("cat")]
    assert encoder_stats(rig)["slots_used"] == 0


def test_evicted_keys_reach_the_runner_once() -> None:
    rig = Rig(encoder_cache_slots=8)
    for name, image in (("a", CAT), ("b", DOG), ("c", OWL)):
        rig.add(name, 3, image, 2)
        rig.drain()
    rig.step()
    assert rig.runner.dropped == [key_of("cat"), key_of("dog")]


def test_a_preempted_request_does_not_encode_again_while_the_embedding_is_there() -> None:
    rig = Rig(num_blocks=8, enable_prefix_caching=False)
    rig.add("old", 10, max_tokens=20)
    rig.add("new", 3, CAT, 2, max_tokens=10)
    rig.drain()
    assert rig.events["new"][-1].usage.num_preemptions > 0
    assert rig.runner.encoded == [key_of("cat")]


# --- encoding in slices -----------------------------------------------------------------------------------------------


def sliced_rig(**changes: object) -> Rig:
    """A rig with one request that decodes, so that pictures are encoded one layer (of four) a step."""
    rig = Rig(encode_layers_per_step=1, **changes)
    rig.add("decoding", [1, 2, 3], max_tokens=60)
    rig.step()
    return rig


def test_while_someone_decodes_a_window_stops_before_a_image_until_it_is_resident() -> None:
    rig = sliced_rig()
    rig.add("r", 5, CAT, 2)
    plans = [rig.step() for _ in range(5)]
    assert [rig.windows(plan).get("r") for plan in plans] == [(0, 5), None, None, None, (5, 15)]
    assert [names(plan.encode, *KNOWN) for plan in plans] == [["cat"], [], [], [], []]
    assert {plan.encode_layers for plan in plans} == {1}


def test_decoding_goes_on_in_every_step_of_a_sliced_encoding() -> None:
    rig = sliced_rig()
    rig.add("r", 5, CAT, 2)
    assert all("decoding" in rig.windows(rig.step()) for _ in range(5))


def test_nothing_is_sliced_when_nobody_decodes() -> None:
    rig = Rig(encode_layers_per_step=1)
    rig.add("r", 5, CAT, 2)
    plan = rig.step()
    assert plan.encode_layers is None
    assert rig.windows(plan) == {"r": (0, 15)}


def test_a_flight_begun_in_slices_is_entered_in_the_first_step_that_is_not_sliced() -> None:
    rig = sliced_rig()
    rig.add("r", 5, CAT, 2)
    rig.step()
    rig.scheduler.abort("decoding", rig.now)
    plan = rig.step()
    assert plan.encode_layers is None
    assert rig.windows(plan) == {"r": (5, 15)}
    assert plan.encode == ()


def test_a_image_encoded_ahead_is_not_pinned() -> None:
    rig = sliced_rig()
    rig.add("r", CAT, 2)
    for _ in range(4):
        rig.step()
    assert (encoder_stats(rig)["slots_pinned"], encoder_stats(rig)["slots_idle"]) == (0, 8)


def test_images_of_waiting_requests_are_encoded_ahead_in_order() -> None:
    rig = sliced_rig(max_num_seqs=2)
    rig.add("a", 4, CAT)
    rig.add("b", 4, DOG)
    assert names(rig.step().encode, *KNOWN) == ["cat", "dog"]


def test_what_is_in_flight_counts_against_the_encoder_budget() -> None:
    rig = sliced_rig(encoder_budget=10)
    rig.add("r", 4, CAT, DOG)
    plans = [rig.step() for _ in range(5)]
    assert [names(plan.encode, *KNOWN) for plan in plans] == [["cat"], [], [], [], ["dog"]]


def test_looking_ahead_never_evicts_what_someone_further_ahead_wants() -> None:
    rig = sliced_rig(encoder_cache_slots=12, max_num_seqs=2)
    rig.add("text", 4, max_tokens=60)
    rig.add("a", 4, CAT)
    rig.add("b", 4, DOG)
    for _ in range(8):
        rig.step()
    assert rig.runner.encoded == [key_of("cat")]
    assert rig.runner.dropped == []


def test_a_prefix_hit_that_covers_a_image_keeps_it_from_being_encoded_ahead() -> None:
    rig = sliced_rig(max_num_seqs=1)
    rig.scheduler.abort("decoding", rig.now)
    rig.add("a", 4, CAT, 4, max_tokens=1)
    rig.drain()
    rig.add("dropper", 4, FakeImage("all", 1000), 1, max_tokens=1)
    rig.drain()
    rig.add("decoding", 4, max_tokens=6)
    rig.step()
    rig.add("b", 4, CAT, 4, [7], max_tokens=1)
    rig.drain()
    assert rig.runner.encoded.count(key_of("cat")) == 1


def test_a_failed_image_that_was_encoded_ahead_ends_the_request_that_asked() -> None:
    rig = Rig(broken=["cat"], encode_layers_per_step=1)
    rig.add("decoding", 3, max_tokens=30)
    rig.step()
    rig.add("r", 5, CAT, 2)
    rig.add("other", 6, CAT, 2)
    rig.drain()
    assert (rig.finish_of("r"), rig.finish_of("other"), rig.finish_of("decoding")) == ("error", "error", "length")
    errors = [rig.events[name][-1].error for name in ("r", "other")]
    assert [error.key for error in errors if error] == [key_of("cat")] * 2, "whoever sent it can tell which one it was"


# --- decoding ahead ---------------------------------------------------------------------------------------------------


def test_images_that_come_next_are_listed_so_that_decoding_can_begin() -> None:
    rig = Rig(max_num_batched_tokens=10, encoder_budget=16, max_num_seqs=1)
    rig.add("a", 12, CAT)
    rig.add("b", 12, DOG)
    rig.add("c", 12, OWL)
    assert names(rig.step().prefetch, *KNOWN) == ["cat", "dog"], "as much as one step may encode"


def test_what_is_resident_or_given_to_the_encoder_is_not_listed() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add("a", 2, CAT, max_tokens=5)
    rig.add("b", 3, CAT, DOG)
    assert names(rig.step().prefetch, *KNOWN) == ["dog"]


def test_a_generated_token_that_is_computed_again_is_prefill_but_for_the_latest() -> None:
    """Only the device and the host know the latest token; those before it are read from the request."""
    rig = Rig(max_num_batched_tokens=1, enable_prefix_caching=False)
    rig.add("a", 3, max_tokens=5)
    while len(rig.events.get("a", ())) < 3:
        rig.step()
    (seq,) = rig.scheduler._running.in_order
    rig.scheduler._queue.wait(seq)
    rig.scheduler._running.release(seq)
    plans = [rig.step() for _ in range(6)]
    assert [[(w.start, w.end) for w in plan.prefill] for plan in plans] == [[(i, i + 1)] for i in range(5)] + [[]]
    assert [[(w.start, w.end) for w in plan.decode] for plan in plans] == [[]] * 5 + [[(5, 6)]]
