"""The scheduler's rules, one by one, with a fake runner that checks every plan."""

from __future__ import annotations

import pytest

from saccade.types import RequestError, Sample, StepResult
from tests.scheduling import EOS, Picture, Rig, key_of, names

CAT, DOG, OWL = Picture("cat", 8), Picture("dog", 8), Picture("owl", 8)
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
    assert [plan.works[0].samples for plan in rig.plans] == [False, True]


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


def test_a_picture_beyond_the_window_touches_neither_the_item_nor_the_chunk() -> None:
    rig = Rig(max_num_batched_tokens=2048)
    rig.add("r", 5000, Picture("far", 500))
    rig.step()
    plan = rig.step()
    assert rig.windows(plan) == {"r": (2048, 4096)}
    assert plan.encode == ()
    assert encoder_stats(rig)["slots_used"] == 0
    assert names(rig.step().encode, "far") == ["far"]


def test_a_window_may_end_inside_a_picture() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("r", 4, CAT, 3)
    assert rig.windows(rig.step()) == {"r": (0, 8)}
    assert encoder_stats(rig)["slots_pinned"] == 8
    assert rig.windows(rig.step()) == {"r": (8, 15)}
    assert encoder_stats(rig)["slots_pinned"] == 0


def test_an_embedding_is_pinned_until_its_span_is_computed_and_idle_afterwards() -> None:
    rig = Rig(max_num_batched_tokens=6)
    rig.add("r", 4, CAT, 8)
    rig.step()
    assert encoder_stats(rig)["slots_pinned"] == 8
    rig.step()
    assert (encoder_stats(rig)["slots_pinned"], encoder_stats(rig)["slots_idle"]) == (0, 8)


# --- encoder budget and cache room ------------------------------------------------------------------------------------


def test_when_the_encoder_budget_is_used_up_text_goes_on_and_the_picture_enters_next_step() -> None:
    rig = Rig(encoder_budget=10)
    rig.add("r", 4, CAT, 3, DOG, 2)
    plan = rig.step()
    assert rig.windows(plan) == {"r": (0, 15)}
    assert names(plan.encode, *KNOWN) == ["cat"]
    plan = rig.step()
    assert rig.windows(plan) == {"r": (15, 25)}
    assert names(plan.encode, *KNOWN) == ["dog"]


def test_when_the_cache_is_full_a_picture_enters_as_soon_as_someone_releases() -> None:
    rig = Rig(encoder_cache_slots=12, max_num_batched_tokens=10)
    rig.add("first", 4, CAT, 2)
    rig.add("second", 1, DOG, 2)
    assert rig.windows(rig.step()) == {"first": (0, 10)}
    assert rig.windows(rig.step()) == {"first": (10, 14), "second": (0, 1)}, "the cat is still pinned"
    plan = rig.step()
    assert names(plan.encode, *KNOWN) == ["dog"]
    assert plan.evicted == (key_of("cat"),)


def test_a_picture_that_waits_for_room_does_not_stop_text_behind_it() -> None:
    rig = Rig(encoder_cache_slots=12, max_num_batched_tokens=10)
    rig.add("first", 4, CAT, 2)
    rig.step()
    rig.add("blocked", DOG, 2)
    rig.add("text", 3)
    assert set(rig.windows(rig.step())) == {"first", "text"}
    assert set(rig.windows(rig.step())) == {"first", "text", "blocked"}


def test_a_waiting_request_kept_by_its_picture_holds_nothing() -> None:
    rig = Rig(encoder_cache_slots=12, max_num_batched_tokens=10)
    rig.add("first", 4, CAT, 2)
    rig.step()
    used = rig.scheduler.stats()["kv"]["used"]
    rig.add("blocked", DOG, 2)
    rig.scheduler.schedule(rig.now)
    assert rig.scheduler.stats()["waiting"] == 1
    assert rig.scheduler.stats()["kv"]["used"] == used + 1, "only the running request grew"


