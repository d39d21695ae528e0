"""Small checkpoints of the Qwen families with experts, and Transformers' way of running them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from benchmarks import checkpoints
from tests.helpers.families import family_qwen3_5, family_qwen3_vl
from tests.helpers.families.family_qwen2_5_vl import qwen_reference
from tests.helpers.families.family_text import enliven_experts
from tests.helpers.families.made_once import made_once

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
VL = (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration)
HYBRID = (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration)


@made_once
def build_vl(folder: Path, *, layout: str = "saved", text: dict[str, Any] | None = None, **given: Any) -> Path:
    """Experts in all layers but one. The hub's folders have all experts in one tensor, inputs before outputs."""
    mine = {**EXPERTS, "mlp_only_layers": [1], **(text or {})}
    family_qwen3_vl.build(folder, layout=layout, text=mine, kinds=VL, prepare=enliven_experts, **given)
    if layout == "published":
        _publish(folder, lambda tensor: tensor.mT.contiguous())
    return folder


@made_once
def build_hybrid(folder: Path, *, layout: str = "saved", text: dict[str, Any] | None = None, **given: Any) -> Path:
    """Experts in all layers, and an MLP with a gate beside them. On the hub the experts are one tensor here too, and
    the layer that guesses ahead has some of its own."""
    mine = {**EXPERTS, "shared_expert_intermediate_size": 20, **(text or {})}
    family_qwen3_5.build(folder, layout=layout, text=mine, kinds=HYBRID, prepare=enliven_experts, **given)
    if layout == "published":
        _publish(folder, _as_it_is)
    return folder


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _publish(folder: Path, turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    if "num_local_experts" in text:
        text["num_experts"] = text.pop("num_local_experts")
    else:  # no layer has an MLP alone, so its width is not told
        text.pop("intermediate_size")
    checkpoints._write(folder / "config.json", config)
    weights = _in_one(load_file(folder / "model.safetensors"))
    weights = {name: turn(tensor) if ".mlp.experts." in name else tensor for name, tensor in weights.items()}
    if any(name.startswith("mtp.") for name in weights):
        weights["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.ones(2, 4, 4)
        weights["mtp.layers.0.mlp.gate.weight"] = torch.ones(2, 4)
        weights["mtp.layers.0.mlp.shared_expert_gate.weight"] = torch.ones(1, 4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _in_one(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts that are stored one by one, stacked as the hub has them."""
    alone = {name for name in weights if ".mlp.experts." in name and name.endswith(".weight")}
    kept = {name: tensor for name, tensor in weights.items() if name not in alone}
    for place in {name.split(".mlp.experts.")[0] for name in alone}:
        one = f"{place}.mlp.experts.{{}}.{{}}_proj.weight"
        gates, ups, downs = (
            torch.stack([weights[one.format(i, part)] for i in range(EXPERTS["num_experts"])])
            for part in ("gate", "up", "down")
        )
        kept |= {
            f"{place}.mlp.experts.gate_up_proj": torch.cat((gates, ups), 1),
            f"{place}.mlp.experts.down_proj": downs,
        }
    return kept


reference_vl = partial(qwen_reference, Qwen3VLMoeForConditionalGeneration)
reference_hybrid = partial(qwen_reference, Qwen3_5MoeForConditionalGeneration)
