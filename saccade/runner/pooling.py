"""What requests get of their rows, on the host: a sampled token, with pooling vectors.

Log probabilities of a prompt come with its first token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.models.layers.decoder import Decoder
from saccade.runner.batch import RequestState
from saccade.runner.forward import Windows
from saccade.runner.prompt_logprobs import Head, prompt_rows, take_prompt_logprobs
from saccade.runner.sampler import sample
from saccade.sampling_params import Pooling
from saccade.types.step import Sample


def sample_or_pool(
    logits: Tensor, hidden: Tensor | None, states: Sequence[RequestState]
) -> dict[str, Sample]:
    """Samples by request id. `logits` [rows, vocabulary] in float32 may be changed; `hidden` is [rows, H].

    Without `hidden`, in decode steps, no request pools.
    """
    poolings = [(row, state.request.params.pooling) for row, state in enumerate(states)]
    pooled = {}
    for row, pooling in poolings:
        if pooling is None:
            continue
        if pooling.every_token:
            pooled[row] = _bytes(torch.cat(states[row].rows))
        else:
            pooled[row] = _pooled(pooling, row, logits, hidden)
    samples = sample(logits, [state.row() for state in states])
    for row, state in enumerate(states):
        if state.needs_rows and row not in pooled:
            samples[row] = samples[row]._replace(prompt_logprobs=take_prompt_logprobs(state))
    for row, vector in pooled.items():
        samples[row] = Sample(samples[row].token_id, None, is_last=True, pooled=vector)
    return {state.request.request_id: state.take(one) for state, one in zip(states, samples, strict=True)}


def _pooled(pooling: Pooling, row: int, logits: Tensor, hidden: Tensor | None) -> bytes:
    """float32, in the order of the host's bytes."""
    if pooling.token_ids:
        vector = logits[row, list(pooling.token_ids)]
    else:
        assert hidden is not None, "a request pools at the end of its prompt"
        vector = hidden[row]
    return _bytes(vector)


def _bytes(vectors: Tensor) -> bytes:
    return vectors.float().cpu().numpy().tobytes()


def needs_rows(windows: Windows) -> bool:
    return any(state.needs_rows for _, state in windows)


def keep_rows(windows: Windows, hidden: Tensor, decoder: Decoder, head: Head) -> None:
    """Make what requests need of the rows of their windows. `hidden` is [T, H], normed, of all windows."""
    row = 0
    for window, state in windows:
        end = row + window.end - window.start
        if state.needs_rows:
            assert window.start == sum(map(len, state.rows)), "the whole prompt is computed, from its start"
            if state.request.params.pooling is not None:
                state.rows.append(_token_vectors(hidden[row:end], decoder))
            else:
                state.rows += prompt_rows(window, state, hidden[row:end], head)
        row = end


def _token_vectors(rows: Tensor, decoder: Decoder) -> Tensor:  # float32 [T, token_dim]
    assert decoder.projection is not None, "only models of late interaction pool every token"
    return F.normalize(decoder.projection(rows).float(), dim=-1)
