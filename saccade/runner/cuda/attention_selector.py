"""Which kernels run prefill attention on a CUDA device: our own, or FlashInfer's where it is installed."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch

from saccade.checkpoint.config import TextConfig
from saccade.errors import ConfigError
from saccade.runner.cuda.graph_sizes import GRAPH_TOKENS, GRAPH_WINDOWS

if TYPE_CHECKING:
    from saccade.kernels.attention.prefill_flashinfer import FlashInferPrefill

logger = logging.getLogger(__name__)

MIN_TOKENS = 4096
"""Of a step. From here on FlashInfer is never slower than our Triton kernel, whatever the contexts; planning
a step costs the CPU half a millisecond, which smaller ones gain back only over long contexts."""
_HEAD_SIZES = (64, 128, 256)
_HOPPER = 9


class AttentionTarget(NamedTuple):
    """What decides whether FlashInfer can be used."""

    text: TextConfig
    dtype: torch.dtype
    device: torch.device
    has_fp8_kv: bool = False


def check(asked: str, target: AttentionTarget) -> None:
    """Raises ConfigError for a backend that cannot be used, before anything is loaded."""
    reason = _why_not(target) if asked == "flashinfer" else None
    if reason:
        raise ConfigError(f"attention_backend=flashinfer cannot be used: {reason}")


def choose(
    asked: str, target: AttentionTarget, block_size: int, max_blocks: int, scale: float
) -> FlashInferPrefill | None:
    """None: prefill runs on our own kernels. `max_blocks`: of one request."""
    check(asked, target)
    if asked == "triton" or _why_not(target) or (asked == "auto" and _is_ours_faster(target, block_size)):
        return None
    minimum = MIN_TOKENS if asked == "auto" else 1
    try:
        found = _new(target, block_size, max_blocks, scale, minimum)
    except Exception as error:  # anything: the library is imported and compiles its kernels here
        if asked == "flashinfer":
            reason = f"FlashInfer failed: {error}"
            raise ConfigError(f"attention_backend=flashinfer cannot be used: {reason}") from error
        logger.warning("FlashInfer is installed but failed, so prefill runs without it: %s", error)
        return None
    logger.info("prefill attention runs on FlashInfer in steps of %d tokens and more", minimum)
    return found


def _is_ours_faster(target: AttentionTarget, block_size: int) -> bool:
    """Our Hopper kernel is faster for long windows, equal for short ones, and needs no planning."""
    from saccade.kernels.attention.prefill import can_use_hopper
    from saccade.kernels.launch.device import Heads

    heads = Heads(target.text.num_heads, target.text.num_kv_heads, target.text.head_dim)
    return can_use_hopper(heads, target.dtype, block_size, target.device)


def _new(
    target: AttentionTarget, block_size: int, max_blocks: int, scale: float, min_tokens: int
) -> FlashInferPrefill:
    from saccade.kernels.attention.prefill_flashinfer import Capacity, FlashInferPrefill
    from saccade.kernels.launch.device import Heads

    text, dtype, device, _ = target
    heads = Heads(text.num_heads, text.num_kv_heads, text.head_dim)
    capacity = Capacity(GRAPH_TOKENS[-1], GRAPH_WINDOWS, GRAPH_WINDOWS * max_blocks)
    return FlashInferPrefill(heads, capacity, block_size, scale, dtype, device, min_tokens=min_tokens)


def _why_not(target: AttentionTarget) -> str | None:
    """For an operator; None if it can be used."""
    if target.device.type != "cuda":
        return f"it needs a CUDA device, not {target.device.type}"
    if find_spec("flashinfer") is None:
        return "it is not installed (pip install saccade[flashinfer])"
    if target.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16, not {str(target.dtype).removeprefix('torch.')}"
    if target.has_fp8_kv:
        return "it reads keys and values in the model's dtype, and kv_cache_dtype is fp8"
    if target.text.head_dim not in _HEAD_SIZES:
        sizes = ", ".join(map(str, _HEAD_SIZES))
        return f"its heads have {sizes} dimensions, this model's {target.text.head_dim}"
    major, minor = torch.cuda.get_device_capability(target.device)
    if major != _HOPPER:
        return f"it is used on Hopper GPUs (compute capability 9.x), not on {major}.{minor}"
    return None
