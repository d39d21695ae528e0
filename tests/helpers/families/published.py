"""Configs as they are published, and what must be read from them."""

from __future__ import annotations

PUBLISHED = {
    "model_type": "qwen2_vl",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "image_token_id": 151655,
    "eos_token_id": 151645,
    "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "in_chans": 3,
                      "hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}  # fmt: skip
