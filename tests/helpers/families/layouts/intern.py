"""InternVL 2.5, 3 and 3.5, and Intern-S2."""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from tests.helpers.families.families import FAMILIES
from tests.helpers.families.family_moe import IMAGE
from tests.helpers.families.layouts.base import Published, Weights, renamed
from tests.helpers.families.zoo.first_half_makers import build
from tests.helpers.families.zoo.first_half_tiles import INTERNVL_GPT_OSS

_VIT = "vision_model.encoder.layers.#."
_TOWER = "model.vision_tower.encoder.layer.#."
INTERN_VIT = (
    ("model.vision_tower.embeddings.cls_token", "vision_model.embeddings.class_embedding"),
    ("model.vision_tower.embeddings.position_embeddings", "vision_model.embeddings.position_embedding"),
    ("model.vision_tower.embeddings.patch_embeddings.projection", "vision_model.embeddings.patch_embedding"),
    (f"{_TOWER}lambda_1", f"{_VIT}ls1"),
    (f"{_TOWER}lambda_2", f"{_VIT}ls2"),
    (f"{_TOWER}attention.qkv", f"{_VIT}attn.qkv"),
    (f"{_TOWER}attention.q_norm", f"{_VIT}attn.q_norm"),
    (f"{_TOWER}attention.k_norm", f"{_VIT}attn.k_norm"),
    (f"{_TOWER}attention.projection_layer", f"{_VIT}attn.proj"),
    (f"{_TOWER}mlp.fc1", f"{_VIT}mlp.fc1"),
    (f"{_TOWER}mlp.fc2", f"{_VIT}mlp.fc2"),
    (f"{_TOWER}layernorm_before", f"{_VIT}norm1"),
    (f"{_TOWER}layernorm_after", f"{_VIT}norm2"),
    ("model.multi_modal_projector.layer_norm", "mlp1.0"),
    ("model.multi_modal_projector.linear_1", "mlp1.1"),
    ("model.multi_modal_projector.linear_2", "mlp1.3"),
)
_LLAMA = "model.language_model.layers.#."
_INTERNLM = "language_model.model.layers.#."
INTERNLM2 = (
    ("model.language_model.embed_tokens", "language_model.model.tok_embeddings"),
    (f"{_LLAMA}self_attn.qkv", f"{_INTERNLM}attention.wqkv"),
    (f"{_LLAMA}self_attn.o_proj", f"{_INTERNLM}attention.wo"),
    (f"{_LLAMA}mlp.gate_proj", f"{_INTERNLM}feed_forward.w1"),
    (f"{_LLAMA}mlp.up_proj", f"{_INTERNLM}feed_forward.w3"),
    (f"{_LLAMA}mlp.down_proj", f"{_INTERNLM}feed_forward.w2"),
    (f"{_LLAMA}input_layernorm", f"{_INTERNLM}attention_norm"),
    (f"{_LLAMA}post_attention_layernorm", f"{_INTERNLM}ffn_norm"),
    ("model.language_model.norm", "language_model.model.norm"),
    ("lm_head", "language_model.output"),
)


def _fused(weights: Weights, part: str, heads: tuple[int, int] | None = None) -> Weights:
    """q, k and v of an attention in one weight; with `heads` of queries and keys, group by group."""
    fused = {name: weight for name, weight in weights.items() if not re.search(rf"{part}\.[qkv]_proj\.", name)}
    for name, query in weights.items():
        if f"{part}.q_proj." not in name:
            continue
        parts = [query, *(weights[name.replace("q_proj", f"{x}_proj")] for x in "kv")]
        if heads is not None:
            groups = [weight.view(heads[1], -1, weight.shape[-1] if weight.dim() > 1 else 1) for weight in parts]
            parts = [torch.cat(groups, dim=1).reshape(-1, *query.shape[1:])]
        fused[name.replace("q_proj", "qkv")] = torch.cat(parts)
    return fused


