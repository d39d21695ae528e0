"""The bill after a request: times that add up, and pictures that were at hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from saccade.types.bill import Bill, BillItem
from saccade.types.events import Usage
from saccade.types.media import Grid, short_key

KEYS = (b"a" * 32, b"b" * 32)
USAGE = Usage(
    cached_tokens=16,
    num_preemptions=0,
    arrived=10.0,
    first_scheduled=10.1,
    first_token=10.5,
    finished=11.0,
    decode_ms=50.0,
    encode_ms=150.0,
    encoded=KEYS[:1],
)


def make_bill() -> Bill:
    items = tuple(BillItem("image", 64, 64, 56, 56, 4, 1, short_key(key), Grid(1, 4, 4)) for key in KEYS)
    return Bill(text_tokens=9, image_tokens=8, video_tokens=0, kv_blocks=2, items=items)


def parts(usage: Usage) -> float:
    times = usage.times_ms()
    return sum(times[name] for name in ("queue", "decode", "encode", "prefill"))


def test_the_parts_add_up_to_the_first_token() -> None:
    times = USAGE.times_ms()
    assert times["queue"] == pytest.approx(100) and times["prefill"] == pytest.approx(200)
    assert parts(USAGE) == pytest.approx(times["first_token"])


def test_images_encoded_while_a_request_waited_count_once() -> None:
    usage = replace(USAGE, first_scheduled=10.4, ahead_ms=200.0)
    times = usage.times_ms()
    assert times["queue"] == pytest.approx(200) and times["prefill"] == pytest.approx(100)
    assert parts(usage) == pytest.approx(times["first_token"])


def test_images_decoded_side_by_side_leave_no_time_below_zero() -> None:
    assert replace(USAGE, decode_ms=900.0).times_ms()["prefill"] == 0


def test_a_request_that_never_ran_has_only_its_whole_time() -> None:
    usage = replace(USAGE, first_scheduled=None, first_token=None, decode_ms=0.0, encode_ms=0.0)
    assert set(usage.times_ms()) == {"decode", "encode", "total"}


def test_images_that_were_not_encoded_for_the_request_were_at_hand() -> None:
    bill = make_bill().settled(USAGE, {"prepare": 1.0})
    assert [item.cached for item in bill.items] == [False, True]
    assert bill.cached_tokens == 16 and bill.times_ms["prepare"] == 1.0


def test_what_is_kept_in_the_encoder_cache_stays_on_the_settled_bill() -> None:
    bill = make_bill()
    kept = replace(bill, items=tuple(replace(item, encoder_cache_bytes=100) for item in bill.items))
    settled = replace(kept, encoder_cache_bytes=200).settled(USAGE, {})
    assert [item.encoder_cache_bytes for item in settled.items] == [100, 100] and settled.encoder_cache_bytes == 200
    assert make_bill().encoder_cache_bytes == 0


def test_without_a_first_token_nothing_is_said_about_images() -> None:
    bill = make_bill().settled(replace(USAGE, first_token=None), {})
    assert [item.cached for item in bill.items] == [None, None]
