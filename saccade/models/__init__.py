"""Loads a model: the family of its config, what stays quantised, and its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.layouts import layout_in
from saccade.checkpoint.quantization import Quantization, quantization_of
from saccade.errors import ConfigError
from saccade.models.families import FAMILIES, family_class
from saccade.models.fp8_weights import Fp8Weights, check_online, multiplies_fp8
from saccade.models.int4_weights import Int4Format, Int4Weights, keeps_int4
from saccade.models.interface import ModelParts, VisionLanguageModel
from saccade.models.quantized.kv_scales import kv_scales
from saccade.models.quantized.tensors import DequantizedTensors
from saccade.models.state_dict import Parameters, Whole
from saccade.models.tensor_files import StoredTensors, TensorFiles
from saccade.models.vision.backend import TorchVision, VisionOps
from saccade.models.weights import (
    Place,
    Rule,
    by_rules,
    fill_random,
    fp8_targets,
    int4_targets,
    load_weights,
    projected_rules,
)

logger = logging.getLogger(__name__)


def load_model(
    path: Path | None,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
    image_processor: Mapping[str, Any] = MappingProxyType({}),
    max_model_len: int | None = None,
    is_encoder: bool = False,
    quantize: str | None = None,
) -> VisionLanguageModel:
    """Build the model and load its weights from the folder, or ("dummy") fill it at random from the seed.

    The fallback supports any model up to `max_model_len` tokens whose behaviour changes only beyond.
    `is_encoder`: only `prepare` and `encode` will be used. Where they need no weights of the decoder, it is
    left without memory. The fallback is always whole.
    `quantize`: "fp8" for the decoder's layers, if the checkpoint is not quantised.
    """
    tensors = None if load_format == "dummy" else _tensors(path, config, device, load_format)
    stays = partial(_quantized_weights, tensors, path, config, device, dtype, quantize)
    if path is not None and not is_native(config):
        quantized = stays(lambda: (str, {}))  # by names of the checkpoint
        how = {"seed": seed, "max_model_len": max_model_len, "tensors": tensors, "quantized": quantized}
        other = import_module("saccade.models.bridge.load")
        model = other.load(path, config, dtype=dtype, ops=_vision_ops(device), device=device, **how)
        _log_apart(quantized)
        return model  # type: ignore[no-any-return]
    build = partial(_build, config, dtype, device, image_processor)
    if is_encoder:
        model = build(left_out="decoder")
        if any(weight.is_meta for weight in model.encoder_weights().values()):
            model = build()
    else:
        quantized = stays(partial(_places, build, config))
        model = build(quantized=quantized)
        _log_apart(quantized)
    params: Parameters = model.params
    if tensors is None:
        fill_random(params.targets, seed, device, params.scales)
    else:
        parts = (params.wholes, params.scales)
        load_weights(tensors, params.targets, _rules(model, config), *parts, progress=progress)
    if isinstance(tensors, DequantizedTensors):
        logger.info("%s", tensors.summary())
    loaded: VisionLanguageModel = model
    return loaded


def _log_apart(quantized: object) -> None:
    if not isinstance(quantized, Int4Weights):
        return
    if quantized.apart:
        which = f"{len(quantized.apart)} projections are dequantised, as their parts differ in INT4"
        logger.info("%s (groups, or the order of inputs): %s, ...", which, quantized.apart[0])
    if quantized.ordered:
        which = f"{len(quantized.ordered)} projections of experts are dequantised"
        why = "as kernels read none with an order of inputs (desc_act)"
        logger.info("%s, %s: %s, ...", which, why, quantized.ordered[0])


def load_kv_scales(path: Path, config: ModelConfig, load_format: str) -> tuple[tuple[float, float], ...]:
    """Those of FP8 keys and values, of each layer that has some; nothing: all are 1."""
    return kv_scales(None if load_format == "dummy" else path, config.text)


def _build(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    image_processor: Mapping[str, Any],
    left_out: str | None = None,
    quantized: Fp8Weights | Int4Weights | None = None,
) -> Any:
    params = Parameters(dtype, device, left_out, quantized)
    return family_class(config)(ModelParts(config, params, image_processor, _vision_ops(device)))


def _vision_ops(device: torch.device) -> VisionOps:
    if device.type != "cuda":
        return TorchVision()
    ops: VisionOps = import_module("saccade.models.cuda.vision").FusedVision()  # needs Triton
    return ops


def _rules(model: Any, config: ModelConfig) -> Sequence[Rule]:
    rules: Sequence[Rule] = model.rules()
    return rules if config.text.token_dim is None else projected_rules(rules)


def _places(build: Callable[..., Any], config: ModelConfig) -> tuple[Place, Mapping[str, Whole]]:
    probe = build(left_out="decoder")
    return by_rules(_rules(probe, config)), probe.params.wholes


def _quantized_weights(
    tensors: StoredTensors | None,
    path: Path | None,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    quantize: str | None,
    places: Callable[[], tuple[Place, Mapping[str, Whole]]],
) -> Fp8Weights | Int4Weights | None:
    """What stays quantised: what the checkpoint has so, or what is to be quantised. INT4 before FP8."""
    quantization = quantization_of(config.raw, path) if path else None
    if quantize is not None:
        check_online(quantize, quantization, device)
        if quantization is None:
            return Fp8Weights(in_blocks=False)
    if quantization is None or not (keeps_int4(device) or multiplies_fp8(device)):
        return None
    if not isinstance(tensors, DequantizedTensors):
        return _quantized_at_random(quantization, config, device, dtype)
    int4 = tensors.int4_weights() if keeps_int4(device) else {}
    if int4:
        has_experts = reads_int4_experts(config, device, dtype)
        return int4_targets(int4, *places(), has_experts=has_experts)
    if not multiplies_fp8(device):
        return None
    fp8 = tensors.fp8_weights()
    fp4 = dict.fromkeys(tensors.fp4_weights(), any(fp8.values()))
    return fp8_targets({**fp8, **fp4}, *places())


def reads_int4_experts(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether experts can stay in INT4: kernels pass their self-test. Else they are dequantised."""
    if config.text.experts is None or not keeps_int4(device):
        return False
    return bool(import_module("saccade.models.cuda.moe").can_read_int4(device, dtype))  # needs Triton


def _quantized_at_random(
    quantization: Quantization, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Fp8Weights | Int4Weights | None:
    """What the config alone says: random weights of the same kind."""
    if quantization.is_int4 and keeps_int4(device):
        format = Int4Format(quantization.group, quantization.has_zeros, torch.float16)
        has_experts = reads_int4_experts(config, device, dtype) and not quantization.has_order
        return Int4Weights({}, default=format, has_experts=has_experts)
    is_fp8 = quantization.becomes_fp8 and multiplies_fp8(device)
    return Fp8Weights(quantization.has_blocks) if is_fp8 else None


def _tensors(path: Path | None, config: ModelConfig, device: torch.device, load_format: str) -> StoredTensors:
    if path is None:
        problem = "needs a folder to load from; only 'dummy' works without one"
        raise ConfigError(f"load_format={load_format!r} {problem}")
    layout = layout_in(path)
    files = TensorFiles(path, layout.left_out if layout else ())
    quantization = quantization_of(config.raw, path)
    return files if quantization is None else DequantizedTensors(files, quantization, device)


def is_native(config: ModelConfig) -> bool:
    """Whether the model is one of ours. Others run through Transformers' code."""
    return config.model_type in FAMILIES and not config.is_bridged
