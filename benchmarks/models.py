"""Random checkpoints of a stated shape, made with Transformers, for benchmarks that need no download."""

from __future__ import annotations

from pathlib import Path

from benchmarks import checkpoints

# About 120 million parameters: 12 decoder layers of 768 with grouped heads, 12 vision layers of 512.
TEXT = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
}
VISION = {"depth": 12, "embed_dim": 512, "num_heads": 8, "mlp_ratio": 4}


def qwen2_vl_120m(folder: Path) -> Path:
    """Made once and kept: the folder is a cache."""
    if not (folder / "tokenizer_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints.qwen2_vl(folder, text=TEXT, vision=VISION)
    return folder
