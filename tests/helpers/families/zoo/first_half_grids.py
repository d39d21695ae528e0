"""Families whose pictures keep their shape: their models read a grid of patches beside the pixels."""

from __future__ import annotations

from tests.helpers.families.zoo.entry import BUDGET
from tests.helpers.families.zoo.first_half_makers import MLA, ROUTED, TOWER, WINDOW, Recipe, entry, recipe

_EDGES = {"size": {"shortest_edge": 56 * 56, "longest_edge": 224 * 224}}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_MIXED_AXES = {**_AXES, "mrope_interleaved": True}
_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 48,
    "num_heads": 4,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "patch_size": 14,
}
_WINDOWS = {"window_size": 56, "fullatt_block_indexes": [1]}
_DEEP = {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
_SHARP = {"q_norm": 2.0, "k_norm": 2.0}  # attention to few tokens, where it would be to all alike
_QWEN_IDS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
_START_END = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}

# A tower with windows, as Qwen2.5-VL's.
HYPERCLOVAX = Recipe(
    "hyperclovax_vision_v2",
    text={"model_type": "hyperclovax", "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    vision={**_QWEN_TOWER, **_WINDOWS, "model_type": "qwen2_5_vl_vision"},
    marks=(),
    ids=_QWEN_IDS,
    processor={"processor_class": "HyperCLOVAXVisionV2Processor"},
    images={"image_processor_type": "Qwen2VLImageProcessor", **_EDGES},
    image="<|vision_start|><|image_pad|><|vision_end|>",
    more={"tie_word_embeddings": False},
)
EXAONE4_5 = recipe(
    "exaone4_5",
    HYPERCLOVAX,
    processor={"processor_class": "Exaone4_5_Processor"},
)._replace(
    text={**WINDOW, "model_type": "exaone4", "sliding_window_pattern": "LG", "head_dim": 16},
    vision={**_QWEN_TOWER, **_WINDOWS, "num_key_value_heads": 2},
    gains=_SHARP,
    seed=1,
)
# Features of inner layers of the tower are added in the decoder's first layers.
COSMOS3_OMNI = recipe(
    "cosmos3_omni",
    HYPERCLOVAX,
    ids={**_QWEN_IDS, **_START_END},
    processor={"processor_class": "Qwen3VLProcessor"},
    images={"patch_size": 16},
)._replace(
    text={"model_type": "qwen3_vl_text", "head_dim": 16, "rope_parameters": _MIXED_AXES},
    vision={**_QWEN_TOWER, **_DEEP},
    gains=_SHARP,
)
# Its processor says which tokens are an image's when it is asked to (`return_mm_token_type_ids`).
COSMOS3_EDGE = recipe(
    "cosmos3_edge",
    COSMOS3_OMNI,
    processor={"processor_class": "Cosmos3EdgeProcessor"},
    images={"image_processor_type": "Cosmos3EdgeImageProcessor"},
    more={"projector_hidden_size": 96},
)._replace(
    text={"head_dim": 16, "rope_parameters": _AXES},
    vision={**TOWER, "num_patches": 16, "patch_size": 16},
    gains={"self_attn.q_proj": 2.0},
)
COHERE_COMPASS = recipe(
    "cohere_compass",
    COSMOS3_OMNI,
    text={**WINDOW, "logit_scale": 1.0, "rope_parameters": dict.fromkeys(WINDOW["layer_types"], _MIXED_AXES)},
    processor={"processor_class": "CohereCompassProcessor"},
    images={"image_processor_type": "CohereCompassImageProcessor"},
)._replace(
    marks=tuple(f"<|{name}|>" for name in ("IMAGE_PAD", "VIDEO_PAD", "VISION_START", "VISION_END")),
    ids={name: mark.upper() for name, mark in {**_QWEN_IDS, **_START_END}.items()},
    image="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
)
PADDLE_OCR = Recipe(
    "paddleocr_vl",
    text={"head_dim": 16, "rope_parameters": _AXES},
    vision={**TOWER, "image_size": 112, "patch_size": 14},
    marks=tuple(f"<|IMAGE_{name}|>" for name in ("PLACEHOLDER", "START", "END")),
    ids={
        "image_token_id": "<|IMAGE_PLACEHOLDER|>",
        "vision_start_token_id": "<|IMAGE_START|>",
        "vision_end_token_id": "<|IMAGE_END|>",
    },
    processor={"processor_class": "PaddleOCRVLProcessor"},
    images={"image_processor_type": "PaddleOCRVLImageProcessor", **_EDGES},
    image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    more={"tie_word_embeddings": False},
    names={"image": "<|IMAGE_PLACEHOLDER|>"},
)
HUNYUAN = Recipe(
    "hunyuan_vl",
    text={
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "xdrope",
            "rope_theta": 10000.0,
            "alpha": 1000.0,
            "factor": 1.0,
            "mrope_section": [2] * 4,
        },
    },
    vision={**TOWER, "out_hidden_size": 64, "max_image_size": 256, "min_image_size": 64, "img_max_token_num": 256},
    marks=("<image>", "<img>", "</img>"),
    ids={"image_token_id": "<image>", "im_start_id": "<img>", "im_end_id": "</img>"},
    processor={"processor_class": "HunYuanVLProcessor"},
    images={"image_processor_type": "HunYuanVLImageProcessor", "min_pixels": 64 * 64, "max_pixels": 224 * 224},
    image="<img><image></img>",
    more={"tie_word_embeddings": False},
    names={"image": "<image>", "image_start": "<img>", "image_end": "</img>"},
    gains={"query_layernorm": 2.0, "key_layernorm": 2.0},
)
LIGHTON_OCR = Recipe(
    "lighton_ocr",
    text={"model_type": "qwen3", "head_dim": 16},
    vision={**TOWER, "model_type": "pixtral", "image_size": 140, "patch_size": 14, "head_dim": 12},
    marks=(),
    ids={"image_token_id": "<|image_pad|>"},
    processor={"processor_class": "LightOnOcrProcessor", "patch_size": 14, "spatial_merge_size": 2},
    images={"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 140}, "patch_size": 28},
    image="<|image_pad|>",
    names={"image": "<|image_pad|>", "image_break": "<|vision_pad|>", "image_end": "<|vision_end|>"},
    more={"tie_word_embeddings": False},
    gains=_SHARP,
)
KIMI = Recipe(
    "kimi_k25",
    text={**MLA, **ROUTED, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    vision={**TOWER, "pos_emb_height": 8, "pos_emb_width": 8},
    marks=("<|media_begin|>", "<|media_pad|>", "<|media_end|>", "<|kimi_k25_video_placeholder|>"),
    ids={
        "image_token_id": "<|media_pad|>",
        "video_token_id": "<|kimi_k25_video_placeholder|>",
        "vision_start_token_id": "<|media_begin|>",
        "vision_end_token_id": "<|media_end|>",
    },
    processor={"processor_class": "Kimi_K25Processor"},
    # Its own image processor needs torchvision; this one makes patches of the same shape.
    images={"image_processor_type": "PaddleOCRVLImageProcessor", **_EDGES},
    image="<|media_begin|><|media_pad|><|media_end|>",
    more={"projection_hidden_size": 48, "tie_word_embeddings": False},
)
_ERNIE_NAMES = {
    "image": "<|IMAGE_PLACEHOLDER|>",
    "image_start": "<|IMAGE_START|>",
    "image_end": "<|IMAGE_END|>",
    "video": "<|VIDEO_PLACEHOLDER|>",
    "video_start": "<|VIDEO_START|>",
    "video_end": "<|VIDEO_END|>",
}
ERNIE = Recipe(
    "ernie4_5_vl_moe",
    text={
        "moe_intermediate_size": [32, 24],
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "rope_parameters": {**_AXES, "mrope_section": [3, 3, 2]},
    },
    vision={**_QWEN_TOWER, "out_hidden_size": 64},
    marks=tuple(_ERNIE_NAMES.values()),
    ids={f"{name}_token_id": mark for name, mark in _ERNIE_NAMES.items()},
    processor={"processor_class": "Ernie4_5_VLMoeProcessor"},
    images={"image_processor_type": "Ernie4_5_VLMoeImageProcessor", **_EDGES},
    image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    names=_ERNIE_NAMES,
    more={"tie_word_embeddings": False},
)
DOTS3_NOTE = Recipe(
    "dots3_note",
    text={
        **MLA,
        **ROUTED,
        "num_hidden_layers": 4,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "sliding_window": 32,
        "index_topk": BUDGET,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "head_dim": 24,
        "shared_experts_intermediate_size": 32,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    vision={
        **TOWER,
        "moe_intermediate_size": 32,
        "num_local_experts": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "adapter_in_dim": 48,
        "adapter_out_dim": 64,
    },
    marks=("<|imgpad|>", "<|audio_comp_pad|>"),
    ids={"image_token_id": "<|imgpad|>", "video_token_id": "<|video_pad|>", "audio_token_id": "<|audio_comp_pad|>"},
    processor={"processor_class": "Dots3NoteProcessor"},
    images={"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 1, **_EDGES},
    image="<|vision_start|><|imgpad|><|vision_end|>",
    more={
        "audio_config": {
            **TOWER,
            "feature_size": 16,
            "downsample_hidden_size": 16,
            "adapter_input_size": 48,
            "adapter_out_dim": 64,
        }
    },
)

RECIPES = (
    PADDLE_OCR,
    HUNYUAN,
    LIGHTON_OCR,
    HYPERCLOVAX,
    EXAONE4_5,
    KIMI,
    ERNIE,
    COHERE_COMPASS,
    COSMOS3_EDGE,
    COSMOS3_OMNI,
    DOTS3_NOTE,
)
ENTRIES = {each.model_type: entry(each) for each in RECIPES}
