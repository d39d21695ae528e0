"""Small vision towers with random weights, plain or fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.checkpoint.config import model_config
from saccade.models.families.llava import Llava
from saccade.models.families.qwen2_vl import Qwen2VL
from saccade.models.interface import ModelParts
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import VisionOps
from saccade.models.weights import fill_random
from saccade.types.media import Grid

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEXT = {
    "model_type": "qwen2_vl_text",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
}
QWEN: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "image_token_id": 3,
    "text_config": TEXT,
    "vision_config": {
        "depth": 2,
        "embed_dim": 96,
        "num_heads": 2,
        "patch_size": 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_act": "quick_gelu",
    },
}
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 3,
    "vision_feature_layer": [1, -2],
    "text_config": {**TEXT, "model_type": "llama", "rope_parameters": None},
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 2,
        "hidden_act": "quick_gelu",
    },
}
GRIDS = [Grid(1, 4, 6), Grid(1, 2, 2), Grid(1, 4, 6)]


def model(raw: dict[str, Any], ops: VisionOps, family: type[Qwen2VL] | type[Llava]) -> Qwen2VL | Llava:
    params = Parameters(torch.float32, DEVICE)
    made = family(ModelParts(model_config(raw), params, {}, ops))
    fill_random(params.targets, 0)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for name, tensor in params.targets.items():
        if name.endswith("bias"):  # zeros would hide one that is added twice or not at all
            tensor.normal_(std=0.5, generator=generator)
    return made


def encode(made: Qwen2VL | Llava, patches: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    layers = made.encode(patches, grids)
    while True:
        try:
            next(layers)
        except StopIteration as stop:
            return list(stop.value)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(DEVICE)
