"""The rows of `layouts.py`, by architecture."""

from __future__ import annotations

from typing import Any

from saccade.checkpoint.layout import Fields, Layout, Split, picked, without_code
from saccade.checkpoint.schema import FLAG, SIDE, WIDTH, Table, first_wrong
from saccade.checkpoint.settings import without_nulls
from saccade.errors import ConfigError

_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
_INTERN_VIT_FIELDS = ("image_size", "num_channels", "hidden_act", "layer_norm_eps", "norm_type")
_WIDTHS = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_INTERN_VIT = "model.vision_tower."
_DECODERS = {"internlm2": "llama"}  # the same layers under other names


def _must(architecture: str, fields: Fields, name: str, value: Any) -> None:
    """Refuse what the class computes otherwise."""
    if fields.get(name, value) != value:
        reason = f"{name} is {fields[name]!r}, and only {value!r} is supported"
        raise ConfigError(f"config.json: {reason} for the architecture {architecture}")


def _check(fields: Fields, table: Table, inside: str = "") -> None:
    if wrong := first_wrong(fields, table, inside):
        raise ConfigError(f"config.json: {wrong}")


# --- InternVL 2.5, 3 and 3.5 --------------------------------------------------------------------------------


def _internvl(raw: Fields) -> dict[str, Any]:
    _must("InternVLChatModel", raw, "ps_version", "v2")
    text, vision = without_code(raw["llm_config"]), raw["vision_config"]
    text["model_type"] = _DECODERS.get(text["model_type"], text["model_type"])
    if text["model_type"] == "llama":
        text["attention_bias"] = text.pop("bias", False)
    other = {"attention_bias": "qkv_bias", "use_qk_norm": "qk_normalization"}
    return {
        "model_type": "internvl",
        "text_config": text,
        "vision_config": picked(vision, *_SHAPE, *_INTERN_VIT_FIELDS, **other),
        "image_seq_length": _tile_tokens(raw),
        "downsample_ratio": raw["downsample_ratio"],
        "vision_feature_layer": raw.get("select_layer", -1),
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }


