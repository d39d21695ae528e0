from __future__ import annotations

from typing import Any

import pytest

from saccade.checkpoint.config import model_config
from saccade.checkpoint.late_interaction import unwrapped
from saccade.errors import ConfigError
from saccade.options.engine import Options, options
from tests.helpers.families.published import PUBLISHED


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The same model as Transformers 5 writes it."""
    top = ("model_type", "image_token_id", "vision_config", "tie_word_embeddings")
    text = {k: v for k, v in flat.items() if k not in (*top, "rope_scaling", "rope_theta", "torch_dtype")}
    text["model_type"] = "qwen2_vl_text"
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": flat["rope_theta"], "mrope_section": [16, 24, 24]}
    return {**{k: flat[k] for k in top}, "dtype": "bfloat16", "text_config": text}


def test_both_dialects_describe_the_same_model() -> None:
    old, new = model_config(PUBLISHED), model_config(nested(PUBLISHED))
    for name in (
        "hidden_size",
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "rope_theta",
        "mrope_section",
        "max_position",
    ):
        assert getattr(old.text, name) == getattr(new.text, name)
    assert old.vision == new.vision
    assert (old.dtype, old.image_token_id) == (new.dtype, new.image_token_id) == ("bfloat16", 151655)


def test_a_llava_config_that_leaves_out_defaults_is_a_llama_7b() -> None:
    raw = {
        "model_type": "llava",
        "image_token_index": 32000,
        "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
    }
    config = model_config(raw)
    assert (config.text.hidden_size, config.text.num_layers, config.text.vocab_size) == (4096, 32, 32064)
    assert config.image_token_id == 32000


def test_generation_config_names_the_end_tokens_first() -> None:
    config = model_config(PUBLISHED, {"eos_token_id": [151645, 151643]})
    assert config.eos_token_ids == {151645, 151643}
    assert model_config(PUBLISHED).eos_token_ids == {151645}


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_a_config_without_a_needed_field_says_which(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        model_config({k: v for k, v in PUBLISHED.items() if k != name})


def test_a_config_without_a_model_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_type"):
        model_config({})


def test_an_unknown_option_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown argument max_modle_len .do you mean max_model_len"):
        options(max_modle_len=3)


def test_mm_processor_kwargs_set_the_pixel_limits_and_refuse_anything_else() -> None:
    assert options(mm_processor_kwargs={"max_pixels": 1003520}).max_pixels == 1003520
    with pytest.raises(ConfigError, match="not size"):
        options(mm_processor_kwargs={"size": 1})


@pytest.mark.parametrize(
    "given",
    [
        {"block_size": 0},
        {"max_num_seqs": -1},
        {"gpu_memory_utilization": 1.5},
        {"load_format": "pickle"},
        {"attention_backend": "flash"},
        {"min_pixels": 10, "max_pixels": 5},
        {"limit_mm_per_prompt": {"audio": 1}},
        {"limit_mm_per_prompt": {"image": -1}},
        {"image_decode_threads": 0},
        {"image_decode_threads": -2},
        {"max_waiting": -3},
        {"seed": "x"},
        {"kv_cache_gb": -1},
        {"encoder_cache_gb": -1},
        {"max_step_ms": 0},
    ],
)
def test_an_option_out_of_range_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Options(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"model_type": "colqwen2", "vlm_config": PUBLISHED, "embedding_dim": 320, "dtype": "float16"},
        {"model_type": "colqwen3", "vlm_config": PUBLISHED, "embed_dim": 320, "torch_dtype": "float16"},
        {**PUBLISHED, "architectures": ["ColQwen2"], "dim": 320, "torch_dtype": "float16"},
    ],
)
def test_late_interaction_is_its_base_model_with_vectors_of_some_width(given: dict[str, Any]) -> None:
    once = unwrapped(given)
    read = model_config(unwrapped(once))  # another process reads it again
    assert read.text.token_dim == 320 and read.dtype == "float16" and read.model_type == "qwen2_vl"
    assert unwrapped(PUBLISHED) is PUBLISHED and model_config(PUBLISHED).text.token_dim is None


@pytest.mark.parametrize("given", [{"vlm_config": 5}, {"vlm_config": PUBLISHED, "embedding_dim": "wide"}])
def test_a_broken_config_of_late_interaction_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"vlm_config is '5'|late_interaction_dim is 'wide'"):
        model_config(unwrapped({"model_type": "colqwen2", **given}))


def test_a_config_that_cannot_be_read_is_named_by_its_type() -> None:
    with pytest.raises(ConfigError, match=r"no num_attention_heads.*'phi3_v'"):
        model_config({"model_type": "phi3_v", "img_processor": {"num_attention_heads": 10}})
