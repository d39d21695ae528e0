"""Small checkpoints of the families that read text alone, and Transformers run on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests import checkpoints
from tests.reference import Reference, load

KINDS: Mapping[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
ROPE: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "mistral": {"rope_type": "default", "rope_theta": 10000.0},
    "qwen2": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "qwen3": {"rope_type": "default", "rope_theta": 1000000.0},
}
FEATURES: Mapping[str, Mapping[str, Any]] = {  # what only some of the line have
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 32, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
}
TEMPLATE = (  # as text models have it: content is a string, nothing else
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(
    folder: Path, model_type: str, *, layout: str = "saved", seed: int = 0, changes: Mapping[str, Any] | None = None
) -> Path:
    is_qwen = model_type.startswith("qwen")
    tokenizer = checkpoints.qwen_tokenizer() if is_qwen else checkpoints.llama_tokenizer()
    make_config, make_model = KINDS[model_type]
    config = make_config(
        **{
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": tokenizer.get_vocab_size() + 6,
            "max_position_embeddings": 4096,
            "rope_parameters": dict(ROPE[model_type]),
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "eos_token_id": tokenizer.token_to_id("<|im_end|>" if is_qwen else "</s>"),
            **FEATURES[model_type],
            **(changes or {}),
        }
    )
    model = make_model(config).float().eval()
    checkpoints.randomise(model, seed)
    model.save_pretrained(folder)
    if layout == "published":
        _publish(folder / "config.json")
    names = {"eos": "<|im_end|>", "pad": "<|endoftext|>"} if is_qwen else {"eos": "</s>", "bos": "<s>"}
    checkpoints._write_tokenizer(folder, tokenizer, TEMPLATE, layout, **names)
    return folder


def _publish(file: Path) -> None:
    """The dialect of the hub: rope_theta beside rope_scaling, torch_dtype, no layer types."""
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    checkpoints._write(file, config)


def reference(folder: Path) -> Reference:
    kind = KINDS[json.loads((folder / "config.json").read_text())["model_type"]][1]
    model, tokenizer = load(kind, folder)
    return Reference(model, tokenizer, "\0", lambda pictures: ({}, []))