@pytest.mark.parametrize("sliced", [None, 4])
def test_a_large_picture_is_not_starved_by_a_stream_of_small_ones(sliced: int | None) -> None:
    rig = Rig(encoder_cache_slots=12, encoder_budget=12, max_num_batched_tokens=8, encode_layers_per_step=sliced)
    rig.add("decoding", 2, max_tokens=200)
    for number in range(200):
        rig.add(f"small{number}", 1, Picture(f"s{number % 3}", 6), 1, max_tokens=1, first_token=1000 * number)
        if number == 5:
            rig.add("large", Picture("large", 12), 1, max_tokens=1)
        rig.step()
        if "large" in rig.events:
            break
    assert rig.finish_of("large") == "length"
    assert rig.scheduler.has_unfinished(), "the stream was still going on"


def test_entering_a_resident_picture_never_evicts_another_of_the_same_window() -> None:
    rig = Rig(encoder_cache_slots=24, enable_prefix_caching=False)
    rig.add("warm", CAT, DOG, OWL, 1, max_tokens=1)
    rig.drain()
    rig.add("r", Picture("new", 8), CAT, 1, DOG, 1, max_tokens=1)
    plan = rig.step()
    assert names(plan.encode, "new") == ["new"]
    assert plan.evicted == (key_of("owl"),)


# --- a picture is worked on once --------------------------------------------------------------------------------------


def test_the_same_picture_in_two_requests_of_one_step_is_encoded_once() -> None:
    rig = Rig()
    rig.add("a", 3, CAT, 2)
    rig.add("b", 5, CAT, 2)
    plan = rig.step()
    assert names(plan.encode, *KNOWN) == ["cat"]
    assert rig.windows(plan) == {"a": (0, 13), "b": (0, 15)}
    assert (encoder_stats(rig)["misses"], encoder_stats(rig)["hits"]) == (1, 1)


def test_the_same_picture_twice_in_one_request_is_encoded_once() -> None:
    rig = Rig()
    rig.add("r", 3, CAT, 2, CAT, 2)
    plan = rig.step()
    assert names(plan.encode, *KNOWN) == ["cat"]
    assert rig.windows(plan) == {"r": (0, 23)}


def test_a_picture_seen_before_is_not_encoded_again() -> None:
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
    for name, picture in (("a", CAT), ("b", DOG), ("c", OWL)):
        rig.add(name, 3, picture, 2)
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


# --- prefix cache -----------------------------------------------------------------------------------------------------


def test_an_equal_beginning_is_not_computed_again() -> None:
    rig = Rig()
    rig.add("a", 20, max_tokens=1)
    rig.drain()
    rig.add("b", 20, [7, 8], max_tokens=1)
    plan = rig.step()
    assert rig.windows(plan) == {"b": (20, 22)}
    assert len(plan.admitted[0].block_ids) == 5
    assert rig.events["b"][-1].usage.cached_tokens == 20


def test_requests_of_one_step_share_what_the_first_of_them_computes() -> None:
    rig = Rig()
    rig.add("a", 20, [1])
    rig.add("b", 20, [2])
    plan = rig.step()
    assert rig.windows(plan) == {"a": (0, 21), "b": (20, 21)}


def test_a_repeated_prompt_still_computes_its_last_block() -> None:
    rig = Rig()
    rig.add("a", 16, max_tokens=1)
    rig.drain()
    rig.add("b", 16, max_tokens=1)
    assert rig.windows(rig.step()) == {"b": (12, 16)}


def test_an_answer_can_be_found_by_the_next_turn() -> None:
    rig = Rig()
    rig.add("a", [1, 2, 3], max_tokens=6)
    rig.drain()
    rig.add("b", [1, 2, 3, *rig.tokens_of("a")], 2)
    assert rig.windows(rig.step()) == {"b": (8, 11)}


def test_a_prefix_hit_that_covers_a_picture_means_it_is_neither_encoded_nor_prefetched() -> None:
    rig = Rig(encoder_cache_slots=8, max_num_seqs=1)
    rig.add("a", 4, CAT, 4, max_tokens=1)
    rig.drain()
    rig.add("other", 5, DOG, max_tokens=3)  # evicts the cat's embedding
    rig.step()
    rig.add("b", 4, CAT, 4, [7], max_tokens=1)
    rig.drain()
    later = rig.plans[-4:]
    assert all(key_of("cat") != item.key for plan in later for item in (*plan.encode, *plan.prefetch))
    assert rig.events["b"][-1].usage.cached_tokens == 16


