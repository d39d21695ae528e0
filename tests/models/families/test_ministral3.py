"""Ministral 3 against Transformers: queries that grow with their position, logits, features, published shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from saccade import costs
from saccade.checkpoint.config import ModelConfig, model_config
from saccade.errors import ConfigError
from saccade.models.cuda.decoder import FusedDecoder
from saccade.models.layers.attention_temperature import AttentionTemperature, attention_temperature_of
from tests.helpers.engine.reference import Reference
from tests.helpers.families import family_mistral3, family_text
from tests.helpers.families.family_checks import Subject, assert_close
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

PHOTOS = [make_photo(112, 84, 1), make_photo(60, 130, 2)]

# What the hub says of the 8B, as far as shapes go.
PUBLISHED_8B: dict[str, Any] = {
    "model_type": "mistral3",
    "dtype": "bfloat16",
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
    },
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "vision_feature_layer": -1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_mistral3.build_ministral(tmp_path_factory.mktemp("ministral3"))


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return family_mistral3.reference(folder)


# --- queries that grow --------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(first=st.integers(0, 300_000), length=st.integers(1, 20_000), beta=st.floats(0.01, 1))
def test_queries_grow_as_in_transformers(first: int, length: int, beta: float) -> None:
    positions = torch.arange(first, first + 40)
    expected = get_llama_4_attn_scale(positions[None], beta, length)[0, 0, :, 0]
    torch.testing.assert_close(AttentionTemperature(beta, length).factors(positions), expected)


def test_up_to_the_length_of_training_nothing_grows() -> None:
    temperature = attention_temperature_of(model_config(PUBLISHED_8B).text.rope_scaling)
    assert temperature is not None
    assert (temperature.factors(torch.arange(16384)) == 1).all()
    assert float(temperature.factors(torch.tensor([16384]))) == pytest.approx(1.0693, abs=1e-4)


def test_growing_queries_change_what_the_small_model_says(subject: Subject) -> None:
    text = "The quick brown fox jumps over the lazy dog. How many red circles are there?"
    with_growth = subject.logits(text, [])
    own, subject.model.decoder.temperature = subject.model.decoder.temperature, None
    without = subject.logits(text, [])
    subject.model.decoder.temperature = own
    assert torch.equal(with_growth[:8], without[:8]) and not torch.allclose(with_growth[8:], without[8:], atol=1e-3)


def test_a_decoder_without_growing_queries_has_no_temper() -> None:
    assert (
        attention_temperature_of({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}) is None
    )


def test_growth_without_a_length_to_count_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="no original_max_position_embeddings"):
        attention_temperature_of({"llama_4_scaling_beta": 0.1})


# --- the model ----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_the_tokens_are_those_of_the_whole_processor(
    subject: Subject, reference: Reference, width: int, height: int
) -> None:
    assume(max(width, height) / min(width, height) <= 50)  # thinner ones vanish there at this small edge
    photo = make_photo(width, height)
    ids = reference.tokenizer(reference.read([photo])[1][0], add_special_tokens=False)["input_ids"]
    assert subject.family.expand(subject.geometry(photo)).token_ids.tolist() == ids


@pytest.mark.parametrize(
    ("rope", "ties"),
    [
        ({}, True),  # as the 3B
        ({"llama_4_scaling_beta": 0.0}, False),
        ({"mscale_all_dim": 0.5, "factor": 4.0}, False),
        ({"rope_type": "default", "type": "default"}, False),
    ],
    ids=["tied head", "nothing grows", "scores are scaled", "nothing is stretched"],
)
def test_variants_of_the_config_match(tmp_path: Path, rope: dict[str, Any], ties: bool) -> None:
    made = family_mistral3.build_ministral(tmp_path, rope=rope, ties=ties)
    text = "Look: [IMG] what is it? The quick brown fox jumps over the lazy dog."
    assert_close(Subject(made).logits(text, PHOTOS[:1]), family_mistral3.reference(made).logits(text, PHOTOS[:1]))


def test_names_of_todays_modules_are_read_too(folder: Path, tmp_path: Path, subject: Subject) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    renamed = {_today(name): tensor for name, tensor in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(
        Subject(tmp_path).logits("Look: [IMG] there", PHOTOS[:1]), subject.logits("Look: [IMG] there", PHOTOS[:1])
    )


def _today(name: str) -> str:
    if name == "language_model.lm_head.weight":
        return "lm_head.weight"
    return "model." + name.replace("language_model.model.", "language_model.")


# --- on a device --------------------------------------------------------------------------------------------------


GROWING = {"rope_parameters": dict(family_text.ROPE["ministral3"])}


@pytest.mark.parametrize("model_type", ["ministral3", "mistral"])
def test_a_decoder_whose_queries_grow_has_kernels(tmp_path: Path, model_type: str) -> None:
    model = Subject(family_text.build(tmp_path, model_type, changes=GROWING)).model
    growing = FusedDecoder(model.decoder, None).temperature  # type: ignore[arg-type]
    assert growing is not None and growing.beta == model.decoder.temperature.beta


# --- published shapes ---------------------------------------------------------------------------------------------


def published() -> ModelConfig:
    return model_config(PUBLISHED_8B)


def test_the_published_shape_has_as_many_parameters_as_the_card_says() -> None:
    assert costs.weight_bytes(published(), "bfloat16") / 2 == pytest.approx(8.9e9, rel=2e-2)  # 8.4 and 0.4 billion
    assert published().text.max_context == 262144
