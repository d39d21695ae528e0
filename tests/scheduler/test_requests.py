"""How requests are refused, end and are counted."""

from __future__ import annotations

import pytest

from saccade.errors import RequestError
from saccade.types.events import TokenEvent
from saccade.types.step import Sample, StepResult
from tests.helpers.engine.scheduling import EOS, FakeImage, Rig

CAT, DOG = FakeImage("cat", 8), FakeImage("dog", 8)


def encoder_stats(rig: Rig) -> dict[str, int]:
    return rig.scheduler.stats()["encoder_cache"]


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


def test_a_image_larger_than_the_encoder_budget_is_refused() -> None:
    error = refusal(Rig(encoder_budget=7), 3, CAT)
    assert all(part in error.message for part in ("picture 1", "8 embeddings", "7", "--encoder-budget"))


def test_a_image_larger_than_the_encoder_cache_is_refused() -> None:
    error = refusal(Rig(encoder_cache_slots=7), 3, FakeImage("small", 2), CAT)
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


def test_who_could_start_at_once_does_not_count_as_waiting() -> None:
    rig = Rig(max_waiting=0, max_num_seqs=4)
    for name in "abcd":
        rig.add(name, 3)
    with pytest.raises(RequestError, match="--max-waiting"):
        rig.add("e", 3)


def test_a_full_queue_refuses_with_the_numbers() -> None:
    rig = Rig(max_waiting=2, max_num_seqs=1)
    rig.add("running", 3)
    rig.step()
    rig.add("a", 3)
    rig.add("b", 3)
    with pytest.raises(RequestError, match=r"2 requests are waiting.*--max-waiting") as caught:
        rig.add("c", 3)
    assert caught.value.code == "overloaded"
    rig.drain()
    rig.add("c", 3)


# --- endings ----------------------------------------------------------------------------------------------------------


def commit_token(rig: Rig, request_id: str, token: int) -> None:
    plan = rig.scheduler.schedule(rig.now)
    for event in rig.scheduler.commit(plan, StepResult({request_id: Sample(token, None)}), rig.now, 0.5):
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
    assert rig.step().freed_requests == ("r",)
    assert rig.scheduler.stats()["kv"]["used"] == encoder_stats(rig)["slots_pinned"] == 0


def test_a_request_aborted_while_it_waits_is_unknown_to_the_runner() -> None:
    rig = Rig()
    rig.add("r", 4)
    assert rig.scheduler.abort("r", 0.0).usage.first_scheduled is None
    plan = rig.step()
    assert not (plan.windows or plan.encode or plan.evicted or plan.freed_requests or plan.admitted)


def test_the_usage_tells_times_on_the_callers_clock() -> None:
    rig = Rig()
    rig.add("r", 4, max_tokens=2)
    rig.drain()
    usage = rig.events["r"][-1].usage
    assert (usage.arrived, usage.first_scheduled, usage.first_token, usage.finished) == (0.0, 1.0, 1.5, 2.5)


def test_image_times_are_charged_to_the_request_that_asked_first() -> None:
    rig = Rig()
    rig.add("a", 4, CAT, DOG, max_tokens=1)
    rig.add("b", 5, CAT, max_tokens=1)
    rig.drain()
    paid = {name: rig.events[name][-1].usage for name in "ab"}
    assert (paid["a"].decode_ms, paid["a"].encode_ms) == (4.0, 6.0)
    assert (paid["b"].decode_ms, paid["b"].encode_ms) == (0.0, 0.0)


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


def test_the_event_of_a_token_that_is_not_the_last_is_what_its_fields_say() -> None:
    event = TokenEvent.going_on("r", 7, None, b"rows")
    assert type(event) is TokenEvent
    assert event == TokenEvent("r", token_id=7, logprobs=None, finish_reason=None, prompt_logprobs=b"rows")
