from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade import costs
from saccade.config import ConfigError, ModelConfig, Options, model_config
from saccade.runner.memory import MemoryPlan, plan_memory
from saccade.types import Geometry, Grid, Size
from tests.test_config import PUBLISHED

GIB = costs.GIB
PICTURE = Geometry(Size(1288, 952), Grid(1, 68, 92), 1564, 1564)


def small() -> ModelConfig:
    return model_config({**PUBLISHED, "num_hidden_layers": 4, "torch_dtype": "float32"})


def plan(largest: Geometry | None = PICTURE, free: int = 16 * GIB, **given: Any) -> MemoryPlan:
    return plan_memory(Options(**{"device": "cpu", **given}), small(), largest, free)


def test_the_context_is_the_models_own_when_the_kv_cache_holds_it() -> None:
    assert plan().scheduler.max_model_len == 32768


def test_the_context_shrinks_to_the_kv_cache_and_says_so() -> None:
    made = plan(kv_cache_gb=0.01)
    assert made.scheduler.max_model_len == made.scheduler.num_blocks * 16 < 32768
    assert any("all the KV cache holds" in reason for reason in made.reasons)


def test_a_context_longer_than_the_kv_cache_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=9000 needs 563 KV blocks but only \d+ fit"):
        plan(kv_cache_gb=0.01, max_model_len=9000)


def test_a_context_beyond_the_models_own_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=40000 is beyond the 32768"):
        plan(max_model_len=40000)


def test_kv_blocks_fill_the_asked_size() -> None:
    made = plan(kv_cache_gb=1.0)
    per_block = costs.kv_bytes_per_block(small().text, "float32")
    assert made.scheduler.num_blocks == GIB // per_block


def test_budget_and_cache_hold_the_largest_picture_by_themselves() -> None:
    huge = Geometry(Size(3584, 3584), Grid(1, 256, 256), 16384, 16384)
    made = plan(huge, encoder_cache_gb=None)
    assert made.scheduler.encoder_budget >= 16384
    assert made.scheduler.encoder_cache_slots >= 16384


def test_a_budget_below_the_largest_picture_stops_the_start_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"encoder_budget=100 .*1564"):
        plan(encoder_budget=100)


def test_a_cache_below_the_largest_picture_stops_the_start_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"encoder_cache_gb=0.001 holds \d+ embeddings .*1564"):
        plan(encoder_cache_gb=0.001)


def test_a_cache_of_zero_keeps_no_idle_embedding_but_can_work_on_a_full_budget() -> None:
    made = plan(encoder_cache_gb=0.0)
    assert not made.scheduler.keep_idle_embeddings
    assert made.scheduler.encoder_cache_slots == made.scheduler.encoder_budget


def test_no_memory_for_a_single_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room for KV blocks"):
        plan(free=0)


def test_float32_checkpoints_stay_float32() -> None:
    assert plan().dtype == torch.float32


def test_an_unknown_device_or_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="tpu9"):
        plan(device="tpu9")
    with pytest.raises(ConfigError, match="int3"):
        plan(dtype="int3")
