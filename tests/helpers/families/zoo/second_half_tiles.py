"""Families whose own processor needs torchvision, even for Pillow's pictures: load it in `stand_in_torchvision`."""

from __future__ import annotations

from typing import Any

from tests.helpers.families.family_mistral3 import MINISTRAL_ROPE
from tests.helpers.families.zoo.entry import BUDGET
from tests.helpers.families.zoo.second_half_makers import LLAMA, SQUARE, TOWER, VOCABULARY, WINDOW, Id, family

EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LATENT = {
    **LLAMA,
    **EXPERTS,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,  # so that short prompts are long ones
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
PIXTRAL = {**TOWER, "model_type": "pixtral", "image_size": 168, "hidden_act": "silu"}
PIXTRAL_MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
PIXTRAL_IMAGES = {"patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 168}}
PIXTRAL_PROCESSOR = {
    "processor_class": "PixtralProcessor",
    "image_processor": {"image_processor_type": "PixtralImageProcessor", **PIXTRAL_IMAGES},
    "patch_size": 14,
    "spatial_merge_size": 2,
}
MOLMO_MARKS = ("<im_col>", "<frame_start>", "<frame_end>", "<im_low>", "<|image|>", "<|video|>")
RELATIVE = {
    **LLAMA,
    **EXPERTS,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": WINDOW,
    "d_rel": 8,
    "rel_extent": 48,
    "log_scaling_n_floor": 24,
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "unpadded_vocab_size": VOCABULARY,
}
BLOCKS = ["linear_attention", "moe", "full_attention", "mlp"]


def images(kind: str, **settings: Any) -> dict[str, Any]:
    return {"image_processor_type": f"{kind}ImageProcessor", **settings}


ENTRIES = {
    "mistral3@mistral4": family(
        "mistral3",
        {
            "text_config": {**LATENT, "model_type": "mistral4", "rope_parameters": MINISTRAL_ROPE},
            "vision_config": PIXTRAL,
            "image_token_index": Id("[IMG]"),
            "spatial_merge_size": 2,
        },
        PIXTRAL_PROCESSOR,
        "[IMG]",
        marks=PIXTRAL_MARKS,
    ),
    "mistral_large4": family(
        "mistral_large4",
        {
            "text_config": {
                **LATENT,
                "num_hidden_layers": 4,
                "kv_source_layers": [0, 0, 2, 3],
                "indexer_types": ["full", "shared", "full", "shared"],
                "index_topk": BUDGET,
                "index_head_dim": 32,
                "index_n_heads": 2,
                "rope_parameters": YARN,
            },
            "vision_config": PIXTRAL,
            "image_token_index": Id("[IMG]"),
        },
        PIXTRAL_PROCESSOR,
        "[IMG]",
        marks=PIXTRAL_MARKS,
        own_names=True,
    ),
    "molmo2": family(
        "molmo2",
        {
            # What comes behind the vocabulary has embeddings in a table of its own.
            "text_config": {
                **LLAMA,
                "vocab_size": Id("<im_patch>"),
                "additional_vocab_size": 12,
                "head_dim": 16,
            },
            "vision_config": {
                **TOWER,
                "image_size": [56, 56],
                "num_key_value_heads": 4,
                "head_dim": 12,
                "num_hidden_layers": 3,
            },
            "adapter_config": {
                "vision_feature_layer": [2, 0],
                "hidden_size": 48,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 12,
                "intermediate_size": 64,
                "text_hidden_size": 64,
            },
            "image_patch_id": Id("<im_patch>"),
            "image_start_token_id": Id("<im_start>"),
            "image_end_token_id": Id("<im_end>"),
            "low_res_image_start_token_id": Id("<low_res_im_start>"),
            "frame_start_token_id": Id("<frame_start>"),
            "frame_end_token_id": Id("<frame_end>"),
        },
        {
            "processor_class": "Molmo2Processor",
            "image_processor": images("Molmo2", **SQUARE, max_crops=4, overlap_margins=[1, 1]),
        },
        "<|image|>",
        marks=MOLMO_MARKS,
    ),
    "step3p7": family(
        "step3p7",
        {
            "text_config": {
                **LLAMA,
                **EXPERTS,
                **MIXED,
                "head_dim": 16,
                "sliding_window": WINDOW,
                "num_sliding_attention_heads": 8,
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "share_expert_dim": 32,
            },
            "vision_config": {**TOWER, "image_size": 224, "mlp_ratio": 2.0, "max_position_embeddings": 256},
            "image_token_id": Id("<im_patch>"),
        },
        {
            "processor_class": "Step3p7Processor",
            "image_processor": images(
                "Step3p7", size={"height": 224, "width": 224}, patch_size=112, max_image_size=448
            ),
        },
        "<im_patch>",
        marks=("<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
    ),
    # It counts 256 tokens for the whole picture, whatever its size: 32 x 32 patches, of 2 pixels here.
    "phi4_multimodal": family(
        "phi4_multimodal",
        {
            **{key: value for key, value in LLAMA.items() if key != "model_type"},
            "vision_config": {
                **TOWER,
                "num_hidden_layers": 3,
                "image_size": 64,
                "crop_size": 64,
                "patch_size": 2,
                "image_token_id": Id("<|endoftext10|>"),
            },
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_blocks": 2,
                "num_attention_heads": 2,
                "ext_pw_out_channel": 32,
                "depthwise_separable_out_channel": 32,
                "nemo_conv_channels": 8,
                "input_size": 16,
                "bias_max_distance": 16,
                "audio_token_id": Id("<|endoftext11|>"),
            },
        },
        {
            "processor_class": "Phi4MultimodalProcessor",
            "image_processor": images("Phi4Multimodal", size={"height": 64, "width": 64}, patch_size=2, dynamic_hd=2),
        },
        "<|endoftext10|>",
        named={"image": "<|endoftext10|>", "audio": "<|endoftext11|>"},
        gains={"embed_tokens": 3.0, "o_proj": 0.1, "qkv_proj": 2.0},
    ),
    "nemotron_h_omni": family(
        "nemotron_h_omni",
        {
            "text_config": {
                **{key: value for key, value in LLAMA.items() if key != "num_hidden_layers"},
                **EXPERTS,
                "model_type": "nemotron_h",
                "layers_block_type": BLOCKS,
                "head_dim": 16,
                "ssm_state_size": 16,
                "mamba_num_heads": 4,
                "mamba_head_dim": 16,
                "n_groups": 2,
                "chunk_size": 16,
                "moe_shared_expert_intermediate_size": 32,
            },
            "vision_config": {
                "model_type": "radio",
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "mlp_ratio": 1.5,
                "image_size": 64,
                "max_img_size": 256,
                "video_temporal_patch_size": 2,
            },
            "vision_hidden_size": 48,
            "projector_hidden_size": 64,
            "image_token_id": Id("<image>"),
            "video_token_id": Id("<video>"),
            "audio_token_id": Id("<so_embedding>"),
        },
        {
            "processor_class": "NemotronH_Omni_Reasoning_V3Processor",
            "image_processor": images(
                "NemotronH_Omni_Reasoning_V3", min_num_patches=64, max_num_patches=144, max_model_len=40
            ),
        },
        "<image>",
        marks=("<img>", "</img>", "<so_start>", "<so_end>"),
        gains={"o_proj": 3.0},
    ),
    "inkling2": family(
        "inkling2",
        {
            "text_config": {**RELATIVE, "n_layers_per_attn_res_block": 2},
            "vision_config": {
                "hidden_size": 48,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "patch_size": 10,
                "posemb_grid_size": 4,
                "projection_hidden_dim": 64,
                "text_hidden_size": 64,
            },
            "image_token_id": Id("<|unused_200054|>"),
        },
        {
            "processor_class": "Inkling2Processor",
            "image_processor": images("Inkling2", size={"height": 20, "width": 20}),
        },
        "<|unused_200054|>",
        own_names=True,
    ),
    "inkling_mm_model": family(
        "inkling_mm_model",
        {
            "text_config": {**RELATIVE, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
            "vision_config": {"patch_size": 14, "num_hidden_layers": 4},
            "audio_config": {"n_mel_bins": 8, "mel_vocab_size": 16},
            "image_token_id": Id("<|unused_200054|>"),
            "audio_token_id": Id("<|unused_200053|>"),
            "image_bos_token_id": Id("<|content_image|>"),
            "audio_bos_token_id": Id("<|content_audio_input|>"),
        },
        {"processor_class": "InklingProcessor", "image_processor": images("Inkling", size={"height": 14, "width": 14})},
        "<|content_image|><|unused_200054|>",
        gains={"o_proj": 0.03, "embed_tokens.weight": 5.0},
    ),
}
