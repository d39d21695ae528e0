"""Kimi-VL and Phi-4 multimodal."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch

from saccade.checkpoint.layout_table import LAYOUTS
from saccade.processor.checkpoint_files import overridden
from tests.helpers.families.family_fallback import tokenizer_with
from tests.helpers.families.layouts.base import Published, Weights, renamed
from tests.helpers.families.zoo import second_half_tiles
from tests.helpers.families.zoo.first_half_grids import KIMI
from tests.helpers.families.zoo.first_half_makers import build

_MOON = "vision_tower.encoder.blocks."


def _kimi_weights(weights: Weights, config: Any) -> Weights:
    """From the file of the newer model, which its own class wrote."""
    names = (
        ("vision_tower.encoder.patch_embed.proj", "vision_tower.patch_embed.proj"),
        ("mm_projector.proj.0", "multi_modal_projector.linear_1"),
        ("mm_projector.proj.2", "multi_modal_projector.linear_2"),
        ("model.mm_projector.pre_norm", "multi_modal_projector.pre_norm"),
    )
    return {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): weight
        for name, weight in renamed(weights, names).items()
    }


def _kimi_config(config: Any) -> dict[str, Any]:
    text, vision = config.text_config.to_dict(), config.vision_config
    rope = text.pop("rope_parameters")
    return {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "ignore_index": -100,
        "media_placeholder_token_id": config.image_token_id,
        "text_config": {**text, "rope_theta": rope["rope_theta"], "rope_scaling": None},
        "vision_config": {
            "model_type": "moonvit",
            "hidden_size": vision.hidden_size,
            "init_pos_emb_height": vision.pos_emb_height,
            "init_pos_emb_width": vision.pos_emb_width,
            "intermediate_size": vision.intermediate_size,
            "merge_kernel_size": list(vision.merge_kernel_size),
            "num_attention_heads": vision.num_attention_heads,
            "num_hidden_layers": vision.num_hidden_layers,
            "patch_size": vision.patch_size,
        },
        "vocab_size": text["vocab_size"],
    }


_KIMI_IMAGES = {"image_processor_type": "Kimi_K25ImageProcessor", "max_patches": 64, "image_mean": [0.5, 0.4, 0.6]}
_KIMI_VL = KIMI._replace(images=_KIMI_IMAGES)
_KIMI_FILES = {
    "preprocessor_config.json": {
        "auto_map": {"AutoProcessor": "processing_kimi_vl.KimiVLProcessor"},
        "in_token_limit": 64,
        "patch_size": 14,
        "merge_kernel_size": [2, 2],
        "num_pooled_tokens": 1024,
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.5, 0.5],
        "pad_input": True,
    }
}


_PHI4 = second_half_tiles.ENTRIES["phi4_multimodal"]
_SIGHT = "model.embed_tokens_extend.image_embed."
PHI4 = (
    (f"{_SIGHT}img_projection_up", f"{_SIGHT}img_projection.0"),
    (f"{_SIGHT}img_projection_down", f"{_SIGHT}img_projection.2"),
    (f"{_SIGHT}global_img_feature_extensor", f"{_SIGHT}glb_GN"),
    (f"{_SIGHT}sub_img_feature_extensor", f"{_SIGHT}sub_GN"),
)


def _phi4_weights(weights: Weights, config: Any) -> Weights:
    """The decoder's linears as a base and two adapters, of which the one for pictures belongs to the model."""
    found: Weights = {}
    for name, weight in renamed(weights, PHI4).items():
        if not re.search(r"model\.layers\.\d+\.(self_attn|mlp)\.", name):
            found[name] = weight
            continue
        stem = name.removesuffix(".weight")
        for kind, rank in (("vision", 4), ("speech", 2)):
            generator = torch.Generator().manual_seed(len(found))
            found[f"{stem}.lora_A.{kind}.weight"] = torch.randn(rank, weight.shape[1], generator=generator)
            found[f"{stem}.lora_B.{kind}.weight"] = torch.randn(weight.shape[0], rank, generator=generator) / 8
        found[f"{stem}.base_layer.weight"] = weight - 2 * (
            found[f"{stem}.lora_B.vision.weight"] @ found[f"{stem}.lora_A.vision.weight"]
        )
    return found


def _phi4_config(config: Any) -> dict[str, Any]:
    fields = config.to_dict()
    del fields["audio_config"]
    vision = fields.pop("vision_config")
    rope = fields.pop("rope_parameters")
    return {
        **fields,
        "architectures": ["Phi4MMForCausalLM"],
        "model_type": "phi4mm",
        "audio_processor": {"config": {"attention_dim": 1024, "num_blocks": 24}, "name": "cascades"},
        "embd_layer": {
            "audio_embd_layer": {"compression_rate": 8, "downsample_rate": 1, "embedding_cls": "audio"},
            "embedding_cls": "image_audio",
            "image_embd_layer": {"crop_size": vision["crop_size"], "hd_transform_order": "sub_glb"},
        },
        "img_processor": None,
        "rope_scaling": None,
        "rope_theta": rope["rope_theta"],
        "speech_lora": {"layer": "layers.*", "lora_alpha": 640, "r": 320},
        "vision_lora": {"layer": "layers.*", "lora_alpha": 8, "r": 4},
    }


_PHI4_FILES = {"preprocessor_config.json": {"image_processor_type": "Phi4MMImageProcessor", "dynamic_hd": 2}}
_TOKENIZER = tokenizer_with("<|endoftext10|>", "<|endoftext11|>")
_SMALL = {
    "vision_config": {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 64,
        "crop_size": 64,
        "patch_size": 2,
        "image_token_id": _TOKENIZER.token_to_id("<|endoftext10|>"),
    },
    "audio_config": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "ext_pw_out_channel": 32},
}


def _small() -> AbstractContextManager[Any]:
    """The layout's own sizes are fixed."""
    name = "Phi4MMForCausalLM"
    layout = LAYOUTS[name]

    def processor(raw: Any, pixels: Any) -> dict[str, Any]:
        assert layout.processor is not None
        return overridden(layout.processor(raw, pixels), {"image_processor": {"patch_size": 2}})

    small = layout._replace(words=lambda raw: overridden(layout.words(raw), _SMALL), processor=processor)
    return mock.patch.dict(LAYOUTS, {name: small})


PUBLISHED = {
    "kimi_vl": Published(partial(build, _KIMI_VL), _kimi_config, _kimi_weights, KIMI.image, _KIMI_FILES, stored=True),
    "phi4mm": Published(_PHI4.build, _phi4_config, _phi4_weights, _PHI4.image, _PHI4_FILES, shrunk=_small),
}
