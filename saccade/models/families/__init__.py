"""The registry of model families: model type -> the class that computes it, in a module of this folder."""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib import import_module
from typing import Any

from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.settings import setting
from saccade.errors import ConfigError

# Model type, or model type/tower type -> "module.Class", imported on demand.
FAMILIES: MutableMapping[str, str] = {
    "deepseek_v2": "deepseek_v2.DeepseekV2",
    "deepseek_vl_v2": "deepseek_vl_v2.DeepseekVL2",
    "dots_ocr": "dots_ocr.DotsOCR",
    "llava": "llava.Llava",
    "llava/pixtral": "pixtral.LlavaPixtral",
    "llava_next": "llava_next.LlavaNext",
    "llava_onevision": "llava_onevision.LlavaOnevision",
    "minicpmv": "minicpmv.MiniCPMV",
    "mistral3": "mistral3.Mistral3",
    "mllama": "mllama.Mllama",
    "qwen": "qwen_vl.Qwen",
    "qwen/qwen_visual": "qwen_vl.QwenVL",
    "qwen2_vl": "qwen2_vl.Qwen2VL",
    "qwen2_5_vl": "qwen2_5_vl.Qwen2_5VL",
    **dict.fromkeys(("llama", "ministral3", "mistral", "qwen2", "qwen3", "qwen3_moe"), "llama.Text"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), "qwen3_vl.Qwen3VL"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "qwen3_5.Qwen3_5"),
}


def family_class(config: ModelConfig) -> Any:
    model_type = config.model_type
    if model_type not in FAMILIES:
        names = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"model_type {model_type!r} is not supported; known are {names}")
    with_tower = f"{model_type}/{setting(config.raw, 'vision_config', {}).get('model_type')}"
    module, _, name = FAMILIES.get(with_tower, FAMILIES[model_type]).rpartition(".")
    return getattr(import_module(f"{__name__}.{module}"), name)
