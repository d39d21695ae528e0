"""Which attention prompts go through on a CUDA device: our own kernels, or FlashInfer's where it is installed."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch

from saccade.checkpoint.config import TextConfig
from saccade.errors import ConfigError

if TYPE_CHECKING:
    from saccade.kernels.attention.prefill_flashinfer import FlashInferPrefill

logger = logging.getLogger(__name__)

MIN_TOKENS = 4096
"""From here on FlashInfer is never slower than our Triton kernel, whatever lies before the new tokens; planning a step
takes the host half a millisecond, which smaller ones gain back only over long contexts."""
_HEAD_SIZES = (64, 128, 256)
_HOPPER = 9


class Place(NamedTuple):
    """What decides whether FlashInfer can be used."""

    text: TextConfig
    dtype: torch.dtype
    device: torch.device


def check(asked: str, place: Place) -> None:
    """Before anything is loaded: what cannot be had is said at once."""
    reason = _why_not(place) if asked == "flashinfer" else None
    if reason:
        raise ConfigError(f"attention_backend=flashinfer cannot be used: {reason}")


def choose(asked: str, place: Place, block_size: int, max_blocks: int, scale: float) -> FlashInferPrefill | None:
    """None: prompts go through our own kernels. `max_blocks`: of one request."""
    check(asked, place)
    if asked == "triton" or _why_not(place) or (asked == "auto" and _is_ours_faster(place, block_size)):
        return None
    minimum = MIN_TOKENS if asked == "auto" else 1
    try:
        found = _new(place, block_size, max_blocks, scale, minimum)
    except Exception as error:  # whatever another library raises while it is imported or compiles its kernels
        if asked == "flashinfer":
            raise ConfigError(f"attention_backend=flashinfer cannot be used: FlashInfer failed: {error}") from error
        logger.warning("FlashInfer is installed but failed, so prompts go without it: %s", error)
        return None
    logger.info("prompts attend by FlashInfer in steps of %d tokens and more", minimum)
    return found


def _is_ours_faster(place: Place, block_size: int) -> bool:
    """Our kernel for Hopper was faster for long windows, equal for short ones, and needs no planning."""
    from saccade.kernels.attention.prefill import can_use_hopper
    from saccade.kernels.launch.device import Heads

    heads = Heads(place.text.num_heads, place.text.num_kv_heads, place.text.head_dim)
    return can_use_hopper(heads, place.dtype, block_size, place.device)


def _new(place: Place, block_size: int, max_blocks: int, scale: float, min_tokens: int) -> FlashInferPrefill:
    from saccade.kernels.attention.prefill_flashinfer import Capacity, FlashInferPrefill
    from saccade.kernels.launch.device import Heads
    from saccade.runner.cuda.graph_sizes import GRAPH_TOKENS, GRAPH_WINDOWS

    text = place.text
    return FlashInferPrefill(
        Heads(text.num_heads, text.num_kv_heads, text.head_dim),
        Capacity(GRAPH_TOKENS[-1], GRAPH_WINDOWS, GRAPH_WINDOWS * max_blocks),
        block_size,
        scale,
        place.dtype,
        place.device,
        min_tokens=min_tokens,
    )


def _why_not(place: Place) -> str | None:
    """In words for an operator; None if it can be used."""
    if place.device.type != "cuda":
        return f"it needs a CUDA device, not {place.device.type}"
    if find_spec("flashinfer") is None:
        return "it is not installed (pip install saccade[flashinfer])"
    if place.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16, not {str(place.dtype).removeprefix('torch.')}"
    if place.text.head_dim not in _HEAD_SIZES:
        return f"its heads have {', '.join(map(str, _HEAD_SIZES))} dimensions, this model's {place.text.head_dim}"
    major, minor = torch.cuda.get_device_capability(place.device)
    if major != _HOPPER:
        return f"it is used on Hopper GPUs (compute capability 9.x), not on {major}.{minor}"
    return None