def _tile_tokens(raw: Fields) -> int:
    patch = raw["patch_size"] if "patch_size" in raw else raw["vision_config"]["patch_size"]
    return int((_tile(raw) // patch * raw["downsample_ratio"]) ** 2)


def _tile(raw: Fields) -> int:
    return int(raw.get("force_image_size") or raw["vision_config"]["image_size"])


def _internvl_processor(raw: Fields, pixels: Fields) -> dict[str, Any]:
    _must("InternVLChatModel", raw, "use_thumbnail", True)
    side = _tile(raw)
    images = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": side, "width": side},
        "crop_to_patches": raw.get("dynamic_image_size", True),
        "min_patches": raw.get("min_dynamic_patch", 1),
        "max_patches": raw.get("max_dynamic_patch", 12),
        "image_mean": pixels.get("image_mean", [0.485, 0.456, 0.406]),
        "image_std": pixels.get("image_std", [0.229, 0.224, 0.225]),
    }
    return {
        "processor_class": "InternVLProcessor",
        "image_processor": images,
        "image_seq_length": _tile_tokens(raw),
    }


_INTERNVL = Layout(
    _internvl,
    _internvl_processor,
    image="<IMG_CONTEXT>",
    written="<IMG_CONTEXT>\n",
    tokens={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "</img>",  # which no question has: videos are not served
    },
    renames=(
        (r"^vision_model\.embeddings\.class_embedding", f"{_INTERN_VIT}embeddings.cls_token"),
        (r"^vision_model\.embeddings\.position_embedding", f"{_INTERN_VIT}embeddings.position_embeddings"),
        (
            r"^vision_model\.embeddings\.patch_embedding",
            f"{_INTERN_VIT}embeddings.patch_embeddings.projection",
        ),
        (r"^vision_model\.encoder\.layers\.(\d+)\.ls", rf"{_INTERN_VIT}encoder.layer.\1.lambda_"),
        (r"^vision_model\.encoder\.layers\.(\d+)\.norm1", rf"{_INTERN_VIT}encoder.layer.\1.layernorm_before"),
        (r"^vision_model\.encoder\.layers\.(\d+)\.norm2", rf"{_INTERN_VIT}encoder.layer.\1.layernorm_after"),
        (r"^vision_model\.(.*)attn\.proj\.", r"vision_model.\1attention.projection_layer."),
        (r"^vision_model\.(.*)attn\.", r"vision_model.\1attention."),
        (r"^vision_model\.encoder\.layers\.", f"{_INTERN_VIT}encoder.layer."),
        (r"^mlp1\.0\.", "model.multi_modal_projector.layer_norm."),
        (r"^mlp1\.1\.", "model.multi_modal_projector.linear_1."),
        (r"^mlp1\.3\.", "model.multi_modal_projector.linear_2."),
        (r"^language_model\.model\.tok_embeddings", "model.language_model.embed_tokens"),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^language_model\.(lm_head|output)\.", "lm_head."),
        (r"\.attention\.wo\.", ".self_attn.o_proj."),
        (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
        (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
        (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
        (r"\.attention_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
    ),
    splits=(
        Split("attention.qkv", _QKV),
        Split("attention.wqkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), in_groups=True),
    ),
)


# --- Intern-S2 preview --------------------------------------------------------------------------------------


def _intern_s2(raw: Fields) -> dict[str, Any]:
    """Qwen3.5 with experts, and a part for time series."""
    kind = "qwen3_5_moe"
    text = {**without_code(raw["text_config"]), "model_type": f"{kind}_text"}
    vision = {**without_code(raw["vision_config"]), "model_type": kind}
    return {**without_code(raw), "model_type": kind, "text_config": text, "vision_config": vision}


_INTERN_S2 = Layout(_intern_s2, left_out=("model.time_series.", "time_series."))


# --- DeepSeek-OCR, DeepSeek-OCR 2, Unlimited-OCR ------------------------------------------------------------

_OF_MLA = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "use_mla")
_OCR_TILE = 640  # pixels a side, in the published code


def _ocr_text(raw: Fields) -> dict[str, Any]:
    architecture = raw["architectures"][0]
    text = without_code(raw["language_config"])
    _must(architecture, text, "use_mla", False)
    _must(architecture, raw["projector_config"], "projector_type", "linear")
    dense = text.pop("first_k_dense_replace", 0)
    kinds = ["dense"] * dense + ["sparse"] * (text["num_hidden_layers"] - dense)
    kept = {name: value for name, value in text.items() if name not in (*_OF_MLA, "model_type")}
    return {**kept, "mlp_layer_types": kinds}


def _sam(raw: Fields) -> dict[str, Any]:
    sam = raw["vision_config"]["width"]["sam_vit_b"]
    more = {"mlp_dim": 4 * sam["width"], "image_size": raw["vision_config"]["image_size"]}
    return {**picked(sam, "global_attn_indexes", "downsample_channels", **_WIDTHS), **more}


def _deepseek_ocr(raw: Fields) -> dict[str, Any]:
    """The towers and the decoder of Unlimited-OCR, with full attention."""
    clip = raw["vision_config"]["width"]["clip-l-14-224"]
    text = _ocr_text(raw)
    window = raw.get("sliding_window", raw.get("rswa_window"))
    kinds = "full_attention" if window is None else "reference_sliding_attention"
    rule = {"layer_types": [kinds] * text["num_hidden_layers"], "sliding_window": window or 1}
    encoder = {**picked(clip, "image_size", "patch_size", **_WIDTHS), "intermediate_size": 4 * clip["width"]}
    return {
        "model_type": "unlimited_ocr",
        "text_config": {**text, **rule},
        "vision_config": {"sam_config": _sam(raw), "encoder_config": encoder},
    }


def _ocr_processor(kind: str, tiles: int) -> Any:
    def processor(raw: Fields, pixels: Fields) -> dict[str, Any]:
        side = raw["vision_config"]["image_size"]
        images = {
            "image_processor_type": f"{kind}ImageProcessor",
            "size": {"height": side, "width": side},
            "tile_size": _OCR_TILE,
            "max_patches": tiles,
        }
        return {"processor_class": f"{kind}Processor", "image_processor": images}

    return processor


_DEEPSEEK_OCR = Layout(_deepseek_ocr, _ocr_processor("UnlimitedOcr", 9), image="<image>")
_UNLIMITED_OCR = Layout(_deepseek_ocr, _ocr_processor("UnlimitedOcr", 32), image="<image>")


_OCR2_ENCODER = {  # not in config.json
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "vocab_size": 1,
}


def _deepseek_ocr2(raw: Fields) -> dict[str, Any]:
    encoder = {"hidden_size": raw["vision_config"]["width"]["qwen2-0-5b"]["dim"], **_OCR2_ENCODER}
    sam = {**_sam(raw), "downsample_channels": [512, encoder["hidden_size"]]}
    return {
        "model_type": "deepseek_ocr2",
        "text_config": _ocr_text(raw),
        "vision_config": {"sam_config": sam, "encoder_config": encoder},
    }


def _deepseek_ocr2_processor(raw: Fields, pixels: Fields) -> dict[str, Any]:
    images = {"image_processor_type": "DeepseekOcr2ImageProcessor"}
    return {"processor_class": "DeepseekOcr2Processor", "image_processor": images}


_DEEPSEEK_OCR2 = Layout(_deepseek_ocr2, _deepseek_ocr2_processor, image="<image>")


# --- Kimi-VL ------------------------------------------------------------------------------------------------


def _kimi_vl(raw: Fields) -> dict[str, Any]:
    """Kimi K2.5 without its frames: they add nothing to a picture."""
    text, vision = without_code(raw["text_config"]), raw["vision_config"]
    other = {"pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width"}
    return {
        "model_type": "kimi_k25",
        "text_config": {**text, "model_type": "deepseek_v3"},
        "vision_config": picked(vision, *_SHAPE, "merge_kernel_size", **other),
        "projection_hidden_size": vision["hidden_size"],
        "image_token_id": raw["media_placeholder_token_id"],
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }


def _kimi_vl_processor(raw: Fields, pixels: Fields) -> dict[str, Any]:
    images = {
        "image_processor_type": "Kimi_K25ImageProcessor",
        **picked(pixels, "patch_size", "image_mean", "image_std", max_patches="in_token_limit"),
    }
    return {"processor_class": "Kimi_K25Processor", "image_processor": images}


_KIMI_VL = Layout(
    _kimi_vl,
    _kimi_vl_processor,
    renames=(
        (r"^multi_modal_projector\.linear_1\.", "mm_projector.proj.0."),
        (r"^multi_modal_projector\.linear_2\.", "mm_projector.proj.2."),
        (r"^multi_modal_projector\.pre_norm\.", "model.mm_projector.pre_norm."),
    ),
)


# --- Phi-4 multimodal ---------------------------------------------------------------------------------------


def _phi4mm(raw: Fields) -> dict[str, Any]:
    """Deaf; and the adapter for pictures is part of the weights, so that text is answered with it too."""
    apart = ("audio_processor", "embd_layer", "img_processor", "speech_lora", "vision_lora")
    return {
        **{name: value for name, value in without_code(raw).items() if name not in apart},
        "model_type": "phi4_multimodal",
        "vision_config": picked(raw["embd_layer"]["image_embd_layer"], "crop_size"),
        "audio_config": {"num_blocks": 1},
    }


def _phi4mm_processor(raw: Fields, pixels: Fields) -> dict[str, Any]:
    side = raw["embd_layer"]["image_embd_layer"]["crop_size"]
    images = {
        "image_processor_type": "Phi4MultimodalImageProcessor",
        "size": {"height": side, "width": side},
        **picked(pixels, "dynamic_hd"),
    }
    return {"processor_class": "Phi4MultimodalProcessor", "image_processor": images}


_PHI4MM = Layout(
    _phi4mm,
    _phi4mm_processor,
    written="<|endoftext10|>",
    tokens={"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"},
    renames=(
        (r"\.base_layer\.", "."),
        (r"\.img_projection\.0\.", ".img_projection_up."),
        (r"\.img_projection\.2\.", ".img_projection_down."),
        (r"\.glb_GN$", ".global_img_feature_extensor"),
        (r"\.sub_GN$", ".sub_img_feature_extensor"),
    ),
    left_out=("model.embed_tokens_extend.audio_embed.",),
    unread=".audio_embed.",
    adapter="vision_lora",
)


# --- Nemotron Nano VL and Omni ------------------------------------------------------------------------------

_RADIO = "vit_huge_patch16_224"  # the tower that the class has where nothing else is said


def _nemotron(raw: Fields) -> dict[str, Any]:
    """Without its ears."""
    vision = raw["vision_config"]
    _must(raw["architectures"][0], vision.get("args", {}), "model", _RADIO)
    tower = picked(vision, *_SHAPE, "mlp_ratio", "image_size", "max_img_size", "video_temporal_patch_size")
    words = {name: value for name, value in without_code(raw).items() if name != "sound_config"}
    return {**words, "model_type": "nemotron_h_omni", "vision_config": {"model_type": "radio", **tower}}


def _nemotron_processor(raw: Fields, pixels: Fields) -> dict[str, Any]:
    kind = "NemotronH_Omni_Reasoning_V3"
    apart = ("auto_map", "processor_class", "feature_extractor_type")
    settings = {name: value for name, value in pixels.items() if name not in apart}
    images = {**settings, "image_processor_type": f"{kind}ImageProcessor"}
    return {"processor_class": f"{kind}Processor", "image_processor": images}


_NEMOTRON = Layout(_nemotron, _nemotron_processor, left_out=("sound_encoder.", "sound_projection."))


def _nemotron_v2_processor(raw: Fields, pixels: Fields) -> dict[str, Any]:
    """InternVL's tiles."""
    _must(raw["architectures"][0], raw["vision_config"]["args"], "min_num_patches", None)
    settings = {"min_dynamic_patch": 1, "max_dynamic_patch": pixels.get("max_num_tiles", 12), **raw}
    return _internvl_processor(settings, {"image_mean": raw["norm_mean"], "image_std": raw["norm_std"]})


_NEMOTRON_V2 = Layout(
    _nemotron,
    _nemotron_v2_processor,
    tokens={**_INTERNVL.tokens, "context_image_token": "<image>"},
    unread=".video_patch_projection.",
    patch=16,
)


# --- dots.ocr, dots.mocr ------------------------------------------------------------------------------------

_DOTS_TOWER = {  # of its config class
    "embed_dim": 1536,
    "intermediate_size": 4224,
    "num_hidden_layers": 42,
    "num_attention_heads": 12,
    "spatial_merge_size": 2,
    "rms_norm_eps": 1e-5,
}


def _dots_ocr(raw: Fields) -> dict[str, Any]:
    """A family of ours: Qwen2's decoder under a tower of its own."""
    raw = without_nulls(raw)
    vision = {**_DOTS_TOWER, **without_code(raw.get("vision_config", {}))}
    for name, value in {"is_causal": False, "temporal_patch_size": 1}.items():
        _must(raw["architectures"][0], vision, name, value)
    text = {name: value for name, value in without_code(raw).items() if name != "vision_config"}
    return {
        "model_type": raw["model_type"],
        "text_config": {**text, "model_type": "qwen2"},
        "vision_config": {**vision, "model_type": "dots_vit", "hidden_act": "silu"},
        "image_token_id": raw.get("image_token_id", 151665),
    }


_DOTS_OCR = Layout(_dots_ocr, written="<|img|><|imgpad|><|endofimg|>", takes_texts=True)


# --- MiniCPM-V 2.6, 4.0 and 4.5 -----------------------------------------------------------------------------

_MINICPM_DECODERS = {2.6: "qwen2", 4.0: "llama", 4.5: "qwen3"}
_SIGLIP = {
    "hidden_size": 1152,
    "image_size": 980,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
}


def _minicpm_v(raw: Fields) -> dict[str, Any]:
    """A family of ours: a tower with as many positions as a picture of `image_size` would have patches."""
    raw = without_nulls(raw)
    version = raw.get("version")
    if version not in _MINICPM_DECODERS:
        versions = ", ".join(map(str, _MINICPM_DECODERS))
        reason = f"version is {version!r}, and only {versions} are supported"
        raise ConfigError(f"config.json: {reason} for the architecture {raw['architectures'][0]}")
    vision = {**_SIGLIP, **without_code(raw.get("vision_config", {}))}
    _check(raw, {"image_size": SIDE, "query_num": WIDTH, "drop_vision_last_layer": FLAG})
    _check(vision, {"patch_size": SIDE, "image_size": SIDE}, "vision_config.")
    tower = {
        **{name: value for name, value in vision.items() if name != "image_size"},
        "model_type": "siglip_navit",
        "num_hidden_layers": vision["num_hidden_layers"] - raw.get("drop_vision_last_layer", True),
        "num_position_embeddings": (vision["image_size"] // vision["patch_size"]) ** 2,
        "n_queries": raw.get("query_num", 64),
        "spatial_merge_size": 4,  # patches of a view by its embeddings, about
        "window_size": raw.get("image_size", 448),  # attention stays inside a view
        "fullatt_block_indexes": [],
        "projector_widths": [raw["hidden_size"]],
    }
    text = {name: value for name, value in without_code(raw).items() if name != "vision_config"}
    return {
        "model_type": raw["model_type"],
        "text_config": {**text, "model_type": _MINICPM_DECODERS[version]},
        "vision_config": tower,
    }


_MINICPM_V = Layout(_minicpm_v, written="(<image>./</image>)", between="\n")


LAYOUTS: dict[str, Layout] = {
    "DeepseekOCR2ForCausalLM": _DEEPSEEK_OCR2,
    "DeepseekOCRForCausalLM": _DEEPSEEK_OCR,
    **dict.fromkeys(("DotsOCRForCausalLM", "DotsVLForCausalLM"), _DOTS_OCR),
    "InternS2PreviewForConditionalGeneration": _INTERN_S2,
    "InternVLChatModel": _INTERNVL,
    "KimiVLForConditionalGeneration": _KIMI_VL,
    "MiniCPMV": _MINICPM_V,
    "NemotronH_Nano_Omni_Reasoning_V3": _NEMOTRON,
    "NemotronH_Nano_VL_V2": _NEMOTRON_V2,
    "NemotronH_Super_Omni_Reasoning_V3": _NEMOTRON,
    "Phi4MMForCausalLM": _PHI4MM,
    "UnlimitedOCRForCausalLM": _UNLIMITED_OCR,
}


NOT_READ: dict[str, str] = {
    "MiniCPMO": "Transformers has no class with its resampler; MiniCPM-V is served",
    "Ovis": "take the files of Ovis 2 in Transformers' layout (ovis2)",
    "Ovis2_5": "Transformers has no class with its tower; Ovis 2 is served",
    "ernie4_5_moe_vl": "take the files of ERNIE 4.5 VL in Transformers' layout (ernie4_5_vl_moe)",
    "Phi3VForCausalLM": "Transformers has no such class; Phi-4 multimodal is served",
}
"""Architectures, or types, of remote code that are asked for, and why they are not served."""
