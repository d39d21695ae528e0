"""DeepSeek-OCR and Unlimited-OCR. The towers of the classes were written with the published names."""

from __future__ import annotations

from typing import Any

from tests.helpers.families.layouts.base import Published, unchanged
from tests.helpers.families.zoo.first_half_makers import TOWER, build
from tests.helpers.families.zoo.first_half_towers import _SAM, UNLIMITED_OCR

_OCR_SAM = {**_SAM, "mlp_dim": 128, "output_channels": 256, "window_size": 14, "image_size": 256, "patch_size": 16}


def _ocr(architecture: str, window: int | None, tiles: int) -> Published:
    kind = "full_attention" if window is None else "reference_sliding_attention"
    rule = {"layer_types": [kind] * 2, "sliding_window": window or 1}
    made = UNLIMITED_OCR._replace(
        text={**UNLIMITED_OCR.text, **rule},
        vision={
            "sam_config": {**_OCR_SAM, "downsample_channels": [32, 48]},
            "encoder_config": {**TOWER, "intermediate_size": 192, "image_size": 64, "patch_size": 16},
        },
        processor={"processor_class": "UnlimitedOcrProcessor"},
        images={
            "image_processor_type": "UnlimitedOcrImageProcessor",
            "size": {"height": 256, "width": 256},
            "max_patches": tiles,
        },
    )

    def config(theirs: Any) -> dict[str, Any]:
        fields = _ocr_config(architecture, theirs)
        return fields if window is None else {**fields, "sliding_window": window}

    return Published(
        lambda folder: build(made, folder),
        config,
        unchanged,
        "<image>",
        stored=True,
        large=(700, 300) if window is None else None,
    )


def _ocr_towers(vision: Any) -> dict[str, Any]:
    sam, clip = vision.sam_config, vision.encoder_config
    return {
        "image_size": sam.image_size,
        "mlp_ratio": 3.7362,
        "model_name": "deeplip_b_l",
        "model_type": "vision",
        "width": {
            "clip-l-14-224": {
                "heads": clip.num_attention_heads,
                "image_size": clip.image_size,
                "layers": clip.num_hidden_layers,
                "patch_size": clip.patch_size,
                "width": clip.hidden_size,
            },
            "sam_vit_b": {
                "downsample_channels": sam.downsample_channels,
                "global_attn_indexes": sam.global_attn_indexes,
                "heads": sam.num_attention_heads,
                "layers": sam.num_hidden_layers,
                "width": sam.hidden_size,
            },
        },
    }


def _ocr_config(architecture: str, config: Any) -> dict[str, Any]:
    text = config.text_config.to_dict()
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "vocab_size")
    names += ("max_position_embeddings",)
    shape = {name: text[name] for name in names}
    mla = {"kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0}
    more = {"first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "use_mla": False}
    return {
        "architectures": [architecture],
        "model_type": "deepseek_vl_v2",
        "candidate_resolutions": [[1024, 1024]],
        "global_view_pos": "head",
        "tile_tag": "2D",
        "language_config": {
            **shape,
            **mla,
            **more,
            "architectures": ["DeepseekV2ForCausalLM"],
            "auto_map": {"AutoModel": "modeling_deepseekv2.DeepseekV2Model"},
            "lm_head": True,
            "rm_head": False,
            "torch_dtype": "bfloat16",
        },
        "projector_config": {
            "input_dim": 2048,
            "model_type": "mlp_projector",
            "n_embed": shape["hidden_size"],
            "projector_type": "linear",
        },
        "vision_config": _ocr_towers(config.vision_config),
        **shape,
        **mla,
        **more,
    }


PUBLISHED = {
    "deepseek_ocr": _ocr("DeepseekOCRForCausalLM", None, 9),
    "unlimited_ocr": _ocr("UnlimitedOCRForCausalLM", 8, 32),
}
