"""The arithmetic of the seeds: what a picture costs in blocks, bytes and concurrency."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from saccade import costs
from saccade.checkpoint.config import ModelConfig, model_config
from saccade.models.families import family_class
from saccade.models.fp8_weights import FP8, Fp8Weights
from saccade.models.interface import ModelParts
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import TorchVision
from saccade.processor.families import default_family
from saccade.processor.families.llava import Llava
from saccade.types.media import Size
from tests.helpers.kernels.launched import META, SHAPES

LLAVA_7B = {
    "model_type": "llava",
    "image_token_index": 32000,
    "vision_feature_select_strategy": "default",
    "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
}

LLAMA_90B = {
    "model_type": "llava",
    "text_config": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
}


@pytest.fixture
def model() -> ModelConfig:
    return model_config(LLAMA_90B)


def test_one_llava_image_of_576_tokens_takes_36_blocks() -> None:
    checkpoint = SimpleNamespace(
        config=model_config(LLAVA_7B),
        image_processor={"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        processor={},
    )
    geometry = Llava.from_checkpoint(checkpoint).geometry(Size(336, 336), 1, 10**9)
    assert geometry.tokens == 576
    assert costs.blocks_for(geometry.tokens) == 36


def test_half_the_sides_are_a_quarter_of_the_tokens() -> None:
    family = default_family()
    full, half = (family.geometry(Size(s, s), 1, 10**9).tokens for s in (1120, 560))
    assert full == 4 * half


def test_a_token_takes_4096_bytes_a_layer_with_8_kv_heads_of_128_in_fp16() -> None:
    assert costs.kv_bytes_per_token_layer(8, 128, "float16") == 4096


def test_a_576_token_image_takes_188_7_megabytes_over_80_layers(model: ModelConfig) -> None:
    assert round(576 * costs.kv_bytes_per_token(model.text, "float16") / 1e6, 1) == 188.7


def test_fifty_gigabytes_hold_305_text_requests_or_142_with_a_image(model: ModelConfig) -> None:
    per_token = costs.kv_bytes_per_token(model.text, "float16")
    assert costs.concurrent_requests(50e9, 500 * per_token) == 305
    assert costs.concurrent_requests(50e9, 1076 * per_token) == 142


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (1421, 89)])
def test_blocks_are_rounded_up(tokens: int, blocks: int) -> None:
    assert costs.blocks_for(tokens) == blocks


def test_kv_blocks_fill_a_budget_without_exceeding_it(model: ModelConfig) -> None:
    per_block = costs.kv_bytes_per_block(model.text, "float16")
    assert costs.kv_blocks_in(10 * per_block + 1, model.text, "float16") == 10
    assert costs.kv_blocks_in(10 * per_block - 1, model.text, "float16") == 9


def test_prefill_in_two_windows_costs_the_same_matrices_and_attention_as_in_one(model: ModelConfig) -> None:
    head = 2 * model.text.vocab_size * model.text.hidden_size
    whole = costs.prefill_flops(model.text, 100)
    parts = costs.prefill_flops(model.text, 60) + costs.prefill_flops(model.text, 40, context=60)
    assert parts == whole + head


def test_a_image_on_its_way_to_patches_is_held_in_three_sizes() -> None:
    assert costs.prepare_bytes(Size(2560, 1440), Size(1280, 720)) == 3 * (2560 * 1440 + 1280 * 1440 + 1280 * 720)


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="float32, bfloat16, float16, not 'int3'"):
        costs.dtype_bytes("int3")


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen3.5-35B-A3B", "Llama-3.2-11B-Vision"])
def test_what_is_planned_to_be_in_float8_is(name: str) -> None:
    config = model_config(SHAPES[name])
    params = Parameters(torch.bfloat16, META, quantized=Fp8Weights(in_blocks=True))
    family_class(config)(ModelParts(config, params, {}, TorchVision()))
    found = sum(weight.numel() for weight in params.targets.values() if weight.dtype == FP8)
    assert found == costs.fp8_params(config.text, in_blocks=True)
