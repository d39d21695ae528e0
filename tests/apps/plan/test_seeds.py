"""The numbers of the texts this project began from, out of plans. Docstrings say where those simplify."""

from __future__ import annotations

import pytest

from saccade import costs
from tests.helpers.engine.plans import planned, sizes

LLAMA_90B = "meta-llama/Llama-3.2-90B-Vision"


def test_a_photo_of_1280x960_costs_a_prompt_of_about_1600_tokens() -> None:
    """The text predicts 46 x 35, rounding up, and logged 1,391 for its own photo. Sides are rounded to the nearest."""
    plan = planned("qwen2-vl-2b", "l4", sizes=sizes((1280, 960)), input_tokens=30, output_tokens=0)
    assert plan.cost.image_tokens == 46 * 34 == 1564
    assert plan.cost.prompt_tokens == 1594


def test_half_the_sides_cost_a_quarter() -> None:
    full, half = (planned("qwen2-vl-2b", "l4", sizes=sizes(size)) for size in ((1280, 960), (640, 480)))
    assert full.cost.image_tokens == 4 * half.cost.image_tokens


def test_a_prompt_of_1421_tokens_takes_89_blocks() -> None:
    plan = planned("qwen2-vl-2b", "l4", images=0, input_tokens=1421, output_tokens=0)
    assert plan.capacity.kv_blocks_per_request == 89


def test_an_image_delays_the_first_token_and_not_the_others() -> None:
    """41 and 118 ms there, on another engine; here the tower of an L4 takes longer, and text less."""
    text, image = (
        planned("qwen2-vl-2b", "l4", images=images, sizes=sizes((1280, 960)), input_tokens=30) for images in (0, 1)
    )
    assert image.first_token.total > 2.5 * text.first_token.total
    assert image.between_ms == pytest.approx(text.between_ms, rel=0.05)


def test_one_llava_image_is_576_tokens_of_36_blocks_and_4_7_megabytes_of_embeddings() -> None:
    plan = planned("llava-1.5-7b", "a100-80", sizes=sizes((336, 336)))
    assert plan.cost.image_tokens == 576
    assert costs.blocks_for(576) == 36
    assert round(plan.cost.slots * plan.capacity.scheduler.slot_bytes / 1e6, 1) == 4.7


def test_fifty_prompts_of_1000_tokens_take_3150_blocks() -> None:
    """A quarter of 8 GiB there, as an order of magnitude. LLaVA-1.5-7B has no grouped heads: three times 8 GiB."""
    plan = planned("llava-1.5-7b", "a100-80", input_tokens=424, output_tokens=0)
    assert plan.cost.tokens == 1000
    assert 50 * plan.capacity.kv_blocks_per_request == 3150
    assert 50 * 1000 * plan.capacity.kv_bytes_per_token / (8 * costs.GIB) == pytest.approx(3.05, abs=0.01)


def test_a_photo_of_12_megapixels_costs_more_than_ten_thousand_tokens() -> None:
    """ "Tens of thousands" there; `max_pixels` of the published checkpoints allows 16,384."""
    plan = planned("qwen2-vl-2b", "l4", sizes=sizes((4000, 3000)))
    assert 15_000 < plan.cost.image_tokens <= 16_384


def test_1024x1024_pixels_are_about_5329_patches_but_a_quarter_of_the_tokens() -> None:
    """The text cuts 73 x 73 patches of 14. Qwen2-VL rounds to 74 x 74 and merges four into a token."""
    plan = planned("qwen2-vl-2b", "l4", sizes=sizes((1024, 1024)))
    assert plan.cost.images[0].geometry.grid.patches == 74 * 74
    assert plan.cost.image_tokens == 37 * 37


def test_a_token_takes_4096_bytes_in_each_of_80_layers() -> None:
    """Llama 3.2 Vision 90B has 100 layers; the 20 that attend to images keep no KV."""
    assert planned(LLAMA_90B, "h100", images=0).capacity.kv_bytes_per_token == 80 * 4096


@pytest.mark.parametrize(("tokens", "megabytes"), [(576, 188.7), (500, 164), (1076, 352), (2804, 919), (8180, 2680)])
def test_kv_of_a_request_has_the_megabytes_of_the_text(tokens: int, megabytes: float) -> None:
    plan = planned(LLAMA_90B, "h100", images=0, input_tokens=tokens, output_tokens=0)
    assert plan.cost.tokens * plan.capacity.kv_bytes_per_token / 1e6 == pytest.approx(megabytes, rel=0.003)


@pytest.mark.parametrize(("tokens", "on_paper", "in_blocks"), [(500, 305, 298), (1076, 142, 140), (8180, 19, 18)])
def test_fifty_gigabytes_hold_305_text_requests_or_142_with_an_image(
    tokens: int, on_paper: int, in_blocks: int
) -> None:
    """By the byte, as there; an engine gives whole blocks of 16 tokens.

    An image is counted as 576 tokens of text there: the 90B model itself keeps images outside of the KV cache.
    "18 concurrent text requests or 1 video request" is a slip: 18 is how many video requests fit.
    """
    plan = planned(LLAMA_90B, "h100", images=0, input_tokens=tokens, output_tokens=0, kv_gb=50.0)
    assert plan.capacity.concurrent == on_paper
    per_request = plan.capacity.kv_blocks_per_request * 16 * plan.capacity.kv_bytes_per_token
    assert plan.capacity.kv_bytes // per_request == in_blocks


def test_180_gigabytes_of_weights_need_three_gpus_of_80() -> None:
    """177 GB: 88.5 billion parameters."""
    plan = planned(LLAMA_90B, "h100", images=0)
    assert plan.capacity.parts.weights == pytest.approx(180e9, rel=0.02)
    assert plan.capacity.gpus == 3


@pytest.mark.parametrize(("side", "ms"), [(336, 8), (672, 25)])
def test_encoding_on_an_a100_takes_what_the_text_says(side: int, ms: float) -> None:
    """With Qwen2-VL's tower, as many patches. 1024x1024 take twice the 45 ms there: its attention is quadratic."""
    first = planned("qwen2-vl-2b", "a100-80", sizes=sizes((side, side))).first_token
    assert first.encode == pytest.approx(ms, rel=0.2)
    assert 0.5 <= first.preprocess <= 5
