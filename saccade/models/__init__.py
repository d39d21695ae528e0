"""The model registry and loader. A family is in `families/`, in the file named like its `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.quantization import quantization_of
from saccade.errors import ConfigError
from saccade.models.interface import ModelParts, VisionLanguageModel
from saccade.models.quantized.kv_scales import kv_scales
from saccade.models.quantized.tensors import DequantizedTensors
from saccade.models.state_dict import Parameters
from saccade.models.tensor_files import StoredTensors, TensorFiles
from saccade.models.vision.backend import TorchVision, VisionOps
from saccade.models.weights import fill_random, load_weights, projected_rules

_TEXT = ("llama", "ministral3", "mistral", "qwen2", "qwen3", "qwen3_moe")
_FAMILIES: Mapping[str, tuple[str, str]] = {  # model_type -> (module, class), imported on demand
    "deepseek_v2": ("saccade.models.families.deepseek_v2", "DeepseekV2"),
    "deepseek_vl_v2": ("saccade.models.families.deepseek_vl_v2", "DeepseekVL2"),
    "llava": ("saccade.models.families.llava", "Llava"),
    "llava/pixtral": ("saccade.models.families.pixtral", "LlavaPixtral"),  # model type/tower type
    "llava_next": ("saccade.models.families.llava_next", "LlavaNext"),
    "llava_onevision": ("saccade.models.families.llava_onevision", "LlavaOnevision"),
    "mistral3": ("saccade.models.families.mistral3", "Mistral3"),
    "mllama": ("saccade.models.families.mllama", "Mllama"),
    "qwen": ("saccade.models.families.qwen_vl", "Qwen"),
    "qwen/qwen_visual": ("saccade.models.families.qwen_vl", "QwenVL"),
    "qwen2_vl": ("saccade.models.families.qwen2_vl", "Qwen2VL"),
    **dict.fromkeys(_TEXT, ("saccade.models.families.llama", "Text")),
    "qwen2_5_vl": ("saccade.models.families.qwen2_5_vl", "Qwen2_5VL"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), ("saccade.models.families.qwen3_vl", "Qwen3VL")),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ("saccade.models.families.qwen3_5", "Qwen3_5")),
}


def load_model(
    path: Path | None,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
    image_processor: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
    is_encoder: bool = False,
) -> VisionLanguageModel:
    """Build the model and load its weights from the folder, or ("dummy") fill it at random from the seed.

    The fallback supports any model up to `max_model_len` tokens whose behaviour changes only beyond.
    `is_encoder`: only `prepare` and `encode` will be used. Where they need no weights of the decoder, it is
    left without memory. The fallback is always whole.
    """
    if config.model_type not in _FAMILIES and path is not None:
        _check_unquantized(config, path)
        how = {"load_format": load_format, "seed": seed, "max_model_len": max_model_len}
        other = import_module("saccade.models.transformers_backend")
        return other.load(path, config, dtype=dtype, device=device, **how)  # type: ignore[no-any-return]
    ops: VisionOps = TorchVision()
    if device.type == "cuda":
        ops = import_module("saccade.models.cuda.vision").FusedVision()  # needs Triton
    params = Parameters(dtype, device, left_out="decoder" if is_encoder else None)
    model = _family(config)(ModelParts(config, params, image_processor or {}, ops))
    if is_encoder and any(weight.is_meta for weight in model.encoder_weights().values()):
        params = Parameters(dtype, device)
        model = _family(config)(ModelParts(config, params, image_processor or {}, ops))
    if load_format == "dummy":
        fill_random(params.targets, seed, device)
    elif path is None:
        problem = "needs a folder to load from; only 'dummy' works without one"
        raise ConfigError(f"load_format={load_format!r} {problem}")
    else:
        tensors = _tensors(path, config, device)
        rules = model.rules() if config.text.token_dim is None else projected_rules(model.rules())
        load_weights(tensors, params.targets, rules, progress=progress, wholes=params.wholes)
    loaded: VisionLanguageModel = model
    return loaded


def load_kv_scales(path: Path, config: ModelConfig, load_format: str) -> tuple[tuple[float, float], ...]:
    """Those of FP8 keys and values, of each layer that has some; nothing: all are 1."""
    return kv_scales(None if load_format == "dummy" else path, config.text)


def _check_unquantized(config: ModelConfig, path: Path) -> None:
    quantization = quantization_of(config.raw, path)
    if quantization is not None:
        why = f"{config.model_type!r} runs through Transformers' code, which takes no quantised weights here"
        raise ConfigError(f"{why} ({quantization.summary}); take the checkpoint in bfloat16")


def _tensors(path: Path, config: ModelConfig, device: torch.device) -> StoredTensors:
    files = TensorFiles(path)
    quantization = quantization_of(config.raw, path)
    return files if quantization is None else DequantizedTensors(files, quantization, device)


def is_native(config: ModelConfig) -> bool:
    """Whether the model is one of ours. Others run through Transformers' code."""
    return config.model_type in _FAMILIES


def _family(config: ModelConfig) -> Any:
    model_type = config.model_type
    if model_type not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ConfigError(f"model_type {model_type!r} is not supported; known are {known}")
    with_tower = f"{model_type}/{(config.raw.get('vision_config') or {}).get('model_type')}"
    module, name = _FAMILIES.get(with_tower, _FAMILIES[model_type])
    return getattr(import_module(module), name)
