"""The scheduler's rules for blocks: prefix hits, preemption and pictures that fail half-way."""

from __future__ import annotations

from saccade.errors import RequestError
from tests.helpers.engine.scheduling import BLOCK, FakeImage, Rig, key_of, names

CAT, DOG = FakeImage("cat", 8), FakeImage("dog", 8)
KNOWN = ("cat", "dog", "owl")


def encoder_stats(rig: Rig) -> dict[str, int]:
    return rig.scheduler.stats()["encoder_cache"]


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


def test_a_prefix_hit_that_covers_a_image_means_it_is_neither_encoded_nor_prefetched() -> None:
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


def test_a_hit_that_ends_inside_a_image_still_needs_its_embedding() -> None:
    rig = Rig(encoder_cache_slots=8)
    rig.add("a", 2, CAT, 1, max_tokens=1)
    rig.drain()
    rig.add("other", 5, DOG, max_tokens=1)
    rig.drain()
    rig.add("b", 2, CAT, [7, 7, 7], max_tokens=1)
    plan = rig.step()
    assert rig.windows(plan) == {"b": (8, 13)}
    assert names(plan.encode, *KNOWN) == ["cat"]


def test_a_hit_that_ends_inside_a_image_without_room_leaves_the_request_waiting() -> None:
    rig = Rig(encoder_cache_slots=12, max_num_batched_tokens=12)
    rig.add("a", 2, CAT, 1, max_tokens=1)
    rig.drain()
    rig.add("holder", 5, FakeImage("big", 12), max_tokens=1)
    rig.step()
    rig.add("b", 2, CAT, [7, 7, 7], max_tokens=1)
    assert set(rig.windows(rig.step())) == {"holder"}
    assert rig.windows(rig.step()) == {"b": (8, 13)}


def test_two_images_of_equal_size_never_share_a_block() -> None:
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
    assert plan.freed_requests == ("new",)
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


def test_a_preempted_request_is_not_admitted_in_the_same_step() -> None:
    rig = Rig(num_blocks=6, max_num_batched_tokens=6, enable_prefix_caching=False)
    rig.add("old", 4, max_tokens=20)
    rig.add("new", 16, max_tokens=4)
    while not rig.scheduler.stats()["preemptions"]:
        plan = rig.step()
    assert (plan.freed_requests, plan.admitted) == (("new",), ())


def test_the_victim_is_the_request_that_came_last_and_not_the_one_admitted_last() -> None:
    rig = Rig(num_blocks=10, encoder_cache_slots=12, max_num_batched_tokens=10)
    rig.add("first", 4, CAT, max_tokens=20)
    rig.step()
    rig.add("early", DOG, max_tokens=9)  # waits for the cat to leave
    rig.add("late", 3, max_tokens=20)
    while not rig.scheduler.stats()["preemptions"]:
        plan = rig.step()
    order = [a.request.request_id for p in rig.plans for a in p.admitted]
    assert order == ["first", "late", "early"]
    assert plan.freed_requests == ("late",)


def test_a_window_is_measured_again_when_a_victim_took_an_embedding_with_it() -> None:
    rig = Rig(num_blocks=6, max_num_batched_tokens=10, encode_layers_per_step=1, layers=1, keep_idle_embeddings=False)
    rig.add("decoding", [1, 2], max_tokens=20)
    rig.step()
    rig.add("gone", CAT, 1)
    rig.step()  # the cat is encoded ahead, and nobody holds it
    rig.scheduler.abort("gone", rig.now)
    rig.add("r", [3, 3], DOG, CAT, 1, max_tokens=1)
    rig.add("victim", [4, 4, 4], CAT, 1, max_tokens=1)
    assert rig.windows(rig.step()) == {"decoding": (3, 4), "r": (0, 2), "victim": (0, 7)}
    plan = rig.step()
    assert plan.freed_requests == ("victim",)
    assert rig.windows(plan)["r"] == (2, 10), "up to the cat, which left with the victim"


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
    rig.add("new", 1, FakeImage("big", 20), 1, max_tokens=1)
    while not rig.scheduler.stats()["preemptions"]:
        rig.step()
    assert encoder_stats(rig)["slots_pinned"] == 0
    rig.drain()
    assert rig.finish_of("new") == "length"


