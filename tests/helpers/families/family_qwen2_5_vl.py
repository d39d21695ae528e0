"""A small Qwen2.5-VL checkpoint and Transformers' way of running it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks import checkpoints
from tests.helpers.engine.reference import Reference, image_settings, load
from tests.helpers.families.made_once import made_once

VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 44,  # no multiple of 8, like the 3420 of the published towers
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,  # two tokens, so that small pictures have whole and cut windows
    "fullatt_block_indexes": [1],
}
LIMITS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}

# What the hub says of Qwen2.5-VL-7B-Instruct, text fields at the top level.
PUBLISHED_7B: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    },
    "vocab_size": 152064,
}

SMALL: dict[str, Any] = {
    **PUBLISHED_7B,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "vocab_size": 32,
    "vision_config": {
        **PUBLISHED_7B["vision_config"],
        "depth": 3,
        "fullatt_block_indexes": [1],
        "hidden_size": 96,
        "intermediate_size": 168,
        "num_heads": 2,
        "patch_size": 2,
        "window_size": 8,
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
) -> Path:
    """Every structural feature on: windows, a full layer between them, RMS norms, gated MLPs with biases."""
    tokenizer = checkpoints.qwen_tokenizer()
    text_config = {
        **checkpoints.QWEN2_VL_TEXT,
        **checkpoints.qwen_vocabulary(tokenizer),
        "tie_word_embeddings": False,
        **(text or {}),
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config={**VISION, "out_hidden_size": text_config["hidden_size"], **(vision or {})},
        tie_word_embeddings=False,
        **checkpoints.qwen_image_tokens(tokenizer),
    )
    checkpoints._save_model(Qwen2_5_VLForConditionalGeneration, config, folder, seed, "5GB")
    if layout == "published":
        checkpoints._publish(folder, checkpoints.QWEN_OLD_NAMES, flatten=True)
    write_image_processor(folder, layout)
    checkpoints.write_qwen_tokenizer(folder, tokenizer, layout)
    return folder


def write_image_processor(folder: Path, layout: str) -> None:
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": checkpoints.CLIP_MEAN,
        "image_std": checkpoints.CLIP_STD,
        "merge_size": 2,
        "patch_size": 14,
        "temporal_patch_size": 2,
    }
    if layout == "published":
        checkpoints._write(folder / "preprocessor_config.json", {**settings, **LIMITS})
        return
    size = {"shortest_edge": LIMITS["min_pixels"], "longest_edge": LIMITS["max_pixels"]}
    whole = {"image_processor": {**settings, "size": size}, "processor_class": "Qwen2_5_VLProcessor"}
    checkpoints._write(folder / "processor_config.json", whole)


def qwen_reference(kind: Any, folder: Path) -> Reference:
    """For every class of models whose pictures are read as Qwen2-VL's are."""
    model, tokenizer = load(kind, folder)
    processor, pad = Qwen2VLImageProcessorPil(**image_settings(folder)), "<|image_pad|>"

    def read(images: list[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        made = dict(processor(images, return_tensors="pt"))
        return made, [pad * (int(grid.prod()) // 4) for grid in made["image_grid_thw"]]

    def kinds(ids: torch.Tensor) -> dict[str, Any]:
        return {"mm_token_type_ids": torch.eq(ids, model.config.image_token_id).int()}

    return Reference(model, tokenizer, pad, read, kinds)


reference = partial(qwen_reference, Qwen2_5_VLForConditionalGeneration)
