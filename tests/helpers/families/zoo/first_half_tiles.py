"""Families whose pictures are cut into tiles or slices."""

from __future__ import annotations

from tests.helpers.families import family_fallback
from tests.helpers.families.zoo.entry import Entry
from tests.helpers.families.zoo.first_half_makers import (
    SQUARE,
    SQUARE_TOWER,
    TOWER,
    WINDOW,
    Recipe,
    entry,
    recipe,
)

_SIGLIP = {**SQUARE_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
_TILES = {"image_processor_type": "GotOcr2ImageProcessor", **SQUARE, "crop_to_patches": True, "max_patches": 4}

# InternVL's tower and tiles over gpt-oss: sinks, windows and experts.
INTERNVL_GPT_OSS = Recipe(
    "internvl",
    text={
        **WINDOW,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    vision={**TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
    marks=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    ids={"image_token_id": "<IMG_CONTEXT>"},
    processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    images=_TILES,
    image="<IMG_CONTEXT>",
    more={"image_seq_length": 4, "downsample_ratio": 0.5, "tie_word_embeddings": False},
    names={"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"},
)
# Its image processor needs torchvision: tiles, and the text that stands for them, are as InternVL has them.
LLAMA4 = recipe(
    "llama4",
    INTERNVL_GPT_OSS,
    ids={"boi_token_index": "<img>", "eoi_token_index": "</img>"},
)._replace(
    text={
        "intermediate_size_mlp": 96,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 32,
        "floor_scale": 32,
    },
    vision={
        **SQUARE_TOWER,
        "vision_output_dim": 64,
        "intermediate_size": 192,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
    ids={"image_token_index": "<IMG_CONTEXT>", "boi_token_index": "<img>", "eoi_token_index": "</img>"},
    more={},
)
# The tower's inner layers go through a Q-Former each, into the decoder's first layers.
_PINPOINTS = {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}
GRANITE4_VISION = Recipe(
    "granite4_vision",
    text={"num_hidden_layers": 4, "attention_multiplier": 0.25, "residual_multiplier": 0.5},
    vision={**_SIGLIP, "hidden_size": 64, "num_hidden_layers": 3},
    marks=("<image>",),
    ids={"image_token_index": "<image>"},
    processor={
        "processor_class": "Granite4VisionProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": "full",
        "downsample_rate": "1/2",
    },
    images={
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": SQUARE["size"],
        **_PINPOINTS,
    },
    image="<image>",
    more={
        **_PINPOINTS,
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 0], [-1, 1]],
        "spatial_target_layers": [2, 3],
        "qformer_config": {
            "model_type": "blip_2_qformer",
            "num_hidden_layers": 1,
            "intermediate_size": 64,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
        },
    },
)
GRANITE_DOCLING = Recipe(
    "granite_docling",
    text={"residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 1.0, "embedding_multiplier": 1.0},
    vision={
        **SQUARE_TOWER,
        "num_hidden_layers": 3,
        "out_hidden_size": 64,
        "scale_factor": 2,
        "deepstack_visual_indexes": [0, 1],
        "use_fine_route": False,
    },
    marks=(
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    ),
    ids={"image_token_id": "<image>"},
    processor={"processor_class": "GraniteDoclingProcessor", "image_seq_len": 4},
    images={"image_processor_type": "GraniteDoclingImageProcessor", **SQUARE, "max_patches": 4},
    image="<image>",
    more={"pad_token_id": 0, "tie_word_embeddings": False},
)
# Slices of a picture, over delta nets and attention. Its processor asks its video processor, which needs torchvision,
# how it cuts frames.
_SLICES = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "image_start": "<image>",
    "image_end": "</image>",
    "slice_start": "<slice>",
    "slice_end": "</slice>",
    "image_id_start": "<image_id>",
    "image_id_end": "</image_id>",
}
MINICPMV4_6 = Recipe(
    "minicpmv4_6",
    text={
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    vision={**TOWER, "image_size": 112, "patch_size": 14},
    marks=tuple(mark for mark in _SLICES.values() if "pad" not in mark),
    ids={"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    processor={"processor_class": "MiniCPMV4_6Processor"},
    images={
        "image_processor_type": "MiniCPMV4_6ImageProcessor",
        "scale_resolution": 112,
        "max_slice_nums": 4,
        "patch_size": 14,
    },
    image="<|image_pad|>",
    more={"insert_layer_id": 0, "image_size": 112},
    names=_SLICES,
)
MINICPMV4_7 = recipe(
    "minicpmv4_7",
    MINICPMV4_6,
    ids={f"{name}_id": _SLICES[name] for name in ("image_start", "image_end", "slice_start", "slice_end")},
    processor={"processor_class": "MiniCPMV4_7Processor"},
)
# Its own image processor needs torchvision; this one cuts slices, too.
MINICPM_OCR = recipe(
    "minicpm_ocr",
    MINICPMV4_6,
    processor={"processor_class": "MiniCPMOcrProcessor"},
    images={"downsample_mode": "4x"},
)._replace(more={"insert_layer_id": 0, "tie_word_embeddings": False})

RECIPES = {
    "internvl@gpt_oss": INTERNVL_GPT_OSS,
    "llama4": LLAMA4,
    "granite4_vision": GRANITE4_VISION,
    "granite_docling": GRANITE_DOCLING,
    "minicpmv4_6": MINICPMV4_6,
    "minicpmv4_7": MINICPMV4_7,
    "minicpm_ocr": MINICPM_OCR,
}
ENTRIES = {
    **{name: entry(made) for name, made in RECIPES.items()},
    "idefics3": Entry(family_fallback.idefics3, "<image>"),
    "internvl": Entry(family_fallback.internvl, "<IMG_CONTEXT>"),
}
