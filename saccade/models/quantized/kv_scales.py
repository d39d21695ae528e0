"""The scales of FP8 keys and values that a checkpoint brings, by layer. Without any they are 1."""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from pathlib import Path

from saccade.checkpoint.config import TextConfig
from saccade.errors import ConfigError
from saccade.models.tensor_files import TensorFiles

_NAMES = (  # of the decoder, whatever comes before; its number, and k, v or for both kv
    r"layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?(k|v|kv)_scale",
    r"layers\.(\d+)\.self_attn\.([kv])_proj\.output_scale",
)
_PATTERN = re.compile(r"(?:(?!vis).)*?\b(?:" + "|".join(_NAMES) + ")")

logger = logging.getLogger(__name__)


def kv_scales(path: Path | None, text: TextConfig) -> tuple[tuple[float, float], ...]:
    """Those of keys and values, of each layer that has some; nothing: all are 1."""
    scales = _stored(TensorFiles(path)) if path else {}
    if not scales:
        logger.info("KV cache in FP8 (e4m3): the checkpoint has no scales of keys and values, so they are 1")
        return ()
    lacking = [layer for layer, pair in scales.items() if len(pair) < 2]
    if lacking or len(scales) != text.num_kv_layers:
        raise ConfigError(
            f"the checkpoint has k_scale and v_scale of {len(scales) - len(lacking)} layers, and "
            f"{text.num_kv_layers} have a KV cache; leave out --kv-cache-dtype, or take another checkpoint"
        )
    logger.info("KV cache in FP8 (e4m3): scales of %d layers from the checkpoint", len(scales))
    return tuple((scales[layer]["k"], scales[layer]["v"]) for layer in sorted(scales))


def _stored(files: TensorFiles) -> dict[int, dict[str, float]]:
    """By layer, then by "k" or "v"."""
    scales: dict[int, dict[str, float]] = defaultdict(dict)
    for name in files.file_of:
        match = _PATTERN.fullmatch(name)
        if match:
            layer, kinds = (group for group in match.groups() if group is not None)
            scale = _checked(name, files.read(name).flatten().tolist())
            scales[int(layer)] |= dict.fromkeys(kinds, scale)
    return scales


def _checked(name: str, values: list[float]) -> float:
    if len(values) != 1 or not 0 < values[0] < math.inf:
        raise ConfigError(f"{name} must be one positive number, not {values[:4]}; leave out --kv-cache-dtype")
    return values[0]
