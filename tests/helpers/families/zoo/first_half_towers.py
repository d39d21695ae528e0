"""Families whose towers need no grid of patches, or have more of a picture than patches.

`first_half_pillow` has the image processors of two.
"""

from __future__ import annotations

import tests.helpers.families.zoo.first_half_pillow  # noqa: F401 (registers image processors)
from tests.helpers.families import family_fallback
from tests.helpers.families.zoo.entry import Entry
from tests.helpers.families.zoo.first_half_makers import ROUTED, SQUARE, SQUARE_TOWER, TOWER, Recipe, entry

_SIGLIP = {**SQUARE_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
_CLIP = {**SQUARE_TOWER, "model_type": "clip_vision_model"}
_CROPPED = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 56},
    "crop_size": SQUARE["size"],
}
_SAM = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mlp_dim": 64,
    "output_channels": 16,
    "window_size": 3,
    "global_attn_indexes": [1],
}
_SAM_256 = {**_SAM, "window_size": 14, "image_size": 256, "patch_size": 4}
_SAM_64 = {**_SAM, "image_size": 64, "patch_size": 4}

# Experts, and a picture's longer side of 980 pixels; the rest is padded, with a mask of pixels.
ARIA = Recipe(
    "aria",
    text={"model_type": "aria_text", "intermediate_size": 32, "moe_num_experts": 4, "moe_topk": 2},
    vision={**TOWER, "model_type": "idefics3_vision", "image_size": 980, "patch_size": 70},
    marks=("<|img|>",),
    ids={"image_token_index": "<|img|>"},
    processor={"processor_class": "AriaProcessor", "size_conversion": {"490": 4, "980": 8}},
    images={"image_processor_type": "AriaImageProcessor"},
    image="<|img|>",
    more={"projector_patch_to_query_dict": {"49": 4, "196": 8}},
    names={"image": "<|img|>"},
)
# Its tower, timm's FastViT, needs timm: this one is of the same kind, a map of features from convolutions.
FAST_VLM = Recipe(
    "fast_vlm",
    text={"model_type": "qwen2"},
    vision={
        "model_type": "convnext",
        "hidden_size": 48,
        "hidden_sizes": [16, 48],
        "depths": [1, 1],
        "num_stages": 2,
        "patch_size": 7,
    },
    marks=("<image>",),
    ids={"image_token_index": "<image>"},
    processor={
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": "full",
        "num_additional_image_tokens": 0,
    },
    images=_CROPPED,
    image="<image>",
    more={"image_seq_length": 16},
)
VIPLLAVA = Recipe(
    "vipllava",
    text={"model_type": "llama"},
    vision=_CLIP,
    marks=("<image>",),
    ids={"image_token_index": "<image>"},
    processor={
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    },
    images=_CROPPED,
    image="<image>",
    more={"vision_feature_layer": [-2, -1], "image_seq_length": 16},
)
JANUS = Recipe(
    "janus",
    text={"model_type": "llama"},
    vision={
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "mlp_ratio": 2.0,
        "image_size": 56,
        "patch_size": 14,
        "projection_dim": 64,
        "num_image_tokens": 16,
    },
    marks=("<image_placeholder>", "<begin_of_image>", "<end_of_image>"),
    ids={"image_token_id": "<image_placeholder>"},
    processor={"processor_class": "JanusProcessor", "num_image_tokens": 16},
    images={"image_processor_type": "JanusImageProcessor", **SQUARE},
    image="<image_placeholder>",
    more={
        "tie_word_embeddings": False,
        "vq_config": {
            "embed_dim": 8,
            "num_embeddings": 32,
            "latent_channels": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "projection_dim": 64,
            "image_token_embed_dim": 64,
        },
    },
    names={"image": "<image_placeholder>", "boi": "<begin_of_image>", "eoi": "<end_of_image>"},
)
# Its processor counts on 256 tokens a picture: patches are small, so that pictures are.
GOT_OCR2 = Recipe(
    "got_ocr2",
    text={"model_type": "qwen2"},
    vision=_SAM_256,
    marks=("<img>", "</img>", "<imgpad>"),
    ids={"image_token_index": "<imgpad>"},
    processor={"processor_class": "GotOcr2Processor"},
    images={"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 256, "width": 256}},
    image="<img><imgpad></img>",
    more={"image_seq_length": 256, "tie_word_embeddings": False},
    gains={"embed_tokens": 3.0},
)
# Features of a second tower, for pictures twice as large, are mixed in.
DEEPSEEK_VL_HYBRID = Recipe(
    "deepseek_vl_hybrid",
    text={"model_type": "llama"},
    vision=_SIGLIP,
    marks=("<image_placeholder>",),
    ids={"image_token_id": "<image_placeholder>"},
    processor={"processor_class": "DeepseekVLHybridProcessor", "num_image_tokens": 16},
    images={
        "image_processor_type": "DeepseekVLHybridImageProcessor",
        **SQUARE,
        "high_res_size": {"height": 112, "width": 112},
    },
    image="<image_placeholder>",
    more={
        "tie_word_embeddings": False,
        "high_res_vision_config": {
            "model_type": "sam_vision_model",
            **_SAM,
            "image_size": 112,
            "patch_size": 7,
        },
    },
    names={"image": "<image_placeholder>"},
)
# Its code counts on 144 queries of a tile and 256 of a whole picture: patches are small, so that pictures are.
DEEPSEEK_OCR2 = Recipe(
    "deepseek_ocr2",
    text={**ROUTED, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
    vision={
        "sam_config": {**_SAM_256, "downsample_channels": [32, 48]},
        "encoder_config": {**TOWER, "num_key_value_heads": 2, "max_position_embeddings": 1024},
    },
    marks=("<image>",),
    ids={"image_token_id": "<image>"},
    processor={"processor_class": "DeepseekOcr2Processor", "patch_size": 4, "downsample_ratio": 4},
    images={
        "image_processor_type": "DeepseekOcr2ImageProcessor",
        "size": {"height": 256, "width": 256},
        "tile_size": 192,
    },
    image="<image>",
    seed=1,
    gains={"embed_tokens": 5.0},
)
# What was computed sees all of the prompt, and a window of the answer: of so few tokens that it matters in short ones.
UNLIMITED_OCR = Recipe(
    "unlimited_ocr",
    text={**ROUTED, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"], "sliding_window": 8},
    vision={
        "sam_config": {**_SAM_64, "downsample_channels": [32, 48]},
        "encoder_config": {**TOWER, "image_size": 64, "patch_size": 4},
    },
    marks=("<image>",),
    ids={"image_token_id": "<image>"},
    processor={"processor_class": "UnlimitedOcrProcessor", "patch_size": 4, "downsample_ratio": 4},
    images={
        "image_processor_type": "TilesUnlimitedOcrImageProcessor",
        "size": {"height": 64, "width": 64},
        "tile_size": 48,
        "max_patches": 4,
    },
    image="<image>",
)
# A picture becomes codes, and codes are tokens of the vocabulary.
CHAMELEON = Recipe(
    "chameleon",
    text={},
    vision={},
    marks=(
        "<image>",
        "<racm3:break>",
        "<eoss>",
        "<reserved08706>",
        *(f"IMGIMG{tens}{ones}Z" for tens in "ABCD" for ones in "ABCDEFGHIJ"),
    ),
    ids={},
    processor={"processor_class": "ChameleonProcessor", "image_seq_length": 16},
    images={
        "image_processor_type": "ChameleonImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
    },
    image="<image>",
    more={
        "vq_config": {
            "embed_dim": 16,
            "num_embeddings": 40,
            "latent_channels": 16,
            "resolution": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1],
            "num_res_blocks": 1,
        },
    },
    names={"image": "<image>", "boi": "<racm3:break>", "eoi": "<eoss>", "sep": "<reserved08706>"},
    flat=True,
    gains={"q_norm": 3.0, "k_norm": 3.0, "embed_tokens": 3.0},
)
# Decoder layers with short convolutions beside attention.
LFM2_VL = Recipe(
    "lfm2_vl",
    text={
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    vision={**TOWER, "model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 16},
    marks=("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    ids={"image_token_id": "<image>"},
    processor={"processor_class": "Lfm2VlProcessor"},
    images={"image_processor_type": "WholeLfm2VlImageProcessor", "max_num_patches": 64},
    image="<image>",
    more={"projector_hidden_size": 64, "tie_word_embeddings": False},
    names={"image": "<image>"},
    gains={"self_attn.out_proj": 4.0},
)

ENTRIES = {
    **{
        made.model_type: entry(made)
        for made in (
            ARIA,
            FAST_VLM,
            VIPLLAVA,
            JANUS,
            GOT_OCR2,
            DEEPSEEK_VL_HYBRID,
            DEEPSEEK_OCR2,
            UNLIMITED_OCR,
            CHAMELEON,
            LFM2_VL,
        )
    },
    "deepseek_vl": Entry(family_fallback.deepseek_vl, "<image_placeholder>"),
}
