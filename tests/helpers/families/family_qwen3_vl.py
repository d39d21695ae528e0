"""A small Qwen3-VL checkpoint and Transformers' way of running it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks import checkpoints
from tests.helpers.families.family_qwen2_5_vl import qwen_reference
from tests.helpers.families.made_once import made_once

VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
LIMITS = {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 1280}

# What the hub says of Qwen3-VL-4B-Instruct.
PUBLISHED_4B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": True,
    "text_config": {
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}

SMALL: dict[str, Any] = {
    **PUBLISHED_4B,
    "text_config": {
        **PUBLISHED_4B["text_config"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
        "vocab_size": 32,
    },
    "vision_config": {
        **PUBLISHED_4B["vision_config"],
        "deepstack_visual_indexes": [0, 1],
        "depth": 3,
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "patch_size": 2,
    },
}


@made_once
def build(
    folder: Path,
    *,
    layout: str = "saved",
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    kinds: tuple[Any, Any] = (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    prepare: Callable[[Any], None] = lambda model: None,
) -> Path:
    """Every structural feature on: deep features, learned positions, interleaved axes, norms of queries and keys,
    heads that are wider together than the stream."""
    tokenizer = checkpoints.qwen_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text_config = {
        **checkpoints.TEXT,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": rope,
        **checkpoints.qwen_vocabulary(tokenizer),
        **(text or {}),
    }
    config = kinds[0](
        text_config=text_config,
        vision_config={**VISION, "out_hidden_size": text_config["hidden_size"], **(vision or {})},
        tie_word_embeddings=True,
        **checkpoints.qwen_image_tokens(tokenizer),
    )
    model = kinds[1](config).float().eval()
    checkpoints.randomise(model, seed)
    prepare(model)
    model.save_pretrained(folder)
    if layout == "published":
        _publish_config(folder / "config.json")
    write_image_processor(folder, layout)
    checkpoints.write_qwen_tokenizer(folder, tokenizer, layout)
    return folder


def write_image_processor(folder: Path, layout: str) -> None:
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "size": LIMITS,
    }
    if layout == "published":
        checkpoints._write(folder / "preprocessor_config.json", settings)
    else:
        whole = {"image_processor": settings, "processor_class": "Qwen3VLProcessor"}
        checkpoints._write(folder / "processor_config.json", whole)


def _publish_config(file: Path) -> None:
    """The hub's dialect: rotary settings in two places, types in the text's part. Its tensor names are today's."""
    config = json.loads(file.read_text())
    text, vision = config["text_config"], config["vision_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = rope
    text["dtype"] = config.pop("dtype", "float32")
    vision.pop("rope_parameters", None)
    vision["model_type"] = config["model_type"]
    checkpoints._write(file, config)


reference = partial(qwen_reference, Qwen3VLForConditionalGeneration)
