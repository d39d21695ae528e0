"""Loads a Transformers model: its weights by Transformers, or dequantised by us, and the proof."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from saccade.checkpoint import hf_processor
from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.hf_processor import LOCAL, refusal
from saccade.errors import ConfigError, RequestError
from saccade.models.bridge import attention
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.model import ModelBridge
from saccade.models.bridge.own_decoder import use_own_decoder
from saccade.models.bridge.proof import check_against_own_forward
from saccade.models.quantized.tensors import DequantizedTensors
from saccade.models.tensor_files import StoredTensors, some
from saccade.models.weights import OF_QUANTISED

logger = logging.getLogger("saccade.models")


def load(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    seed: int,
    max_model_len: int | None,
    tensors: StoredTensors | None,
) -> ModelBridge:
    """Load and check a model. Anything that Transformers raises becomes a ConfigError.

    `tensors`: weights of the checkpoint. Quantised ones are dequantised here, as for other models.
    """
    kind = config.model_type
    processor = hf_processor.load_processor(path, kind)
    window = max_model_len or config.text.max_context
    try:
        model = _model(kind, path, dtype, tensors, seed, device)
        bridge = ModelBridge(config, model.to(device).eval(), processor, device, dtype, window)
        probes = check_against_own_forward(bridge)
    except ConfigError:
        raise
    except (Unfit, RequestError) as error:
        raise refusal(kind, str(error)) from None
    except Exception as error:
        raise refusal(kind, hf_processor.raised(error)) from error
    _log(kind, use_own_decoder(bridge, probes))
    return bridge


def _log(kind: str, reason: str | None) -> None:
    """`reason`: why its decoder is none of ours."""
    unknown = f"model_type {kind} is not one that Saccade knows: it runs through Transformers' code"
    encoding = "a picture is encoded in one piece, in which others wait"
    if reason is None:
        logger.warning("%s up to its decoder, which is one of ours. There %s", unknown, encoding)
        return
    slower = "Its answers are right, but steps are slower than a known model's"
    logger.warning("%s. %s (%s), and %s", unknown, slower, reason, encoding)


def _model(
    kind: str,
    path: Path,
    dtype: torch.dtype,
    tensors: StoredTensors | None,
    seed: int,
    device: torch.device,
) -> Any:
    attention.register(hf_processor.import_transformers(kind))
    model_class, shape = hf_processor.model_class(path, kind)
    for part in (shape, shape.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config  # or Transformers would load the weights by its own quantisers
    if tensors is None:
        torch.manual_seed(seed)
        with device:  # a host takes minutes for many weights
            return model_class._from_config(shape, dtype=dtype)
    return _loaded(model_class, path, shape, dtype, tensors)


def _loaded(kind: Any, path: Path, shape: Any, dtype: torch.dtype, tensors: StoredTensors) -> Any:
    how = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True, "config": shape, **LOCAL}
    if isinstance(tensors, DequantizedTensors):
        weights = {name: tensors.read(name).to("cpu", dtype) for name in tensors.file_of}
        model, info = kind.from_pretrained(None, state_dict=weights, **how)
        logger.info("%s", tensors.summary())
    else:
        model, info = kind.from_pretrained(path, **how)
    _check_loaded(info["missing_keys"], info["unexpected_keys"])
    return model


def _check_loaded(absent: Collection[str], unexpected: Collection[str]) -> None:
    """Transformers fills the missing at random and leaves the unexpected out."""
    if absent:
        raise Unfit(f"its checkpoint lacks {len(absent)} tensors ({some(absent)})")
    scales = [name for name in unexpected if name.endswith(OF_QUANTISED)]
    if scales:
        raise Unfit(f"its quantization_config says nothing of quantised weights ({some(scales)})")
