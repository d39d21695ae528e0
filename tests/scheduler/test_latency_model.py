"""What fits into a step beside running answers."""

from __future__ import annotations

from dataclasses import replace

from saccade.scheduler.latency_model import (
    CATCH_UP_STEPS,
    CEILING_MS,
    SLOWDOWN,
    EncoderLoad,
    backlog_ms,
    layer_ms,
    max_restored,
    max_work,
    milliseconds,
    min_restored,
    mixed_is_faster,
    mixed_tokens,
    size_at,
    size_within,
    spare_ms,
    split_spare_time,
)
from saccade.types.latency import LatencyProfile

PACE = LatencyProfile(
    decode_ms=((1, 1.0), (32, 2.0)),
    prefill_ms=((64, 0.5), (128, 1.0), (256, 2.0), (512, 4.0)),
    layer_ms=((400, 0.25), (1600, 0.5)),
    ceiling_ms=20.0,
)
ONE = EncoderLoad(1600, 1)


def spare_of(ceiling_ms: float, num_decoding: int = 32) -> float:
    return spare_ms(replace(PACE, ceiling_ms=ceiling_ms), num_decoding)


def test_while_others_keep_up_answers_slow_down_by_a_fixed_factor() -> None:
    gentle = milliseconds(PACE.decode_ms, 32) * (SLOWDOWN - 1)
    assert spare_ms(PACE, 32) == spare_ms(PACE, 32, 32, gentle * CATCH_UP_STEPS) == gentle


def test_a_longer_backlog_is_served_within_a_number_of_steps() -> None:
    assert spare_ms(PACE, 32, 32, 10.0 * CATCH_UP_STEPS) == 10.0


def test_the_fewer_wait_beside_many_that_decode_the_gentler_it_is() -> None:
    assert spare_ms(PACE, 32, 16, 20.0 * CATCH_UP_STEPS) == 10.0
    assert spare_ms(PACE, 32, 1, 20.0 * CATCH_UP_STEPS) == spare_ms(PACE, 32)


def test_without_a_ceiling_a_slow_decoder_keeps_its_share() -> None:
    slow = replace(PACE, decode_ms=((1, 50.0), (32, 50.0)), ceiling_ms=None)
    assert spare_ms(slow, 32) == spare_ms(slow, 32, 32, 1e6) == 75.0
    assert spare_ms(replace(PACE, ceiling_ms=None), 32, 32, 1e6) == CEILING_MS - 2.0


def test_however_much_waits_a_step_keeps_to_the_ceiling() -> None:
    assert spare_ms(PACE, 32, 1, 1e6) == PACE.ceiling_ms - 2.0
    assert spare_of(3.0) == 1.0


def test_the_backlog_is_the_time_of_all_prompts_and_of_all_layers_over_all_images() -> None:
    latency = replace(PACE, encoder_layers=10)
    assert backlog_ms(latency, 1024, EncoderLoad()) == 8.0
    assert backlog_ms(latency, 0, EncoderLoad(1600, 1)) == 5.0
    assert backlog_ms(latency, 1024, EncoderLoad(4800, 3)) == 8.0 + 15.0
    assert backlog_ms(latency, 0, EncoderLoad()) == backlog_ms(replace(latency, layer_ms=()), 0, ONE) == 0.0


def test_several_images_take_no_longer_than_each_alone_nor_than_one_as_large() -> None:
    quadratic = replace(PACE, layer_ms=((100, 0.1), (200, 0.4), (400, 1.6)))
    assert layer_ms(quadratic, EncoderLoad(400, 4)) == 4 * 0.1
    flat = replace(PACE, layer_ms=((100, 0.1), (400, 0.1)))
    assert layer_ms(flat, EncoderLoad(400, 4)) == 0.1


def test_prompts_and_images_get_all_of_the_spare_time_when_it_is_their_turn() -> None:
    assert split_spare_time(PACE, spare_of(4.0), ONE) == (256, 4)
    assert split_spare_time(PACE, spare_of(3.0), EncoderLoad()).prompt_tokens == 128


def test_prompts_and_images_move_on_even_when_decoding_alone_reaches_the_ceiling() -> None:
    minimum = split_spare_time(PACE, spare_of(0.1), ONE)
    assert minimum.encode_layers >= 1 and minimum.prompt_tokens >= 32


