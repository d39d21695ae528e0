"""Random checkpoints of a stated shape, made with Transformers, for benchmarks that need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


# About 105 million parameters, of which the embeddings of Qwen's vocabulary, which are the head too, are 78.
SMALL_TEXT = {
    **TEXT,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 151936,
}
SMALL_VISION = {"depth": 6, "embed_dim": 320, "num_heads": 5, "mlp_ratio": 4}


def qwen2_vl_120m(folder: Path) -> Path:
    return _made_once(folder, TEXT, VISION)


def qwen2_vl_105m(folder: Path) -> Path:
    return _made_once(folder, SMALL_TEXT, SMALL_VISION)


def _made_once(folder: Path, text: dict[str, Any], vision: dict[str, Any]) -> Path:
    """The folder is a cache."""
    if not (folder / "tokenizer_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints.qwen2_vl(folder, text=text, vision=vision)
    return folder