def test_a_hit_that_ends_inside_a_picture_still_needs_its_embedding() -> None:
    rig = Rig(encoder_cache_slots=8)
    rig.add("a", 2, CAT, 1, max_tokens=1)
    rig.drain()
    rig.add("other", 5, DOG, max_tokens=1)
    rig.drain()
    rig.add("b", 2, CAT, [7, 7, 7], max_tokens=1)
    plan = rig.step()
    assert rig.windows(plan) == {"b": (8, 13)}
    assert names(plan.encode, *KNOWN) == ["cat"]


def test_two_pictures_of_equal_size_never_share_a_block() -> None:
    rig = Rig()
    rig.add("a", CAT, 4, max_tokens=1)
    rig.drain()
    rig.add("b", DOG, 4, max_tokens=1)
    assert rig.windows(rig.step()) == {"b": (0, 12)}


def test_a_salt_separates_tenants_in_both_caches() -> None:
    rig = Rig()
    rig.add("a", 4, CAT, 4, max_tokens=1, salt=b"one")
    rig.drain()
    rig.add("b", 4, CAT, 4, max_tokens=1, salt=b"two")
    plan = rig.step()
    assert rig.windows(plan) == {"b": (0, 16)}
    assert len(plan.encode) == 1


def test_a_lookup_is_counted_once_however_often_a_waiting_request_is_tried() -> None:
    rig = Rig(num_blocks=6)
    rig.add("a", 16, max_tokens=8)
    rig.add("b", [5] * 12, max_tokens=1)
    rig.drain()
    assert rig.scheduler.stats()["prefix_cache"]["queries"] == 28


# --- blocks and preemption --------------------------------------------------------------------------------------------


def test_the_last_running_request_is_preempted_when_blocks_run_out() -> None:
    rig = Rig(num_blocks=6)
    rig.add("old", 12, max_tokens=12)
    rig.add("new", [5] * 12, max_tokens=4)
    rig.step()
    plan = rig.step()
    assert rig.windows(plan) == {"old": (12, 13)}
    assert plan.forgotten == ("new",)
    rig.drain()
    assert rig.events["new"][-1].usage.num_preemptions == 1


def test_a_resumed_request_is_admitted_again_with_what_it_had_generated() -> None:
    rig = Rig(num_blocks=7)
    rig.add("old", 12, max_tokens=12)
    rig.add("new", [5] * 11, max_tokens=4)
    rig.drain()
    admissions = [a for plan in rig.plans for a in plan.admitted if a.request.request_id == "new"]
    assert [len(a.output_token_ids) for a in admissions] == [0, 2]
    assert rig.tokens_of("new") == [1011, 1012, 1013, 1014]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    rig = Rig(num_blocks=6)
    rig.add("old", 12, max_tokens=12)
    rig.add("new", [5] * 12, max_tokens=4)
    rig.step()
    rig.add("late", 1)
    assert set(rig.windows(rig.step())) == {"old"}


def test_a_preempted_request_goes_before_those_that_came_later() -> None:
    rig = Rig(num_blocks=6, max_num_seqs=2)
    rig.add("old", 12, max_tokens=12)
    rig.add("new", [5] * 12, max_tokens=4)
    rig.add("late", [6] * 12, max_tokens=4)
    rig.drain()
    order = [a.request.request_id for plan in rig.plans for a in plan.admitted]
    assert order == ["old", "new", "new", "late"]


def test_a_waiting_request_that_finds_no_blocks_waits_and_nobody_passes_it() -> None:
    rig = Rig(num_blocks=6)
    rig.add("old", 12, max_tokens=4)
    rig.add("big", [5] * 20, max_tokens=1)
    rig.add("small", [6], max_tokens=1)
    assert set(rig.windows(rig.step())) == {"old"}
    rig.drain()
    assert rig.scheduler.stats()["preemptions"] == 0


def test_preemption_releases_pins() -> None:
    rig = Rig(num_blocks=7, max_num_batched_tokens=17)
    rig.add("old", 16, max_tokens=12)
    rig.add("new", 1, Picture("big", 20), 1, max_tokens=1)
    while not rig.scheduler.stats()["preemptions"]:
        rig.step()
    assert encoder_stats(rig)["slots_pinned"] == 0
    rig.drain()
    assert rig.finish_of("new") == "length"


# --- encoding in slices -----------------------------------------------------------------------------------------------