# --- pictures that fail -----------------------------------------------------------------------------------------------


def test_a_failed_image_ends_every_request_that_holds_it_and_no_other() -> None:
    rig = Rig(broken=["cat"])
    rig.add("a", 3, CAT)
    rig.add("b", 5, CAT)
    rig.add("c", 4, DOG)
    rig.drain()
    assert [rig.finish_of(name) for name in "abc"] == ["error", "error", "length"]
    assert "cannot be decoded" in rig.events["a"][-1].error.message


def test_text_before_a_failed_image_stays_findable_and_the_rest_does_not() -> None:
    rig = Rig(broken=["cat"])
    rig.add("a", 10, CAT, 10)
    rig.drain()
    rig.runner.broken.clear()
    rig.add("b", 10, CAT, 10)
    assert rig.windows(rig.step()) == {"b": (8, 28)}


def test_a_failure_behind_a_hit_that_ended_inside_the_image_leaves_the_hit_findable() -> None:
    rig = Rig(encoder_cache_slots=8)
    rig.add("a", 2, CAT, 1, max_tokens=1)
    rig.drain()
    rig.add("other", 5, DOG, max_tokens=1)
    rig.drain()
    rig.runner.broken.add(key_of("cat"))
    rig.add("b", 2, CAT, [7, 7, 7], max_tokens=1)
    rig.drain()
    assert rig.finish_of("b") == "error"
    rig.runner.broken.clear()
    rig.add("c", 2, CAT, [7, 7, 7], max_tokens=1)
    assert rig.windows(rig.step()) == {"c": (8, 13)}


def test_a_request_that_shared_blocks_of_a_failed_image_in_the_same_step_ends_too() -> None:
    rig = Rig(broken=["cat"])
    rig.add("a", 4, CAT, 10)
    rig.add("b", 4, CAT, 9, [7])
    plan = rig.step()
    assert rig.windows(plan)["b"][0] > 12, "it entered no picture itself"
    assert (rig.finish_of("a"), rig.finish_of("b")) == ("error", "error")


def test_a_request_that_had_computed_the_image_earlier_is_not_hurt_by_a_later_failure() -> None:
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
    assert set(plan.freed_requests) == {"a", "b"}


def test_what_a_lost_plan_told_is_told_again() -> None:
    rig = Rig(encoder_cache_slots=8)
    rig.add("a", 4, CAT, max_tokens=1)
    rig.drain()
    rig.add("b", 5, DOG)
    lost = rig.scheduler.schedule(rig.now)
    assert (lost.evicted, lost.freed_requests) == ((key_of("cat"),), ("a",))
    rig.scheduler.fail_all(RequestError("the step broke"), rig.now)
    rig.scheduler.check()
    plan = rig.scheduler.schedule(rig.now)
    assert set(plan.evicted) == {key_of("cat"), key_of("dog")}
    assert set(plan.freed_requests) == {"a", "b"}


def test_two_requests_that_prefill_the_same_image_side_by_side_compute_it_once() -> None:
    rig = Rig(max_num_batched_tokens=8)
    cat = FakeImage("cat", 40)
    rig.add("first", cat, [1, 2, 3], max_tokens=1)
    rig.add("second", cat, [4, 5, 6], max_tokens=1)
    rig.drain()
    computed = sum(work.end - work.start for plan in rig.plans for work in plan.windows)
    assert computed <= 43 + 3 + BLOCK  # the picture once, both questions, and a block that may not align
    assert rig.scheduler.stats()["encoder_cache"]["misses"] == 1
