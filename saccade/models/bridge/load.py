"""Loads a Transformers model: its weights by Transformers, those that are quantised by us, and the proof."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.checkpoint import hf_processor
from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.files import read_json
from saccade.checkpoint.hf_processor import LOCAL, refusal
from saccade.checkpoint.layouts import layout_in
from saccade.errors import ConfigError, RequestError
from saccade.models.bridge import attention
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.model import ModelBridge
from saccade.models.bridge.own_decoder import use_own_decoder
from saccade.models.bridge.own_tower import pause_between_layers, use_own_tower
from saccade.models.bridge.proof import check_against_own_forward
from saccade.models.bridge.published import weights_of
from saccade.models.bridge.stored import has_experts
from saccade.models.bridge.stored_load import Quantized, load_stored, quantize_layers
from saccade.models.bridge.video_proof import check_videos
from saccade.models.quantized.tensors import DequantizedTensors
from saccade.models.tensor_files import StoredTensors, some
from saccade.models.vision.backend import VisionOps
from saccade.models.weights import OF_QUANTISED

logger = logging.getLogger("saccade.models")


def load(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    max_model_len: int | None,
    tensors: StoredTensors | None,
    ops: VisionOps,
    quantized: Quantized | None = None,
) -> ModelBridge:
    """Load and check a model. Anything that Transformers raises becomes a ConfigError.

    `tensors`: weights of the checkpoint; None: they are random. `quantized`: which of its layers stay so, by
    the checkpoint's names, or are to be.
    """
    kind = config.model_type
    processor = hf_processor.load_processor(path, kind)
    window = max_model_len or config.text.max_context
    if dtype == torch.float32:
        torch.backends.cudnn.allow_tf32 = False  # convolutions of towers would round as bfloat16 nearly does
    try:
        model = _model(kind, path, dtype, tensors, seed, device, quantized)
        bridge = ModelBridge(config, model.to(device).eval(), processor, device, dtype, window)
        bridge.is_random = tensors is None
        probes = check_against_own_forward(bridge)
        check_videos(bridge)
    except ConfigError:
        raise
    except (Unfit, RequestError) as error:
        raise refusal(kind, str(error)) from None
    except Exception as error:
        raise refusal(kind, hf_processor.raised(error)) from error
    of_decoder, of_tower = use_own_decoder(bridge, probes), use_own_tower(bridge, ops)
    if of_tower is not None:
        pause_between_layers(bridge)
    _log(bridge, of_decoder, of_tower)
    if has_experts(bridge.text):
        logger.warning("its experts stay quantised, and are dequantised whenever a layer runs: that is slow")
    return bridge


def _log(model: ModelBridge, reason: str | None, of_tower: str | None) -> None:
    """`reason`: why its decoder is none of ours; `of_tower`: why its tower's layers are not."""
    logger.info("layers of its tower: %s", "ours" if of_tower is None else f"Transformers' ({of_tower})")
    kind = model.config.model_type
    unknown = f"model_type {kind} is not one that Saccade knows: it runs through Transformers' code"
    if reason is None:
        unknown += " up to its decoder, which is one of ours"
    else:
        unknown += f". Its answers are right, but steps are slower than a known model's ({reason})"
    if not model.pauses.has_layers:
        unknown += ". A picture is encoded in one piece, in which others wait"
    logger.warning("%s", unknown)


def _model(
    kind: str,
    path: Path,
    dtype: torch.dtype,
    tensors: StoredTensors | None,
    seed: int,
    device: torch.device,
    quantized: Quantized | None,
) -> Any:
    attention.register(hf_processor.import_transformers(kind))
    model_class, shape = hf_processor.model_class(path, kind)
    for part in (shape, shape.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config  # or Transformers would load the weights by its own quantisers
    if tensors is None:
        torch.manual_seed(seed)
        with device:  # a host takes minutes for many weights
            model = model_class._from_config(shape, dtype=dtype)
    else:
        model = _filled(model_class, path, shape, dtype, tensors, quantized, device)
        if isinstance(tensors, DequantizedTensors):
            logger.info("%s", tensors.summary())
            return model
    if quantized is not None:
        quantize_layers(model, quantized, dtype, device)
    return model


def _filled(
    kind: Any,
    path: Path,
    shape: Any,
    dtype: torch.dtype,
    tensors: StoredTensors,
    quantized: Quantized | None,
    device: torch.device,
) -> Any:
    layout = layout_in(path)
    load = partial(_loaded, kind, path, shape, dtype, "" if layout is None else layout.unread)
    if layout is not None:
        return load(weights_of(tensors, layout, read_json(path / "config.json"), dtype))
    if isinstance(tensors, DequantizedTensors):
        return load_stored(load, tensors, quantized, dtype, device)
    return load(None)


def _loaded(
    kind: Any, path: Path, shape: Any, dtype: torch.dtype, unread: str, weights: Mapping[str, Tensor] | None
) -> Any:
    """`weights`: instead of those in the folder. `unread`: part of the names of those that may be absent."""
    how = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True, "config": shape, **LOCAL}
    source = path if weights is None else None
    model, info = kind.from_pretrained(source, state_dict=weights, **how)
    absent = [name for name in info["missing_keys"] if not unread or unread not in name]
    _check_loaded(absent, info["unexpected_keys"])
    return model


def _check_loaded(absent: Collection[str], unexpected: Collection[str]) -> None:
    """Transformers fills the missing at random and leaves the unexpected out."""
    if absent:
        raise Unfit(f"its checkpoint lacks {len(absent)} tensors ({some(absent)})")
    scales = [name for name in unexpected if name.endswith(OF_QUANTISED)]
    if scales:
        raise Unfit(f"its quantization_config says nothing of quantised weights ({some(scales)})")