def sliced_rig(**changes: object) -> Rig:
    """A rig with one request that decodes, so that pictures are encoded one layer (of four) a step."""
    rig = Rig(encode_layers_per_step=1, **changes)
    rig.add("decoding", [1, 2, 3], max_tokens=60)
    rig.step()
    return rig


def test_while_someone_decodes_a_window_stops_before_a_picture_until_it_is_resident() -> None:
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


def test_a_picture_encoded_ahead_is_not_pinned() -> None:
    rig = sliced_rig()
    rig.add("r", CAT, 2)
    for _ in range(4):
        rig.step()
    assert (encoder_stats(rig)["slots_pinned"], encoder_stats(rig)["slots_idle"]) == (0, 8)


def test_pictures_of_waiting_requests_are_encoded_ahead_in_order() -> None:
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


def test_a_prefix_hit_that_covers_a_picture_keeps_it_from_being_encoded_ahead() -> None:
    rig = sliced_rig(max_num_seqs=1)
    rig.scheduler.abort("decoding", rig.now)
    rig.add("a", 4, CAT, 4, max_tokens=1)
    rig.drain()
    rig.add("dropper", 4, Picture("all", 1000), 1, max_tokens=1)
    rig.drain()
    rig.add("decoding", 4, max_tokens=6)
    rig.step()
    rig.add("b", 4, CAT, 4, [7], max_tokens=1)
    rig.drain()
    assert rig.runner.encoded.count(key_of("cat")) == 1


def test_a_failed_picture_that_was_encoded_ahead_ends_the_request_that_asked() -> None:
    rig = Rig(broken=["cat"], encode_layers_per_step=1)
    rig.add("decoding", 3, max_tokens=30)
    rig.step()
    rig.add("r", 5, CAT, 2)
    rig.add("other", 6, CAT, 2)
    rig.drain()
    assert (rig.finish_of("r"), rig.finish_of("other"), rig.finish_of("decoding")) == ("error", "error", "length")


# --- decoding ahead ---------------------------------------------------------------------------------------------------


def test_pictures_that_come_next_are_listed_so_that_decoding_can_begin() -> None:
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


# --- endings ----------------------------------------------------------------------------------------------------------


def commit_token(rig: Rig, request_id: str, token: int) -> None:
    plan = rig.scheduler.schedule(rig.now)
    for event in rig.scheduler.commit(plan, StepResult({request_id: Sample(token, None)}), rig.now):
        rig.take(event)


def test_the_models_end_token_ends_a_request_and_is_in_its_event() -> None:
    rig = Rig()
    rig.add("r", 4)
    commit_token(rig, "r", EOS)
    event = rig.events["r"][-1]
    assert (event.token_id, event.finish_reason, event.stop_token_id) == (EOS, "stop", EOS)


def test_a_clients_stop_token_ends_a_request() -> None:
    rig = Rig()
    rig.add("r", 4, stop_token_ids=[50])
    commit_token(rig, "r", 50)
    assert (rig.finish_of("r"), rig.events["r"][-1].stop_token_id) == ("stop", 50)


def test_an_ignored_end_token_is_a_token_like_others() -> None:
    rig = Rig()
    rig.add("r", 4, ignore_eos=True)
    commit_token(rig, "r", EOS)
    assert rig.finish_of("r") is None


def test_no_end_token_counts_before_min_tokens() -> None:
    rig = Rig()
    rig.add("r", 4, max_tokens=9, min_tokens=2)
    commit_token(rig, "r", EOS)
    assert rig.finish_of("r") is None
    commit_token(rig, "r", EOS)
    assert rig.finish_of("r") == "stop"


def test_the_last_allowed_token_ends_with_length() -> None:
    rig = Rig()
    rig.add("r", 4, max_tokens=1)
    rig.step()
    event = rig.events["r"][-1]
    assert (event.finish_reason, event.token_id, event.stop_token_id) == ("length", 1004, None)


def test_an_aborted_request_gives_back_what_it_holds_and_ends_once() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("r", 4, CAT)
    rig.step()
    event = rig.scheduler.abort("r", 9.0)
    assert event is not None
    assert (event.finish_reason, event.usage.finished) == ("abort", 9.0)
    assert rig.scheduler.abort("r", 9.0) is None
    assert rig.step().forgotten == ("r",)
    assert rig.scheduler.stats()["kv"]["used"] == encoder_stats(rig)["slots_pinned"] == 0


