"""Gemma's and Cohere's families: layers with windows beside layers without, and pictures that are read both ways."""

from __future__ import annotations

from tests.helpers.families.zoo.first_half_makers import SQUARE, SQUARE_TOWER, TOWER, WINDOW, Recipe, entry, recipe

_SIGLIP = {**SQUARE_TOWER, "model_type": "siglip_vision_model"}
_ENDS = {"boi_token_id": "<start_of_image>", "eoi_token_id": "<end_of_image>"}
_NAMES = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}

SMALL_EMBEDDINGS = {"embed_tokens": 0.05}  # where a tied head would repeat the last token

GEMMA3 = Recipe(
    "gemma3",
    text={**WINDOW, "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16},
    vision={**_SIGLIP, "vision_use_head": False},
    marks=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    ids={
        "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
    images={"image_processor_type": "Gemma3ImageProcessor", **SQUARE},
    image="<start_of_image>",
    more={"mm_tokens_per_image": 4},
    names=_NAMES,
    gains=SMALL_EMBEDDINGS,
)
PALIGEMMA = Recipe(
    "paligemma",
    text={"model_type": "gemma", "head_dim": 16},
    vision={**_SIGLIP, "projection_dim": 64, "vision_use_head": False},
    marks=("<image>", "<bos>"),
    ids={"image_token_index": "<image>"},
    processor={"processor_class": "PaliGemmaProcessor"},
    images={"image_processor_type": "SiglipImageProcessor", **SQUARE, "image_seq_length": 16},
    image="<image>",
    more={"projection_dim": 64},
    names={"bos": "<bos>", "image": "<image>"},
)

# Gemma 4's processor asks for tokens of sounds. Images become as large as 70 tokens let them.
_AUDIO = {"audio": "<audio_soft_token>", "boa": "<start_of_audio>", "eoa": "<end_of_audio>"}
_LAYERS4 = {**WINDOW, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_WIDE = {"head_dim": 16, "global_head_dim": 32}  # layers without windows have heads of their own
_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
_PER_LAYER = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 512,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}

GEMMA4 = Recipe(
    "gemma4",
    text={
        **_LAYERS4,
        **_WIDE,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 30.0,
    },
    vision={**TOWER, "num_key_value_heads": 4, "head_dim": 12, "position_embedding_size": 256},
    marks=("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<|video|>", *_AUDIO.values()),
    ids={**_ENDS, "image_token_id": "<image_soft_token>", "video_token_id": "<|video|>"},
    processor={"processor_class": "Gemma4Processor", "image_seq_length": 70},
    images={"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70},
    image="<image_soft_token>",
    names={**_NAMES, **_AUDIO},
    gains=SMALL_EMBEDDINGS,
)
UNIFIED = recipe(
    "gemma4_unified",
    GEMMA4,
    text={"enable_moe_block": False},
    processor={"processor_class": "Gemma4UnifiedProcessor"},
    # Its own image processor needs torchvision; this one cuts the same patches.
    images={"patch_size": 48, "pooling_kernel_size": 1},
)._replace(vision={"mm_embed_dim": 48, "mm_posemb_size": 128, "output_proj_dims": 48})
E2B = recipe("gemma4", GEMMA4, text={**_PER_LAYER, "attention_k_eq_v": False, "use_bidirectional_attention": None})
_COHERE = {**WINDOW, "model_type": "cohere2", "head_dim": 16}

AYA_VISION = Recipe(
    "aya_vision",
    text=_COHERE,
    vision=_SIGLIP,
    marks=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<image>", "TILE", "TILE_GLOBAL"),
    ids={"image_token_index": "<|IMG_PATCH|>"},
    processor={"processor_class": "AyaVisionProcessor", "img_size": 56, "patch_size": 14, "downsample_factor": 2},
    images={"image_processor_type": "GotOcr2ImageProcessor", **SQUARE, "max_patches": 4},
    image="<image>",
)

RECIPES = {
    "gemma3": GEMMA3,
    "aya_vision": AYA_VISION,
    # Its image processor needs torchvision; this one cuts the same tiles.
    "cohere2_vision": Recipe(
        "cohere2_vision",
        text=_COHERE,
        vision=_SIGLIP,
        marks=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"),
        ids={"image_token_id": "<|IMG_PATCH|>"},
        processor={"processor_class": "Cohere2VisionProcessor"},
        images={
            "image_processor_type": "GotOcr2ImageProcessor",
            **SQUARE,
            "crop_to_patches": True,
            "max_patches": 4,
            "patch_size": 2,
        },
        image="<|IMG_PATCH|>",
        more={"alignment_intermediate_size": 64},
        names={
            "boi": "<|START_OF_IMG|>",
            "eoi": "<|END_OF_IMG|>",
            "image": "<|IMG_PATCH|>",
            "img_line_break": "<|IMG_LINE_BREAK|>",
        },
    ),
    "gemma4": GEMMA4,
    "gemma4@e2b": E2B,
    "gemma4@moe": recipe("gemma4", GEMMA4, text=_MOE),
    "gemma4_unified": UNIFIED,
    "paligemma": PALIGEMMA,
}
ENTRIES = {name: entry(made) for name, made in RECIPES.items()}
