"""Families of the zoo with layers as wide as kernels read quantised weights: multiples of 128."""

from __future__ import annotations

from typing import Any

from tests.helpers.families.zoo.entry import Entry
from tests.helpers.families.zoo.first_half_gemma import GEMMA3
from tests.helpers.families.zoo.first_half_glm import GLM4V
from tests.helpers.families.zoo.first_half_makers import ROUTED, entry, recipe
from tests.helpers.families.zoo.first_half_tiles import INTERNVL_GPT_OSS

_WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_ROUTED = {**ROUTED, "moe_intermediate_size": 128, "first_k_dense_replace": 1, "num_hidden_layers": 2}
_ROPE_GLM = {**_ROPE, "mrope_section": [4, 6, 6]}
_HALF = {"model_type": "glm", "attention_bias": True, "rope_parameters": _ROPE, "tie_word_embeddings": False}
_QWEN = {"model_type": "qwen3", "tie_word_embeddings": False, "num_hidden_layers": 1}

WIDE: dict[str, Entry] = {
    "internvl": entry(INTERNVL_GPT_OSS._replace(text={**_WIDE, **_QWEN})),
    "internvl@glm": entry(INTERNVL_GPT_OSS._replace(text={**_WIDE, **_HALF})),  # neighbours rotate, biases
    "glm4v_moe": entry(
        recipe(
            "glm4v_moe",
            GLM4V,
            text={**_WIDE, **_ROUTED, "rope_parameters": _ROPE_GLM},
            vision={"out_hidden_size": 128},
        )
    ),
    "gemma3": entry(recipe("gemma3", GEMMA3, text=_WIDE)),
}