def test_a_request_aborted_while_it_waits_is_unknown_to_the_runner() -> None:
    rig = Rig()
    rig.add("r", 4)
    assert rig.scheduler.abort("r", 0.0).usage.first_scheduled is None
    assert rig.step().is_empty


def test_the_usage_tells_times_on_the_callers_clock() -> None:
    rig = Rig()
    rig.add("r", 4, max_tokens=2)
    rig.drain()
    usage = rig.events["r"][-1].usage
    assert (usage.arrived, usage.first_scheduled, usage.first_token, usage.finished) == (0.0, 1.0, 1.5, 2.5)


def test_picture_times_are_charged_to_the_request_that_asked_first() -> None:
    rig = Rig()
    rig.add("a", 4, CAT, DOG, max_tokens=1)
    rig.add("b", 5, CAT, max_tokens=1)
    rig.drain()
    paid = {name: rig.events[name][-1].usage for name in "ab"}
    assert (paid["a"].decode_ms, paid["a"].encode_ms) == (4.0, 6.0)
    assert (paid["b"].decode_ms, paid["b"].encode_ms) == (0.0, 0.0)


# --- pictures that fail -----------------------------------------------------------------------------------------------


def test_a_failed_picture_ends_every_request_that_holds_it_and_no_other() -> None:
    rig = Rig(broken=["cat"])
    rig.add("a", 3, CAT)
    rig.add("b", 5, CAT)
    rig.add("c", 4, DOG)
    rig.drain()
    assert [rig.finish_of(name) for name in "abc"] == ["error", "error", "length"]
    assert "cannot be decoded" in rig.events["a"][-1].error.message


def test_text_before_a_failed_picture_stays_findable_and_the_rest_does_not() -> None:
    rig = Rig(broken=["cat"])
    rig.add("a", 10, CAT, 10)
    rig.drain()
    rig.runner.broken.clear()
    rig.add("b", 10, CAT, 10)
    assert rig.windows(rig.step()) == {"b": (8, 28)}


def test_a_request_that_shared_blocks_of_a_failed_picture_in_the_same_step_ends_too() -> None:
    rig = Rig(broken=["cat"])
    rig.add("a", 4, CAT, 10)
    rig.add("b", 4, CAT, 9, [7])
    plan = rig.step()
    assert rig.windows(plan)["b"][0] > 12, "it entered no picture itself"
    assert (rig.finish_of("a"), rig.finish_of("b")) == ("error", "error")


def test_a_request_that_had_computed_the_picture_earlier_is_not_hurt_by_a_later_failure() -> None:
    rig = Rig(encoder_cache_slots=8, enable_prefix_caching=False)
    rig.add("early", 4, CAT, max_tokens=8)
    rig.step()
    rig.add("between", 4, DOG, max_tokens=1)
    rig.step()
    rig.runner.broken.add(key_of("cat"))
    rig.add("late", 5, CAT)
    rig.drain()
    assert (rig.finish_of("early"), rig.finish_of("late")) == ("length", "error")


def test_when_a_step_broke_every_request_ends_and_both_caches_are_empty() -> None:
    rig = Rig()
    rig.add("a", 8, CAT, 4, max_tokens=9)
    rig.step()
    rig.add("b", 4)
    rig.scheduler.schedule(rig.now)
    events = rig.scheduler.fail_all(RequestError("the step broke"), rig.now)
    rig.scheduler.check()
    assert {event.request_id: event.finish_reason for event in events} == {"a": "error", "b": "error"}
    assert not rig.scheduler.has_unfinished()
    assert rig.scheduler.stats()["kv"]["free"] == rig.config.num_blocks
    plan = rig.scheduler.schedule(rig.now)
    assert plan.evicted == (key_of("cat"),)
    assert set(plan.forgotten) == {"a", "b"}


