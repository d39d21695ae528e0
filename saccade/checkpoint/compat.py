"""Compatibility with configs that predate Transformers' names (Qwen, Qwen-VL): converts them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class ConfigFiles(NamedTuple):
    config: Mapping[str, Any]  # of config.json
    generation: Mapping[str, Any]  # of generation_config.json


def normalize(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ConfigFiles:
    """Convert if needed. Idempotent, since another process reads a converted config again."""
    files = ConfigFiles(config, generation)
    if config.get("model_type") != "qwen" or "head_dim" in config:
        return files
    return _qwen(files)


_QWEN_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "kv_channels": 128,
    "layer_norm_epsilon": 1e-6,
    "rotary_emb_base": 10000,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "tie_word_embeddings": False,
}
_QWEN_QUERIES = 256
_QWEN_PAD = 2  # offset of <imgpad> from <img>
_QWEN_ENDS = 3  # <|endoftext|> and, for chats, the next two: <|im_start|> and <|im_end|>


def _qwen(files: ConfigFiles) -> ConfigFiles:
    raw = {**_QWEN_DEFAULTS, **files.config}
    chat = files.generation.get("chat_format")
    common = {
        **raw,
        "intermediate_size": raw["intermediate_size"] // 2,  # Qwen's is that of gate and up together
        "head_dim": raw["kv_channels"],
        "max_position_embeddings": _qwen_positions(raw),
        "rms_norm_eps": raw["layer_norm_epsilon"],
        "rope_theta": raw["rotary_emb_base"],
        "chat_format": chat,
        **_qwen_tower(raw.get("visual", {})),
    }
    end = files.generation.get("eos_token_id")
    if chat != "chatml" or not isinstance(end, int):
        return ConfigFiles(common, files.generation)
    return ConfigFiles(common, {**files.generation, "eos_token_id": list(range(end, end + _QWEN_ENDS))})


def _qwen_positions(raw: Mapping[str, Any]) -> int:
    """Capped at the trained length: dynamic NTK and log-n attention, used beyond it, are not implemented."""
    maximum: int = raw["max_position_embeddings"]
    if raw["use_dynamic_ntk"] or raw["use_logn_attn"]:
        maximum = min(raw.get("seq_length", maximum), maximum)
    return maximum


def _qwen_tower(visual: Mapping[str, Any]) -> dict[str, Any]:
    if not visual:
        return {}
    queries = visual.get("n_queries", _QWEN_QUERIES)
    side = visual.get("image_size", 0) // visual.get("patch_size", 1)
    vision = {
        **visual,
        "model_type": "qwen_visual",
        "embed_dim": visual.get("width"),
        "depth": visual.get("layers"),
        "num_heads": visual.get("heads"),
        "n_queries": queries,
        "hidden_act": "gelu",
        "takes_squares": True,
        # An average, as every query attends to all patches.
        "spatial_merge_size": max(1, side // max(1, math.isqrt(max(0, queries)))),
    }
    if "image_start_id" not in visual:
        return {"vision_config": vision}
    return {"vision_config": vision, "image_token_id": visual["image_start_id"] + _QWEN_PAD}
