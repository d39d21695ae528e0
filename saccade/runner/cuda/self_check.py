"""Whether kernels and CUDA graphs give the logits of eager PyTorch: a few short passes at start.

    prompt of 160 tokens    [0, 96)    [96, 160) logits    [160, 161) logits, decode

With cross-attention the prompt has an image; logits must be nearer to those with it than to those without.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade import costs
from saccade.checkpoint.config import TextConfig
from saccade.checkpoint.token_blocks import block_row
from saccade.runner.batch import RequestState
from saccade.runner.embedding_cache import EmbeddingSlab
from saccade.runner.forward import Embeddings, Windows
from saccade.sampling_params import SamplingParams
from saccade.types.media import Key
from saccade.types.prompt import Prompt, Span
from saccade.types.request import Request
from saccade.types.step import Admission, ScheduledWindow

_Positions = npt.NDArray[np.int32]  # [rows, tokens]
_TOKENS = 160
_STATES = 300  # of an image that is attended to
_KEY: Key = b"self check"
# Of the largest logit. Rounding in bfloat16 stays far below, also where it changes a token's experts.
_MAX_DIFFERENCE = 0.25
_MAX_LIMIT = 1.0
_CUT = 0.6  # half of it rounds in another way, which changes more where it changes a token's experts
_MAX_ROUNDING = 0.03  # the same, of what an image may change less than
_MAX_SHARE = 0.5  # of what an image changes


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
    *,
    block_size: int,
    max_tokens: int,  # of a request, and of all KV blocks
    position_rows: int,  # of a prompt
) -> None:
    """Raises if they differ by more than rounding. Call it before any request is admitted."""
    tokens = min(_TOKENS, max_tokens - 1)
    if tokens < block_size:
        return
    try:
        spans = _spans(embeddings) if text.num_cross_layers else ()
        positions = _positions(text, tokens, position_rows)
        admission = _admission(text, spans, positions, block_size)
        cut = _CUT * (text.blocks != "prompt")  # which no window may cut
        expected = _logits(plain, admission, embeddings, None, cut)
        token = int(expected[0].argmax())
        largest = expected.abs().max()
        other = _logits(plain, admission, embeddings, token, cut / 2)
        rounding = float((other - expected).abs().max() / largest)
        limit = max(_MAX_DIFFERENCE, min(_MAX_LIMIT, 2 * rounding))
        if spans:
            without = _logits(plain, _admission(text, (), positions, block_size), embeddings, token, cut)
            effect = float((expected - without).abs().max() / largest)
            limit = max(_MAX_SHARE * effect, _MAX_ROUNDING)
        logits = _logits(forward, admission, embeddings, token, cut)
    finally:
        embeddings.pop(_KEY, None)
    error = float((logits - expected).abs().max() / largest)
    if not error <= limit:
        raise RuntimeError(f"logits differ by {error:.1e} from those of eager PyTorch; {limit:.1e} may be")


def _logits(
    side: _Computes, admission: Admission, embeddings: Embeddings, token: int | None, share: float
) -> Tensor:
    """[2, vocabulary]: after the prompt, and after its next token: `token`, or the likeliest.

    `share`: of the prompt, that the first of two windows has.
    """
    state = RequestState(admission)
    name = admission.request.request_id
    end = state.num_prompt
    cut = int(end * share)
    side.open(admission)
    if cut:
        side.logits([(ScheduledWindow(name, 0, cut, (), False), state)], embeddings)
    first = side.logits([(ScheduledWindow(name, cut, end, (), True), state)], embeddings).float()
    state.append(int(first[0].argmax()) if token is None else token)
    second = side.logits([(ScheduledWindow(name, end, end + 1, (), True), state)], embeddings)
    both = torch.cat((first, second.float()))
    side.close(name)
    return both


def _positions(text: TextConfig, tokens: int, rows: int) -> _Positions:
    """[rows, tokens]; after both cuts some tokens are seen in both directions, if the model has such."""
    counted = np.arange(tokens, dtype=np.int32)
    if text.blocks is None:
        return counted[None]
    kinds = np.zeros(tokens, np.int64)
    kinds[int(0.65 * tokens) : int(0.9 * tokens)] = 1
    return np.stack([counted] * (rows - 1) + [block_row(kinds, text.blocks)])


def _admission(
    text: TextConfig, spans: tuple[Span, ...], positions: npt.NDArray[np.int32], block_size: int
) -> Admission:
    tokens: int = positions.shape[1]
    ids = np.random.default_rng(0).integers(0, text.vocab_size, tokens).tolist()
    prompt = Prompt(ids, spans, (), positions, tokens, b"")
    request = Request("self check", prompt, SamplingParams(), 1, frozenset(), 0)
    return Admission(request, (), tuple(range(costs.blocks_for(tokens + 1, block_size))))


def _spans(embeddings: MutableMapping[Key, Tensor]) -> tuple[Span, ...]:
    """An image that all tokens from the third on attend to. Rows of the slab are its states."""
    assert isinstance(embeddings, EmbeddingSlab)
    states = min(_STATES, len(embeddings.memory))
    rows = torch.randn(states, embeddings.memory.shape[1], generator=torch.Generator().manual_seed(0))
    slots = rows.add_(4).view(-1, embeddings.width)  # values with a mean, which attention keeps
    embeddings[_KEY] = slots.to(embeddings.memory)
    return (Span(2, 1, _KEY, len(slots), is_embed=(False,), last_reader=2**30),)