RIDING = replace(PACE, mixed_ms=((8, ((128, 2.0), (256, 2.5))), (32, ((128, 2.8), (256, 4.0), (384, 5.0)))))


def test_of_tokens_that_ride_along_as_many_are_taken_as_keep_the_whole_pass_within_the_target() -> None:
    assert mixed_tokens(RIDING, 32, spare=3.0) == 384  # 5.0 ms
    assert mixed_tokens(RIDING, 32, spare=1.9) == 128


def test_what_rides_along_is_looked_up_for_as_many_answers_as_the_pass_was_measured_with() -> None:
    assert mixed_tokens(RIDING, 8, spare_of(2.6, 8)) == 256
    assert mixed_tokens(RIDING, 9, spare_of(2.6, 9)) == 0


def test_nothing_rides_along_where_no_pass_was_measured() -> None:
    assert mixed_tokens(PACE, 32, spare=3.0) == mixed_tokens(RIDING, 33, spare=3.0) == 0


def test_nothing_rides_along_where_more_goes_by_itself_in_the_same_time() -> None:
    slow = replace(RIDING, mixed_ms=((32, ((128, 4.0),)),))  # 32 a millisecond; by themselves 256 in 2 + 2 are 64
    assert mixed_tokens(slow, 32, spare=3.0) == 0
    few = replace(slow, mixed_ms=((32, ((200, 3.0),)),))
    assert mixed_tokens(few, 32, spare=3.0) == 200, "fewer than go by themselves, but in less time"


def test_a_pass_for_both_is_taken_where_it_is_over_sooner_than_two() -> None:
    """By the sizes that there are: 9 answers take what 32 do, and 200 tokens what 256 do."""
    assert mixed_is_faster(RIDING, 8, 256), "2.5 for 2 + 2"
    assert not mixed_is_faster(RIDING, 9, 200), "4 for 2 + 2"
    assert not mixed_is_faster(RIDING, 8, 257), "no such pass"
    assert not mixed_is_faster(PACE, 8, 100)


def test_times_between_measured_sizes_lie_on_a_line() -> None:
    assert milliseconds(PACE.layer_ms, 1000) == 0.375


def test_times_beyond_the_last_measured_size_grow_in_proportion() -> None:
    assert milliseconds(PACE.layer_ms, 3200) == 1.0


def test_sizes_before_the_first_measured_one_take_as_long_as_it() -> None:
    assert milliseconds(PACE.decode_ms, 0) == 1.0


def test_no_size_fits_into_less_than_the_smallest_takes() -> None:
    assert size_within(PACE.prefill_ms, 0.1) == 0


def test_the_size_of_a_time_takes_that_time() -> None:
    assert [size_at(PACE.layer_ms, milliseconds(PACE.layer_ms, size)) for size in (400, 1000, 1600, 3200)] == [
        400,
        1000,
        1600,
        3200,
    ]


def test_nothing_takes_less_than_the_smallest_size() -> None:
    assert size_at(PACE.layer_ms, 0.1) == size_at((), 1.0) == 0


def test_two_layers_over_the_most_that_is_encoded_at_a_time_fit_into_a_step() -> None:
    assert max_work(PACE, spare=0.75) == 1000
    assert split_spare_time(PACE, 0.75, EncoderLoad(1000, 1)).encode_layers == 2


def test_blocks_are_restored_from_where_copying_is_faster_than_what_they_add_to_a_prefill() -> None:
    copies = ((1, 0.5), (64, 0.5 + 63 * 0.01))  # a block of 16 tokens adds 0.125 ms to a prefill of more than 64
    assert min_restored(PACE.prefill_ms, copies, block_size=16) == 8
    assert min_restored(PACE.prefill_ms, ((1, 0.5), (64, 64.0)), block_size=16) is None


def test_beside_decodes_as_many_blocks_are_restored_as_fit_the_spare_time() -> None:
    assert max_restored(spare=2.0, ms_per_block=0.1) == 20
    assert max_restored(spare=2.0, ms_per_block=9.0) == 1
    assert max_restored(spare=2.0, ms_per_block=0.0) is None
