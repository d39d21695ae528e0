"""Small checkpoints of the families that read text alone, and Transformers run on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks import checkpoints
from tests.helpers.engine.reference import Reference, load
from tests.helpers.families.made_once import made_once

KINDS: Mapping[str, tuple[Any, Any]] = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "ministral3": (Ministral3Config, Ministral3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
ROPE: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "llama": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "ministral3": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 8,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4,
    },
    "mistral": {"rope_type": "default", "rope_theta": 10000.0},
    "qwen2": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "qwen3": {"rope_type": "default", "rope_theta": 1000000.0},
    "qwen3_moe": {"rope_type": "default", "rope_theta": 1000000.0},
}
FEATURES: Mapping[str, Mapping[str, Any]] = {  # what only some of the line have
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "llama": {"attention_bias": True, "mlp_bias": True},
    "ministral3": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    },
}
TEMPLATE = (  # as text models have it: content is a string, nothing else
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@made_once
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
    enliven_experts(model)
    model.save_pretrained(folder)
    if layout == "published":
        _publish(folder / "config.json")
    names = {"eos": "<|im_end|>", "pad": "<|endoftext|>"} if is_qwen else {"eos": "</s>", "bos": "<s>"}
    checkpoints._write_tokenizer(folder, tokenizer, TEMPLATE, layout, **names)
    return folder


def enliven_experts(model: torch.nn.Module) -> None:
    """Where all experts are one tensor, weights were drawn for the inputs of all matrices in it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name and parameter.dim() == 3:
                parameter.mul_(parameter.shape[1] ** 0.5)


def _publish(file: Path) -> None:
    """The dialect of the hub: rope_theta beside rope_scaling, torch_dtype, no layer types."""
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    checkpoints._write(file, config)


def reference(folder: Path) -> Reference:
    kind = KINDS[json.loads((folder / "config.json").read_text())["model_type"]][1]
    model, tokenizer = load(kind, folder)
    return Reference(model, tokenizer, "\0", lambda images: ({}, []))