def test_what_a_lost_plan_told_is_told_again() -> None:
    rig = Rig(encoder_cache_slots=8)
    rig.add("a", 4, CAT, max_tokens=1)
    rig.drain()
    rig.add("b", 5, DOG)
    lost = rig.scheduler.schedule(rig.now)
    assert (lost.evicted, lost.forgotten) == ((key_of("cat"),), ("a",))
    rig.scheduler.fail_all(RequestError("the step broke"), rig.now)
    plan = rig.scheduler.schedule(rig.now)
    assert set(plan.evicted) == {key_of("cat"), key_of("dog")}
    assert set(plan.forgotten) == {"a", "b"}


# --- admission --------------------------------------------------------------------------------------------------------


def refusal(rig: Rig, *parts: object, **how: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        rig.add("r", *parts, **how)
    assert not rig.scheduler.has_unfinished(), "nothing is kept of a refused request"
    return caught.value


def test_a_prompt_too_long_for_the_context_is_refused_with_the_numbers() -> None:
    error = refusal(Rig(max_model_len=30), 14, CAT, max_tokens=9)
    assert error.code == "context_length_exceeded"
    assert all(part in error.message for part in ("22 tokens", "8 of them", "max_tokens is 9", "31", "30"))
    assert "--max-model-len" in error.message


def test_a_prompt_that_fits_exactly_is_accepted() -> None:
    rig = Rig(max_model_len=30)
    rig.add("r", 22, max_tokens=8)
    rig.drain()
    assert rig.finish_of("r") == "length"


def test_a_request_that_needs_more_blocks_than_exist_is_refused() -> None:
    error = refusal(Rig(num_blocks=5), 18, max_tokens=4)
    assert all(part in error.message for part in ("6 KV blocks", "there are 5", "--kv-cache-gb"))


def test_a_request_that_needs_exactly_all_blocks_runs() -> None:
    rig = Rig(num_blocks=5)
    rig.add("r", 18, max_tokens=3)
    rig.drain()
    assert rig.finish_of("r") == "length"


def test_a_picture_larger_than_the_encoder_budget_is_refused() -> None:
    error = refusal(Rig(encoder_budget=7), 3, CAT)
    assert all(part in error.message for part in ("picture 1", "8 embeddings", "7", "--encoder-budget"))


def test_a_picture_larger_than_the_encoder_cache_is_refused() -> None:
    error = refusal(Rig(encoder_cache_slots=7), 3, Picture("small", 2), CAT)
    assert all(part in error.message for part in ("picture 2", "8 embeddings", "7", "--encoder-cache-gb"))


def test_an_empty_prompt_is_refused() -> None:
    assert "empty" in refusal(Rig()).message


def test_an_id_that_is_still_open_is_refused_and_free_again_afterwards() -> None:
    rig = Rig()
    rig.add("r", 3, max_tokens=1)
    with pytest.raises(RequestError, match="'r' is already open"):
        rig.add("r", 3)
    rig.drain()
    rig.add("r", 3, max_tokens=1)
    rig.drain()
    assert len(rig.events["r"]) == 2


def test_a_full_queue_refuses_with_the_numbers() -> None:
    rig = Rig(max_waiting=2)
    rig.add("a", 3)
    rig.add("b", 3)
    with pytest.raises(RequestError, match=r"2 requests are waiting.*--max-waiting") as caught:
        rig.add("c", 3)
    assert caught.value.code == "overloaded"
    rig.step()
    rig.add("c", 3)


# --- telling ----------------------------------------------------------------------------------------------------------


def test_the_stats_tell_hits_misses_evictions_and_occupancy() -> None:
    rig = Rig(num_blocks=12, encoder_cache_slots=8)
    rig.add("a", 8, CAT, max_tokens=1)
    rig.drain()
    rig.add("b", 8, [7], CAT, max_tokens=1)
    rig.drain()
    rig.add("c", [6], DOG, max_tokens=9)
    rig.step()
    stats = rig.scheduler.stats()
    assert (stats["running"], stats["waiting"], stats["preemptions"], stats["steps"]) == (1, 0, 0, 3)
    assert stats["prefix_cache"] == {"queries": 16 + 17 + 9, "hits": 8, "evictions": 0}
    assert sum(stats["kv"][state] for state in ("used", "idle", "free")) == stats["kv"]["total"] == 12
    encoder = stats["encoder_cache"]
    assert (encoder["hits"], encoder["misses"], encoder["evictions"]) == (1, 2, 1)
    assert (encoder["slots_used"], encoder["slots_total"]) == (8, 8)
