"""Defaults of Transformers' config classes, which published configs leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
    },
    "qwen3": {"use_sliding_window": False, "head_dim": 128},
    "ministral3": {"head_dim": 128, "rms_norm_eps": 1e-5},
    "qwen3_moe": {"use_sliding_window": False},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "qwen3_5_moe_text": {"norm_topk_prob": True},
    "deepseek_v2": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "vocab_size": 102400,
        "max_position_embeddings": 2048,
        "use_mla": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
LANGUAGE_TYPE = "deepseek_v2"  # of a language_config without model_type
VISION_DEFAULTS: Mapping[str, Any] = {
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
    "hidden_act": "quick_gelu",
}
TOWER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {  # by the tower's model_type
    "pixtral": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 16,
        "hidden_act": "gelu",
        "is_gated": True,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 16,
        "image_size": 224,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "mllama_vision_model": {"num_global_layers": 8},
    "vision": {  # timm's names
        "width": 1024,
        "layers": 24,
        "heads": 16,
        "patch_size": 16,
        "image_size": 384,
        "mlp_ratio": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "takes_squares": True,
    },
}
