"""A small decoder of text whose layers can be quantised: its config, its published names, and how it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from saccade.checkpoint.config import model_config
from saccade.models import load_model

CPU = torch.device("cpu")
LEFT_OUT = "layers.1.self_attn.o_proj"  # which no test quantises
TEXT: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 384, "mlp_only_layers": [0], "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128, "rope_theta": 1e4, "torch_dtype": "float32", "tie_word_embeddings": True,
    "eos_token_id": 0, "hidden_act": "silu",
}  # fmt: skip


def published_names(model: Any) -> dict[str, torch.Tensor]:
    ours = {
        "qkv.q": "self_attn.q_proj", "qkv.k": "self_attn.k_proj", "qkv.v": "self_attn.v_proj",
        "out": "self_attn.o_proj", "gate_up.gate": "mlp.gate_proj", "gate_up.up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm", "experts.router": "mlp.gate", "experts.shared_gate": "mlp.shared_expert_gate",
    }  # fmt: skip
    named = {}
    for name, tensor in model.params.targets.items():
        _, *levels, kind = name.split(".")
        if levels[0] != "layers":
            named[f"model.{ {'embed': 'embed_tokens'}.get(levels[0], levels[0]) }.{kind}"] = tensor
            continue
        inner = ".".join(levels[2:])
        if inner.startswith("experts.shared."):
            continue
        if inner not in ours:  # experts.3.gate
            _, expert, part = inner.split(".")
            ours[inner] = f"mlp.experts.{expert}.{part}_proj"
        named[f"model.layers.{levels[1]}.{ours[inner]}.{kind}"] = tensor
    return named | shared_experts(model)


def shared_experts(model: Any) -> dict[str, torch.Tensor]:
    """Where they are stacked with others: their parts are columns of `down`, and rows of gate and up."""
    named = {}
    for name, whole in model.params.wholes.items():
        if ".shared." in name:
            layer, part = name.split(".")[2], name.split(".")[-2]
            tensor = whole.tensor.transpose(0, 1).flatten(1) if part == "down" else whole.tensor.flatten(0, 1)
            named[f"model.layers.{layer}.mlp.shared_expert.{part}_proj.weight"] = tensor
    return named


def load(folder: Path, config: dict[str, Any], **options: Any) -> Any:
    return load_model(folder, model_config(config), dtype=torch.float32, device=CPU, progress=False, **options)
