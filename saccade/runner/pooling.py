"""What requests get of their last rows, on the host: a sampled token, or with pooling a vector."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from saccade.runner.batch import RequestState
from saccade.runner.sampler import sample
from saccade.sampling_params import Pooling
from saccade.types import Sample


def sample_or_pool(
    logits: Tensor, hidden: Tensor | None, states: Sequence[RequestState]
) -> dict[str, Sample]:
    """By request id. `logits` [rows, vocabulary] in float32 may be changed in place; `hidden` is [rows, H].

    Without `hidden`, in decode steps, no request pools.
    """
    wanted = [(row, state.request.params.pooling) for row, state in enumerate(states)]
    pooled = {row: _pooled(pooling, row, logits, hidden) for row, pooling in wanted if pooling is not None}
    samples = sample(logits, [state.row() for state in states])
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
    return vector.float().cpu().numpy().tobytes()