def _apart(weights: Weights) -> Weights:
    """Each expert's weights by themselves."""
    found = {name: weight for name, weight in weights.items() if ".mlp.experts." not in name}
    for name in weights.keys() - found.keys():
        stem, _, kind = name.rpartition(".")
        for number, weight in enumerate(weights[name]):
            parts = {"gate_proj": weight[: len(weight) // 2], "up_proj": weight[len(weight) // 2 :]}
            for part, rows in (parts if kind == "gate_up_proj" else {kind: weight}).items():
                found[f"{stem}.{number}.{part}.weight"] = rows
    return found


def _internvl_weights(weights: Weights, config: Any) -> Weights:
    text = config.text_config
    weights = _fused(weights, "attention")
    if text.model_type == "llama":
        weights = _fused(weights, "self_attn", (text.num_attention_heads, text.num_key_value_heads))
        return renamed(weights, INTERN_VIT + INTERNLM2)
    found = renamed(_apart(weights), INTERN_VIT)
    found = {re.sub(r"^model\.language_model\.", "language_model.model.", name): w for name, w in found.items()}
    return {re.sub(r"^lm_head", "language_model.lm_head", name): weight for name, weight in found.items()}


def _intern_vit(vision: Any) -> dict[str, Any]:
    return {
        "architectures": ["InternVisionModel"],
        "model_type": "intern_vit_6b",
        "attention_dropout": 0.0,
        "drop_path_rate": 0.1,
        "dropout": 0.0,
        "hidden_act": vision.hidden_act,
        "hidden_size": vision.hidden_size,
        "image_size": vision.image_size[0],
        "initializer_factor": 1.0,
        "intermediate_size": vision.intermediate_size,
        "layer_norm_eps": vision.layer_norm_eps,
        "norm_type": vision.norm_type,
        "num_attention_heads": vision.num_attention_heads,
        "num_hidden_layers": vision.num_hidden_layers,
        "patch_size": vision.patch_size[0],
        "qk_normalization": vision.use_qk_norm,
        "qkv_bias": vision.attention_bias,
        "use_flash_attn": True,
    }


def _internvl_config(config: Any) -> dict[str, Any]:
    text = config.text_config.to_dict()
    kinds = {"llama": "internlm2"}
    rope = text.pop("rope_parameters")
    text["model_type"] = kinds.get(text["model_type"], text["model_type"])
    if text["model_type"] == "internlm2":
        text["bias"] = text.pop("attention_bias")
    return {
        "_commit_hash": None,
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 56,
        "llm_config": {
            **text,
            "_name_or_path": "somewhere",
            "architectures": ["SomeForCausalLM"],
            "attn_implementation": "flash_attention_2",
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None,
            "use_bfloat16": True,
            "torch_dtype": "bfloat16",
        },
        "max_dynamic_patch": 6,
        "min_dynamic_patch": 1,
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "use_thumbnail": True,
        "vision_config": _intern_vit(config.vision_config),
    }


def _internvl(text: dict[str, Any], vision: dict[str, Any]) -> Published:
    tower = {**INTERNVL_GPT_OSS.vision, **vision}
    images = {**INTERNVL_GPT_OSS.images, "max_patches": 6, **_IMAGENET}
    made = INTERNVL_GPT_OSS._replace(text=text, vision=tower, images=images)
    pixels = {"preprocessor_config.json": {"image_processor_type": "CLIPFeatureExtractor", "size": 56, **_IMAGENET}}
    return Published(lambda folder: build(made, folder), _internvl_config, _internvl_weights, made.image, pixels)


_EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def _with_time_series(weights: Weights, config: Any) -> Weights:
    return {**weights, "model.time_series.encoder.layers.0.fc1.weight": torch.ones(2, 2)}


def _intern_s2_config(config: Any) -> dict[str, Any]:
    fields = json.loads(config.to_json_string())
    parts = {"text_config": "intern_s2_preview_text", "vision_config": "intern_s2_preview_vision"}
    for part, kind in parts.items():
        fields[part]["model_type"] = kind
    own = {"architectures": ["InternS2PreviewForConditionalGeneration"], "model_type": "intern_s2_preview"}
    return {**fields, **own, "ts_config": {"model_type": "intern_s1_time_series", "d_model": 768}}


PUBLISHED = {
    "internvl 2.5, InternLM2": _internvl({"model_type": "llama"}, {"attention_bias": True}),
    "internvl 3, 6B tower": _internvl({"model_type": "qwen2"}, {"use_qk_norm": True, "norm_type": "rms_norm"}),
    "internvl 3.5": _internvl({"model_type": "qwen3", "head_dim": 16}, {"attention_bias": True}),
    "internvl 3.5, experts": _internvl(_EXPERTS, {"attention_bias": True}),
    "intern_s2": Published(
        FAMILIES["qwen3_5_moe"].build,
        _intern_s2_config,
        _with_time_series,
        IMAGE,
        stored=True,
        copied=("processor_config.json",),
    ),
}
