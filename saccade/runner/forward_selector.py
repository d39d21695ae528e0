"""Which forward pass runs a model: kernels and CUDA graphs on a GPU; PyTorch elsewhere or if graphs fail."""

from __future__ import annotations

import gc
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import costs
from saccade.models import is_native
from saccade.models.bridge.text_model import TextModel
from saccade.models.interface import VisionLanguageModel
from saccade.models.layers.cross_attention import CrossDecoder
from saccade.models.layers.mla import LatentDecoder
from saccade.models.layers.ruled_decoder import RuledDecoder
from saccade.models.layers.torch_attention import PagedKV
from saccade.options.engine import SchedulerConfig
from saccade.runner.embedding_cache import EmbeddingSlab
from saccade.runner.forward import Forward
from saccade.runner.recurrent_state import RecurrentStates
from saccade.runner.torch_forward import TorchForward
from saccade.types.media import Key

_CHECKED = (CrossDecoder, LatentDecoder, RuledDecoder, TextModel)
"""Decoders whose graphs are compared with PyTorch at start, and may run without them, as may any other whose
model runs through Transformers' code."""


class ForwardParts(NamedTuple):
    """What a forward pass is made of."""

    model: VisionLanguageModel
    kv: PagedKV
    sizes: SchedulerConfig
    states: RecurrentStates | None
    embeddings: MutableMapping[Key, Tensor]
    max_images: int = 1  # of a prompt


def select_forward(parts: ForwardParts) -> tuple[Forward, str | None]:
    """With the reason, for the start-up log, why a GPU runs the model in eager PyTorch."""
    plain = partial(TorchForward, parts.model, parts.kv, parts.sizes.block_size, parts.states)
    if not parts.kv.k.is_cuda:
        return plain(), None
    capture = partial(_capture, parts)
    decoder: Any = parts.model.decoder
    if not isinstance(decoder, _CHECKED) and is_native(parts.model.config):
        return capture(), None
    reason = decoder.eager_reason() if isinstance(decoder, TextModel) else None
    forward = None
    if reason is None:
        forward, reason = try_graphs(capture, partial(_check, parts, plain()))
    if forward is None:
        return plain(), f"steps run in plain PyTorch, without kernels and CUDA graphs: {reason}"
    return forward, None


def try_graphs(
    capture: Callable[[], Forward], check: Callable[[Forward], None]
) -> tuple[Forward | None, str | None]:
    """What was captured, or why it cannot be used."""
    forward = None
    try:
        forward = capture()
        check(forward)
        return forward, None
    except Exception as error:  # anything: PyTorch runs the model, too
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    forward = None  # its graphs hold memory
    gc.collect()
    torch.cuda.empty_cache()
    return None, reason


def run_forward(parts: ForwardParts) -> None:
    """Every pass that is captured, with what is captured thrown away."""
    decoder: Any = parts.model.decoder
    if not isinstance(decoder, TextModel):  # Transformers' layers may launch anything
        _capture(parts)


def _capture(parts: ForwardParts) -> Forward:
    from saccade.runner.cuda.forward import CudaForward  # needs Triton, which only CUDA machines have

    sizes = parts.sizes
    decoder: Any = parts.model.decoder
    max_blocks = costs.blocks_for(sizes.max_model_len, sizes.block_size)
    forward = CudaForward(
        decoder,
        parts.kv,
        block_size=sizes.block_size,
        max_requests=sizes.max_num_seqs,
        max_blocks=max_blocks,
        axes=position_rows(parts.model),
        states=parts.states,
        slab=parts.embeddings if isinstance(parts.embeddings, EmbeddingSlab) else None,
        max_cross_states=_max_cross_states(parts),
    )
    forward.capture(sizes.max_num_batched_tokens)
    return forward


def position_rows(model: VisionLanguageModel) -> int:
    """Of a prompt. A model that runs through Transformers' code has found how many axes it has."""
    decoder: Any = model.decoder
    if isinstance(decoder, TextModel):
        return decoder.position_rows
    axes: int = getattr(model, "axes", 3 if model.config.text.mrope_section else 1)
    return axes + getattr(decoder, "has_blocks", False)


def _max_cross_states(parts: ForwardParts) -> int:
    """Of all images of a prompt. The encoder's budget is at least the largest image."""
    per_state = costs.cross_slots_per_state(parts.model.config.text)
    return parts.max_images * parts.sizes.encoder_budget // per_state if per_state else 0


def _check(parts: ForwardParts, plain: TorchForward, forward: Any) -> None:
    from saccade.runner.cuda.self_check import check_logits

    if getattr(parts.model, "is_random", False):
        return  # rounding alone changes what random weights say
    sizes = parts.sizes
    check_logits(
        forward,
        plain,
        parts.embeddings,
        parts.model.config.text,
        block_size=sizes.block_size,
        max_tokens=min(sizes.max_model_len, sizes.num_blocks * sizes.block_size),
        position_rows=position_rows(parts.model),
    )
