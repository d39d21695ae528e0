"""Families whose pictures are grids of patches, as Qwen2-VL's; their decoders have experts, states and windows."""

from __future__ import annotations

from tests.helpers.families.zoo.entry import BUDGET
from tests.helpers.families.zoo.second_half_makers import (
    LLAMA,
    QWEN2,
    WINDOW,
    Id,
    family,
)

PAD = "<|image_pad|>"
IMAGE = f"<|vision_start|>{PAD}<|vision_end|>"
NAMES = {
    "image": PAD,
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
OMNI_NAMES = {
    "image": PAD,
    "video": "<|video_pad|>",
    "audio": "<|AUDIO|>",
    "vision_bos": "<|vision_start|>",
    "vision_eos": "<|vision_end|>",
    "audio_bos": "<|audio_bos|>",
    "audio_eos": "<|audio_eos|>",
}
IDS = {"image_token_id": Id(PAD), "video_token_id": Id("<|video_pad|>")}
STARTS = {"vision_start_token_id": Id("<|vision_start|>"), "vision_end_token_id": Id("<|vision_end|>")}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TOWER = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
}
AUDIO = {
    "num_mel_bins": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "max_source_positions": 64,
    "output_dim": 64,
}
MUSE_TOWER = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "layer_types": ["window_attention", "full_attention"],
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "max_position_embeddings": 16,
}
MUSE_PROJECTOR = {"out_hidden_size": 4 * 48, "projector_hidden_size": 64}
MUSE_IDS = {"image_token_id": Id("<|patch|>"), "video_token_id": Id("<|video|>")}
MUSE_MARKS = ("<|image_start|>", "<|image_end|>", "<|vid_frame_separator|>", "<|vid_start|>", "<|vid_end|>")
MUSE_TEXT = {
    **LLAMA,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MINIMAX = {f"{name}_token_index": Id(f"]<]{name}[>[") for name in ("image", "video")}


def qwen_images(patch: int = 14) -> dict[str, object]:
    size = {"shortest_edge": 112 * 112, "longest_edge": 192 * 192}  # pixels
    return {"image_processor_type": "Qwen2VLImageProcessor", "size": size, "patch_size": patch}


ENTRIES = {
    "qwen2_5_omni_thinker": family(
        "qwen2_5_omni_thinker",
        {
            "text_config": {**QWEN2, "model_type": "qwen2_5_omni_text", "rope_parameters": MROPE},
            "vision_config": {**TOWER, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
            "audio_config": AUDIO,
            **{key.replace("_id", "_index"): token for key, token in IDS.items()},
            "audio_token_index": Id("<|AUDIO|>"),
            "audio_start_token_id": Id("<|audio_bos|>"),
            "audio_end_token_id": Id("<|audio_eos|>"),
            **STARTS,
        },
        {"processor_class": "Qwen2_5OmniProcessor", "image_processor": qwen_images()},
        IMAGE,
        named=OMNI_NAMES,
    ),
    "qwen3_omni_moe_thinker": family(
        "qwen3_omni_moe_thinker",
        {
            "text_config": {
                **LLAMA,
                **EXPERTS,
                "model_type": "qwen3_omni_moe_text",
                "num_hidden_layers": 3,
                "mlp_only_layers": [1],
                "head_dim": 16,
                "rope_parameters": {**MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
            },
            "vision_config": {
                **TOWER,
                "depth": 3,
                "patch_size": 16,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            "audio_config": {**AUDIO, "downsample_hidden_size": 8},
            **IDS,
            "audio_token_id": Id("<|AUDIO|>"),
            "audio_start_token_id": Id("<|audio_bos|>"),
            **STARTS,
        },
        {"processor_class": "Qwen3OmniMoeProcessor", "image_processor": qwen_images(16)},
        IMAGE,
        named=OMNI_NAMES,
    ),
    "qwen4_exp": family(
        "qwen4_exp",
        {
            "text_config": {
                **LLAMA,
                **EXPERTS,
                "model_type": "qwen4_exp_text",
                "num_hidden_layers": 4,
                "layer_types": ["linear_attention", "indexed_attention"] * 2,
                "head_dim": 32,
                "rope_parameters": {
                    **MROPE,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                    "partial_rotary_factor": 0.25,
                },
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 24,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "shared_expert_intermediate_size": 32,
                "hc_count": 2,
                "hc_lowrank": 8,
                "ple_layer_ids": [1],
                "ple_embed_dim": 32,
                "heads_per_ngram": 2,
                "ngram_vocab_size_base": 101,
                "make_ngram_vocab_size_divisible_by": 8,
                "split_ngram_parts": 4,
                "indexer_n_heads": 2,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 16,
                "indexer_budget": BUDGET,
                "indexer_compress_ratio": 4,
            },
            "vision_config": {**TOWER, "patch_size": 16, "num_position_embeddings": 16},
            **IDS,
            **STARTS,
        },
        {"processor_class": "Qwen3VLProcessor", "image_processor": qwen_images(16)},
        IMAGE,
        named=NAMES,
    ),
    "lfm3_vl": family(
        "lfm3_vl",
        {
            "text_config": {
                **LLAMA,
                "model_type": "lfm3",
                "head_dim": 16,
                "num_hidden_layers": 4,
                "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
                "sliding_window": WINDOW,
                "conv_L_cache": 4,
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "hidden_size": 48,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "conv"],
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            "projector_hidden_size": 96,
            **IDS,
            **STARTS,
        },
        {"processor_class": "Lfm3VlProcessor", "image_processor": qwen_images(16)},
        IMAGE,
        named=NAMES,
    ),
    # The image processors of the next three need torchvision; Qwen2-VL's makes inputs of the same names and shapes.
    "minimax_m3_vl": family(
        "minimax_m3_vl",
        {
            "text_config": {
                **LLAMA,
                "model_type": "minimax_m3_vl_text",
                "head_dim": 16,
                "rotary_dim": 8,
                "num_hidden_layers": 3,
                "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "intermediate_size": 32,
                "dense_intermediate_size": 96,
                "shared_intermediate_size": 32,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "index_n_heads": 2,
                "index_head_dim": 16,
                "index_block_size": 8,
                "index_topk_blocks": BUDGET // 8,
            },
            "vision_config": {
                "hidden_size": 48,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 112,
            },
            "projector_hidden_size": 64,
            **MINIMAX,
        },
        {"processor_class": "MiniMaxM3VLProcessor", "image_processor": qwen_images()},
        "]<]image[>[",
        marks=("]<]start of image[>[", "]<]end of image[>["),
    ),
    "muse_glimmer": family(
        "muse_glimmer",
        {"text_config": MUSE_TEXT, "vision_config": MUSE_TOWER, **MUSE_PROJECTOR, **MUSE_IDS},
        {"processor_class": "MuseGlimmerProcessor", "image_processor": qwen_images()},
        "<|patch|>",
        marks=MUSE_MARKS,
    ),
    "muse_spark": family(
        "muse_spark",
        {
            "text_config": {
                **MUSE_TEXT,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "moe_hidden_size": 32,
                "mlp_layer_types": ["dense", "sparse", "sparse"],
            },
            "vision_config": MUSE_TOWER,
            "audio_config": {
                "patch_sizes": [4, 4],
                "hidden_sizes": [16, 32],
                "depths": [1, 1],
                "num_hidden_layers": 2,
                "out_hidden_size": 64,
            },
            **MUSE_PROJECTOR,
            **MUSE_IDS,
            "audio_token_id": Id("<|audio|>"),
        },
        {"processor_class": "MuseSparkProcessor", "image_processor": qwen_images()},
        "<|patch|>",
        marks=(*MUSE_MARKS, "<|soft_audio_start|>", "<|soft_audio_end|>"),
    ),
}
