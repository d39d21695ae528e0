"""A small Qwen3.5 checkpoint and Transformers' way of running it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from benchmarks import checkpoints
from tests.helpers.families.family_qwen2_5_vl import qwen_reference
from tests.helpers.families.family_qwen3_vl import VISION, write_image_processor
from tests.helpers.families.made_once import made_once

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}

WHOLE_BLOCKS = {  # of 128 x 128, but for a delta net's gates and keys and values of attention
    "hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32
}  # fmt: skip


@made_once
def build(
    folder: Path,
    *,
    layout: str = "saved",
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    kinds: tuple[Any, Any] = (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    prepare: Callable[[Any], None] = lambda model: None,
) -> Path:
    """Every structural feature on: both kinds of layers, shared key heads in both, heads that turn in part."""
    tokenizer = checkpoints.qwen_tokenizer()
    text_config = {
        **checkpoints.TEXT,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "rope_parameters": dict(ROPE),
        **checkpoints.qwen_vocabulary(tokenizer),
        **(text or {}),
    }
    tower = {name: value for name, value in VISION.items() if name != "deepstack_visual_indexes"}
    config = kinds[0](
        text_config=text_config,
        vision_config={**tower, "out_hidden_size": text_config["hidden_size"], **(vision or {})},
        tie_word_embeddings=False,
        **checkpoints.qwen_image_tokens(tokenizer),
    )
    model = kinds[1](config).float().eval()
    checkpoints.randomise(model, seed)
    _soften(model)
    prepare(model)
    model.save_pretrained(folder)
    if layout == "published":
        _publish(folder)
    write_image_processor(folder, layout)
    checkpoints.write_qwen_tokenizer(folder, tokenizer, layout)
    return folder


def _soften(model: torch.nn.Module) -> None:
    """Norms are stored around zero here, and what a head remembers must outlast a prompt."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and "linear_attn" not in name and "visual" not in name:
                parameter.sub_(1)
            if name.endswith("A_log"):
                parameter.sub_(2)


def _publish(folder: Path) -> None:
    """As on the hub: the first layer kind by an interval, and a head that guesses ahead, which is not read."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    text, vision = config["text_config"], config["vision_config"]
    text.pop("layer_types")
    text["full_attention_interval"] = 2
    text["dtype"] = config.pop("dtype", "float32")
    vision.pop("rope_parameters", None)
    vision["model_type"] = config["model_type"]
    checkpoints._write(file, config)
    weights = load_file(folder / "model.safetensors")
    hidden = text["hidden_size"]
    weights |= {f"mtp.{name}.weight": torch.ones(hidden) for name in ("norm", "pre_fc_norm_hidden")}
    weights["mtp.fc.weight"] = torch.ones(hidden, 2 * hidden)
    weights["mtp.layers.0.self_attn.q_proj.weight"] = torch.ones(hidden, hidden)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


reference = partial(qwen_reference, Qwen3_5ForConditionalGeneration)
