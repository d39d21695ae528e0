from __future__ import annotations

import pytest

from saccade.apps.plan.alternatives import Alternative, alternatives
from tests.helpers.engine.plans import planned


def named(rows: list[Alternative], name: str) -> Alternative:
    return next(row for row in rows if row.name.startswith(name))


def test_half_the_pixels_are_about_half_the_tokens_and_more_requests() -> None:
    plan = planned()
    row = named(alternatives(plan), "--max-pixels")
    assert row.plan and row.gain
    assert 0.4 < row.plan.cost.image_tokens / plan.cost.image_tokens <= 0.5
    assert row.gain > 1.5
    assert row.plan.first_token.total < plan.first_token.total


def test_pixels_have_no_effect_where_every_image_costs_the_same() -> None:
    row = named(alternatives(planned("llava-1.5-7b")), "--max-pixels")
    assert row.plan is None and "every image costs the same" in row.note


def test_fp8_weights_are_compared_where_the_gpu_multiplies_them() -> None:
    row = named(alternatives(planned()), "--quantization fp8")
    assert row.gain and row.gain > 1.1
    old = named(alternatives(planned("qwen2-vl-2b", "a100-80")), "--quantization fp8")
    assert old.plan is None and "needs a GPU that multiplies FP8, which A100 80GB does not" in old.note
    rows = alternatives(planned(options={"quantization": "fp8"}))
    assert not any(row.name == "--quantization fp8" for row in rows), "the plan has them"


def test_an_fp8_kv_cache_is_compared_where_the_gpu_and_the_model_take_it() -> None:
    row = named(alternatives(planned()), "--kv-cache-dtype fp8")
    assert row.gain and row.gain > 1
    old = named(alternatives(planned("qwen2-vl-2b", "a100-80")), "--kv-cache-dtype fp8")
    assert old.plan is None and "needs a GPU that converts FP8" in old.note


def test_a_bigger_encoder_cache_helps_repeated_images_alone() -> None:
    new, repeated = (named(alternatives(planned(repeated=share)), "--encoder-cache-gb") for share in (0.0, 0.9))
    assert new.gain == pytest.approx(1.0, abs=0.001)
    assert repeated.gain and repeated.gain > 1.01


def test_a_store_is_used_only_where_it_is_faster_than_encoding() -> None:
    fast, slow = (
        named(alternatives(planned(model, repeated=0.9, catalogue=10**6)), "--embedding-dir")
        for model in ("qwen2-vl-2b", "qwen3-vl-8b")
    )
    assert fast.gain and fast.gain > 1.2
    assert slow.gain == 1.0 and "slower, not used" in slow.note


def test_encoders_apart_count_the_gpus_they_need() -> None:
    plan = planned(rate=100.0)
    row = named(alternatives(plan), "--encoders apart")
    assert row.plan and row.plan.demand.encode == 0 < plan.demand.encode
    assert row.plan.encoder_gpus == 2  # 100 x 12 ms, nine tenths full
    assert row.plan.gpus == row.plan.copies + 2


def test_a_text_model_has_no_rows_about_images() -> None:
    names = [row.name for row in alternatives(planned("Qwen/Qwen3-8B", images=0))]
    assert names == ["--quantization fp8", "--kv-cache-dtype fp8"]


def test_an_encoder_of_a_model_over_several_gpus_is_on_one() -> None:
    """So it takes as long as where a copy of the model fits on one."""
    made = [planned("meta-llama/Llama-3.2-90B-Vision", gpu) for gpu in ("h100", "h200")]
    assert [plan.capacity.gpus for plan in made] == [3, 2]
    seconds = [named(alternatives(plan), "--encoders").plan.encode_apart for plan in made]  # type: ignore[union-attr]
    assert seconds[0] == pytest.approx(seconds[1]), "their FLOP/s are the same"
