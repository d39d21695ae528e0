"""Whether kernels and CUDA graphs give the logits of eager PyTorch: a few short passes at start.

prompt of 40 tokens    [0, 24)    [24, 40) logits    [40, 41) logits, decode
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from saccade import costs
from saccade.checkpoint.config import TextConfig
from saccade.runner.batch import RequestState
from saccade.runner.embedding_cache import EmbeddingSlab
from saccade.runner.forward import Embeddings, Windows
from saccade.sampling_params import SamplingParams
from saccade.types import Admission, Key, Prompt, Request, ScheduledWindow, Span

_TOKENS = 40
_CUT = 24
_KEY: Key = b"self check"
_STATES = 70  # of an image that is attended to
# Of the largest logit. Rounding in bfloat16 stays far below, also where it changes a token's experts.
_MAX_DIFFERENCE = 0.25


class _Computes(Protocol):
    def open(self, admission: Admission) -> None: ...
    def close(self, request_id: str) -> None: ...
    def logits(self, windows: Windows, embeddings: Embeddings) -> Tensor: ...


@torch.inference_mode()
def check_logits(
    forward: _Computes,
    plain: _Computes,
    embeddings: MutableMapping[Key, Tensor],
    text: TextConfig,
    block_size: int,
) -> None:
    """Raises if they differ by more than rounding. Call it before any request is admitted."""
    spans = _spans(embeddings) if text.num_cross_layers else ()
    admission = _admission(text, spans, block_size)
    expected = _logits(plain, admission, embeddings, None)
    found = _logits(forward, admission, embeddings, int(expected[0].argmax()))
    embeddings.pop(_KEY, None)
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error <= _MAX_DIFFERENCE:
        raise RuntimeError(f"logits differ by {error:.1e} from those of eager PyTorch")


def _logits(side: _Computes, admission: Admission, embeddings: Embeddings, token: int | None) -> Tensor:
    """[2, vocabulary]: after the prompt, and after its next token: `token`, or the likeliest."""
    state = RequestState(admission)
    name = admission.request.request_id
    side.open(admission)
    side.logits([(ScheduledWindow(name, 0, _CUT, (), False), state)], embeddings)
    first = side.logits([(ScheduledWindow(name, _CUT, _TOKENS, (), True), state)], embeddings)
    state.append(int(first[0].argmax()) if token is None else token)
    second = side.logits([(ScheduledWindow(name, _TOKENS, _TOKENS + 1, (), True), state)], embeddings)
    both = torch.cat((first.float(), second.float()))
    side.close(name)
    return both


def _admission(text: TextConfig, spans: tuple[Span, ...], block_size: int) -> Admission:
    ids = np.random.default_rng(0).integers(0, text.vocab_size, _TOKENS).tolist()
    positions = np.arange(_TOKENS, dtype=np.int32)[None]
    prompt = Prompt(ids, spans, (), positions, _TOKENS, b"")
    request = Request("self check", prompt, SamplingParams(), 1, frozenset(), 0)
    return Admission(request, (), tuple(range(costs.blocks_for(_TOKENS + 1, block_size))))


def _spans(embeddings: MutableMapping[Key, Tensor]) -> tuple[Span, ...]:
    """An image that all tokens from the third on attend to. Rows of the slab are its states."""
    assert isinstance(embeddings, EmbeddingSlab)
    states = min(_STATES, len(embeddings.memory))
    rows = torch.randn(states, embeddings.memory.shape[1], generator=torch.Generator().manual_seed(0))
    slots = rows.view(-1, embeddings.width)
    embeddings[_KEY] = slots.to(embeddings.memory)
    return (Span(2, 1, _KEY, len(slots), is_embed=(False,), last_reader=2**30),)
