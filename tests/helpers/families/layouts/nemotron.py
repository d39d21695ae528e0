"""Nemotron Nano VL and Omni."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.helpers.conformance.theirs import Prompt, Theirs
from tests.helpers.families.layouts.base import Published, Weights
from tests.helpers.families.zoo import second_half_tiles

_OMNI = second_half_tiles.ENTRIES["nemotron_h_omni"]


def _omni(folder: Path) -> Path:
    """Its tower scales no layer: the class has ones there."""
    _OMNI.build(folder)
    weights = load_file(folder / "model.safetensors")
    ones = {name: torch.ones_like(weight) for name, weight in weights.items() if "layer_scale" in name}
    save_file(weights | ones, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _omni_weights(weights: Weights, config: Any) -> Weights:
    more = {"sound_encoder.encoder.layers.0.norm.weight": torch.ones(2)}
    more["vision_model.radio_model.input_conditioner.norm_mean"] = torch.ones(3, 1, 1)
    return {**{name: weight for name, weight in weights.items() if "layer_scale" not in name}, **more}


def _omni_config(config: Any) -> dict[str, Any]:
    fields = json.loads(config.to_json_string())
    names = {"image_token_id": "img_context_token_id", "video_token_id": "video_context_token_id"}
    names |= {"text_config": "llm_config", "vision_hidden_size": "vit_hidden_size"}
    fields = {names.get(name, name): value for name, value in fields.items()}
    text = fields["llm_config"]
    del text["layers_block_type"]
    text["hybrid_override_pattern"] = config.text_config.hybrid_override_pattern
    text["time_step_limit"] = [0.0, float("inf")]
    fields["vision_config"]["args"] = {"model": "vit_huge_patch16_224", "cpe_max_size": 2048}
    kind = "NemotronH_Nano_Omni_Reasoning_V3"
    return {**fields, "architectures": [kind], "model_type": kind, "sound_config": {"model_type": "parakeet"}}


_OMNI_FILES = {
    "preprocessor_config.json": {
        "image_processor_type": "NemotronH_Nano_Omni_Reasoning_V3ImageProcessor",
        "processor_class": "NemotronH_Nano_Omni_Reasoning_V3Processor",
        "min_num_patches": 64,
        "max_num_patches": 144,
        "max_model_len": 40,
        "norm_mean": [0.48145466, 0.4578275, 0.40821073],
        "norm_std": [0.26862954, 0.26130258, 0.27577711],
    }
}


class TiledTheirs(Theirs):
    """Pictures cut as the published code cuts them: tiles of 64 pixels, and the whole if they are several."""

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        tiles = [tile for image in prompt.images for tile in _tiles(image, 64, 4)]
        text = prompt.text
        for image in prompt.images:
            text = text.replace("<image>", f"<img>{'<IMAGE>' * 4 * len(_tiles(image, 64, 4))}</img>", 1)
        made = super().inputs(Prompt(prompt.name, text.replace("<IMAGE>", "<image>")))
        if not tiles:
            return made
        mean, std = (torch.tensor(_CLIP[name]).view(3, 1, 1) for name in ("norm_mean", "norm_std"))
        pixels = [(torch.from_numpy(np.array(tile)).permute(2, 0, 1) / 255 - mean) / std for tile in tiles]
        patches = functional.unfold(torch.stack(pixels), 16, stride=16).transpose(1, 2).flatten(0, 1)
        return {**made, "pixel_values": patches, "image_grid_hw": torch.tensor([[4, 4]] * len(tiles))}


def _tiles(image: Image.Image, side: int, most: int) -> list[Image.Image]:
    shapes = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if x * y <= most]
    shapes.sort(key=lambda shape: shape[0] * shape[1])
    best = (1, 1)
    for x, y in shapes:
        gap, least = (abs(image.width / image.height - a / b) for a, b in ((x, y), best))
        is_large = image.width * image.height > 0.5 * side * side * x * y
        if gap < least or (gap == least and is_large):
            best = (x, y)
    columns, rows = best
    large = image.resize((columns * side, rows * side), Image.Resampling.BICUBIC)
    corners = [(x * side, y * side) for y in range(rows) for x in range(columns)]
    cut = [large.crop((x, y, x + side, y + side)) for x, y in corners]
    return cut if len(cut) == 1 else [*cut, image.resize((side, side), Image.Resampling.BICUBIC)]


_CLIP = {"norm_mean": [0.48145466, 0.4578275, 0.40821073], "norm_std": [0.26862954, 0.26130258, 0.27577711]}
_V2_FILES = {"preprocessor_config.json": {"image_size": 64, "max_num_tiles": 4, "use_thumbnail": True}}
_V2 = "NemotronH_Nano_VL_V2"


def _v2_weights(weights: Weights, config: Any) -> Weights:
    """Without the part for frames, which this one has not."""
    apart = ("video_embedder", "sound_encoder")
    kept = _omni_weights(weights, config)
    return {name: weight for name, weight in kept.items() if not any(part in name for part in apart)}


def _v2_config(config: Any) -> dict[str, Any]:
    fields = _omni_config(config)
    apart = ("sound_config", "video_temporal_patch_size", "audio_token_id", "video_context_token_id")
    return {
        **{name: value for name, value in fields.items() if name not in apart},
        "architectures": [_V2],
        "model_type": _V2,
        "force_image_size": 64,
        **_CLIP,
        "patch_size": 16,
        "ps_version": "v2",
        "use_thumbnail": True,
    }


PUBLISHED = {
    "nemotron_v2": Published(_omni, _v2_config, _v2_weights, _OMNI.image, _V2_FILES, stored=True, theirs=TiledTheirs),
    "nemotron_omni": Published(_omni, _omni_config, _omni_weights, _OMNI.image, _OMNI_FILES, stored=True),
}
