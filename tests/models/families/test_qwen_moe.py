"""Qwen models with experts against Transformers: counts, features, logits, layouts, and what their weights cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade import LLM, SamplingParams, costs
from saccade.checkpoint.config import ModelConfig, model_config
from saccade.errors import ConfigError
from saccade.models import load_model
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import video_rules_for
from tests.helpers.families import family_qwen3_5, family_text
from tests.helpers.families.family_moe import build_hybrid, build_vl
from tests.helpers.families.parity import CPU, Pair, assert_close, hybrid_logits, our_logits, prompt, their_logits

pytestmark = pytest.mark.transformers

BUILDERS: dict[str, Callable[..., Path]] = {"qwen3_vl_moe": build_vl, "qwen3_5_moe": build_hybrid}
FOLDERS = [f"{name}-{layout}" for name in BUILDERS for layout in ("saved", "published")]

# What the hub says of these checkpoints, as far as shapes go.
TOWER = {
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2048,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TEXT_30B: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "vocab_size": 151936,
}
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    **TEXT_30B,
}
VL_30B: dict[str, Any] = {
    "model_type": "qwen3_vl_moe",
    "image_token_id": 151655,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_moe_text",
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        **TEXT_30B,
    },
    "vision_config": {**TOWER, "deepstack_visual_indexes": [8, 16, 24], "model_type": "qwen3_vl_moe"},
}
HYBRID_35B: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "text_config": {
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    "vision_config": {**TOWER, "model_type": "qwen3_5_moe"},
}


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, layout = request.param.split("-")
    return BUILDERS[name](tmp_path_factory.mktemp(name), layout=layout)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return Pair(folder)


def logits_of(pair: Pair, count: int, chunk: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and theirs, of a prompt with so many pictures."""
    images = pair.images(count)
    ids = prompt(pair, images)
    has_states = pair.config.text.linear is not None
    ours = hybrid_logits(pair, ids, images, chunk or 1000) if has_states else our_logits(pair, ids, images, chunk)
    return ours, their_logits(pair, ids, images)


# --- pictures -----------------------------------------------------------------------------------------------------


def test_videos_are_taken_as_the_family_without_experts_takes_them(folder: Path) -> None:
    assert video_rules_for(open_checkpoint(str(folder), weights=False)) is not None


# --- the decoder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (build_vl, {"decoder_sparse_step": 2, "mlp_only_layers": []}),
        (build_vl, {"num_experts": 3, "num_experts_per_tok": 3, "attention_bias": True}),
        (build_vl, {"moe_intermediate_size": 32, "mlp_only_layers": []}),  # gate and up as wide as the stream
        (build_hybrid, {"num_experts_per_tok": 1, "shared_expert_intermediate_size": 48}),
    ],
    ids=["every second layer", "all experts", "as wide as the stream", "one expert"],
)
def test_variants_of_the_config_match(tmp_path: Path, build: Callable[..., Path], text: dict[str, Any]) -> None:
    assert_close(*logits_of(Pair(build(tmp_path, text=text)), 1))


@pytest.mark.parametrize("changes", [{"norm_topk_prob": True}, {"attention_bias": True, "decoder_sparse_step": 3}])
def test_variants_without_a_tower_match(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = family_text.build(tmp_path, "qwen3_moe", changes=changes)
    llm = LLM(model=str(folder), max_model_len=256, kv_cache_gb=0.02, use_tqdm=False)
    text, greedy = "The quick brown fox jumps over", SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    out = llm.generate(text, greedy, use_tqdm=False)[0]
    llm.close()
    assert out.outputs[0].token_ids == family_text.reference(folder).greedy(text, [], 16)


def test_a_whole_folder_may_be_filled_at_random(folder: Path) -> None:
    config = open_checkpoint(str(folder), weights=False).config
    model = load_model(None, config, dtype=torch.float32, device=CPU, load_format="dummy")
    assert model.decoder.table.std() > 0


# --- what configs say ---------------------------------------------------------------------------------------------


def active_params(config: ModelConfig) -> int:
    text = config.text
    tables = (1 if text.tie_word_embeddings else 2) * text.vocab_size * text.hidden_size
    return costs.active_layer_params(text) + tables


@pytest.mark.parametrize(
    ("raw", "billions", "active"), [(QWEN3_30B, 30.5, 3.3), (VL_30B, 31.1, 3.3), (HYBRID_35B, 35.1, 3.5)]
)
def test_memory_is_that_of_all_experts_and_time_that_of_a_tokens_own(
    raw: dict[str, Any], billions: float, active: float
) -> None:
    config = model_config(raw)
    assert costs.weight_bytes(config, "bfloat16") / 2 == pytest.approx(billions * 1e9, rel=5e-3)
    assert active_params(config) == pytest.approx(active * 1e9, rel=2e-2)


def test_computing_a_prompt_costs_the_active_experts() -> None:
    text = model_config(QWEN3_30B).text
    more = model_config({**QWEN3_30B, "num_experts": 256}).text
    routing = 2 * 100 * 48 * 2048 * 128  # of the longer choice
    assert costs.prefill_flops(more, 100) - costs.prefill_flops(text, 100) == routing


def test_more_experts_for_a_token_than_there_are_is_refused(tmp_path: Path) -> None:
    raw = json.loads((build_vl(tmp_path) / "config.json").read_text())
    raw["text_config"]["num_experts_per_tok"] = 7
    with pytest.raises(ConfigError, match="7 of 6 experts"):
        load_model(None, model_config(raw), dtype=torch.float32, device=CPU, load_format="dummy")


def test_the_dense_families_have_no_experts(tmp_path: Path) -> None:
    assert open_checkpoint(str(family_qwen3_5.build(tmp_path)), weights=False).config.text.experts is None
