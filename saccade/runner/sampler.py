"""From logits to tokens, for all requests of a step. Stateless: noise is a function of (seed, position).

So a seeded request gives the same text whatever it is batched with, and a preempted one goes on as it began.
`reference_sampler.py` of the tests does the same for one row, slowly, and they compare the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.kernels.sampling_rows import MIN_P, PARAMETERS, TEMPERATURE, TOP_K, TOP_P, UNIFORM
from saccade.sampling_params import SamplingParams
from saccade.types.step import Logprobs, Sample

Added = tuple[Tensor, Tensor]

_NEVER = float("-inf")
_PARAMETERS = attrgetter(*PARAMETERS)
_PENALTIES = attrgetter("repetition_penalty", "frequency_penalty", "presence_penalty")
_CANDIDATES = 4096  # most likely tokens, tried for top-k and top-p before the whole vocabulary is sorted


@dataclass(frozen=True, slots=True)
class Row:
    """What the sampler needs of one request."""

    params: SamplingParams
    prompt_ids: npt.NDArray[np.int64]  # each token that is in the prompt, once
    output_ids: npt.NDArray[np.int64]
    end_ids: frozenset[int]  # forbidden until min_tokens are out
    seed: int
    allowed: npt.NDArray[np.int32] | None = None  # a bit per token, 32 to a word, lowest first; None: all.
    # Tokens after its end are not allowed.
    forbidden: frozenset[int] = frozenset()  # would complete a bad word


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sample]:
    """One token per row. `logits` is [rows, vocabulary] in float32 and may be changed in place."""
    reported = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    values = logits[reported].log_softmax(-1) if reported else None  # before anything below changes logits
    _adjust(logits, rows)
    tokens = logits.argmax(-1)
    random = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if random:
        index = torch.tensor(random, device=logits.device)
        inputs = SamplingInputs.of([(rows[i].params, rows[i].seed, len(rows[i].output_ids)) for i in random])
        numbers = torch.from_numpy(inputs.values).to(logits.device)
        tokens[index] = sample_rows(logits[index], numbers, inputs.has_filters)
    token_ids: list[int] = tokens.tolist()
    if values is None:
        return [Sample(token, None) for token in token_ids]
    logprobs = _logprobs(values, tokens[reported], [rows[i] for i in reported])
    by_row = dict(zip(reported, logprobs, strict=True))
    return [Sample(token, by_row.get(i)) for i, token in enumerate(token_ids)]


# --- adjusting logits ---------------------------------------------------------------------------------------


def _adjust(logits: Tensor, rows: Sequence[Row]) -> None:
    """Bias, penalties and forbidden tokens, in place; rows that ask for none cost nothing."""
    penalised = [i for i, row in enumerate(rows) if row.params.has_penalty]
    if penalised:
        _penalise(logits, penalised, [rows[i] for i in penalised])
    biases: dict[int, Added] = {}  # completions of one request share their map
    for i, row in enumerate(rows):
        if bias := row.params.logit_bias:
            if id(bias) not in biases:
                biases[id(bias)] = _added(bias, bias.values(), logits)
            logits[i].index_add_(0, *biases[id(bias)])
        never = row.forbidden
        if len(row.output_ids) < row.params.min_tokens:
            never = never | row.end_ids
        if never:
            logits[i].index_add_(0, *_added(never, [_NEVER] * len(never), logits))
    _forbid(logits, rows)


def _added(tokens: Collection[int], values: Iterable[float], logits: Tensor) -> Added:
    """Tokens of the vocabulary, and what is added to their logits."""
    pairs = [(token, value) for token, value in zip(tokens, values, strict=True) if token < logits.shape[-1]]
    index = torch.tensor([token for token, _ in pairs], dtype=torch.int64, device=logits.device)
    return index, torch.tensor([value for _, value in pairs], dtype=logits.dtype, device=logits.device)


def _forbid(logits: Tensor, rows: Sequence[Row]) -> None:
    """Mask tokens that a row does not allow. The bits are copied packed and unpacked on the device."""
    masks = {i: row.allowed for i, row in enumerate(rows) if row.allowed is not None}
    if not masks:
        return
    packed = np.zeros((len(masks), -(-logits.shape[-1] // 32)), np.int32)
    for row_bits, mask in zip(packed, masks.values(), strict=True):
        row_bits[: len(mask)] = mask[: len(row_bits)]
    index = torch.tensor(list(masks), device=logits.device)
    words = torch.from_numpy(packed).to(logits.device)  # [n, words]
    bits = (words[:, :, None] >> torch.arange(32, device=logits.device)) & 1  # [n, words, 32]
    is_allowed = bits.flatten(1)[:, : logits.shape[-1]].bool()  # [n, V]
    logits[index] = logits[index].masked_fill(~is_allowed, _NEVER)


def _penalise(logits: Tensor, where: list[int], rows: Sequence[Row]) -> None:
    """Repetition counts prompt and output, presence and frequency the output. Touches only these tokens."""
    pairs = [_counts(row, logits.shape[-1]) for row in rows]
    lengths = [len(tokens) for tokens, _ in pairs]
    index = torch.from_numpy(np.stack([np.repeat(where, lengths), np.concatenate([t for t, _ in pairs])]))
    penalties = np.array([_PENALTIES(row.params) for row in rows]).T
    occurrences = np.concatenate([counts for _, counts in pairs])
    values = np.concatenate([np.repeat(penalties, lengths, axis=1), occurrences[None]])
    entries = tuple(index.to(logits.device))  # (row, token)
    repetition, frequency, presence, counts = torch.from_numpy(values).to(logits.device, logits.dtype)
    part = logits[entries]
    part = torch.where(part > 0, part / repetition, part * repetition)
    part -= frequency * counts
    part -= presence * (counts > 0)
    logits[entries] = part


def _counts(row: Row, vocabulary: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tokens to penalise, each once, and how often each is in the output."""
    tokens, counts = np.unique(row.output_ids, return_counts=True)
    if row.params.repetition_penalty != 1:
        together = np.union1d(row.prompt_ids, tokens)
        in_output = np.zeros(len(together), np.int64)
        in_output[np.searchsorted(together, tokens)] = counts
        tokens = together
        counts = in_output
    return tokens[tokens < vocabulary], counts[tokens < vocabulary]


# --- sampling -----------------------------------------------------------------------------------------------


class SamplingInputs(NamedTuple):
    """What sampling needs beside the logits, as one array: the device then never waits for the host."""

    values: npt.NDArray[np.float64]  # [COUNT, rows], see `sampling_rows`
    has_filters: bool  # whether some row asks for top_k or top_p, which costs sorting the vocabulary

    @classmethod
    def of(cls, rows: Sequence[tuple[SamplingParams, int, int]]) -> SamplingInputs:
        """From each row's parameters, seed and number of output tokens."""
        values = np.array([(*_PARAMETERS(p), uniform(*at)) for p, *at in rows]).T
        values[TOP_K, values[TOP_K] <= 0] = np.inf
        return cls(values, any(p.top_k > 0 or p.top_p < 1 for p, *_ in rows))


FILTER_CASES = (  # each filter alone, then all: a kernel is compared with PyTorch on these
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(temperature=1.5, top_p=0.6),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
)


def sample_rows(logits: Tensor, numbers: Tensor, has_filters: bool) -> Tensor:
    """Filter by top-k, then top-p, then min-p, and invert the cumulative distribution of the rest.

    Equally likely tokens stay or go together. `numbers`: `SamplingInputs.values`, on the logits' device.
    """
    column = numbers[:, :, None]
    scaled = logits.double() / column[TEMPERATURE]  # float64: sums over a vocabulary need the precision
    if has_filters:
        scaled.masked_fill_(scaled < _minimum(scaled, column[TOP_K], column[TOP_P]), _NEVER)
    probs = scaled.softmax(-1)
    probs.masked_fill_(probs < column[MIN_P] * probs.amax(-1, keepdim=True), 0)
    sums = probs.cumsum(-1)
    tokens = torch.searchsorted(sums, column[UNIFORM] * sums[:, -1:], right=True)  # never of probability 0
    last = (sums < sums[:, -1:]).sum(-1, keepdim=True)  # rounding must not step past the last one
    return torch.minimum(tokens, last)[:, 0]


def _minimum(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit that top-k, then top-p keep: [rows, 1]."""
    if scaled.device.type == "cpu" and scaled.shape[-1] > _CANDIDATES:  # on a GPU the check would synchronize
        minimum, is_enough = _minimum_of(scaled.topk(_CANDIDATES).values, scaled, top_k, top_p)
        if is_enough.all():
            return minimum
    return _minimum_of(scaled.sort(dim=-1, descending=True).values, scaled, top_k, top_p)[0]


def _minimum_of(first: Tensor, scaled: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the largest values, in order, and whether these were enough."""
    rank = torch.arange(first.shape[-1], device=first.device)[None]
    within = first.masked_fill(rank >= top_k, _NEVER)
    total = torch.where(top_k <= first.shape[-1], within.logsumexp(-1, True), scaled.logsumexp(-1, True))
    probs = (within - total).exp_()
    stays = (probs.cumsum(-1) - probs < top_p) & (rank < top_k)
    return first.gather(-1, stays.sum(-1, keepdim=True) - 1), ~stays[:, -1]


def uniform(seed: int, position: int) -> float:
    """A 64-bit mixing function (the finaliser of splitmix64) over seed and position."""
    mask = (1 << 64) - 1
    x = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & mask
    x ^= x >> 31
    return (x >> 11) / (1 << 53)


# --- log probabilities --------------------------------------------------------------------------------------


class TopLogprobs(NamedTuple):
    """Log probabilities of some rows, on their device."""

    of_token: Tensor  # [rows]
    ranks: Tensor  # [rows]: 1 is the most likely token
    ids: Tensor  # [rows, count]: the most likely tokens
    values: Tensor  # [rows, count]: their log probabilities


def top_logprobs(values: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
    """`values`: [rows, vocabulary], log probabilities."""
    of_token = values.gather(-1, tokens[:, None])
    ranks = (values > of_token).sum(-1) + 1
    top, ids = values.topk(count)
    return TopLogprobs(of_token[:, 0], ranks, ids, top)


def _logprobs(values: Tensor, tokens: Tensor, rows: Sequence[Row]) -> list[Logprobs]:
    """For all rows at once: each read of a device's results synchronizes. `values` is [rows, vocabulary]."""
    counts = [row.params.logprobs or 0 for row in rows]
    columns = [column.tolist() for column in top_logprobs(values, tokens, max(counts))]
    return [
        Logprobs(value, rank, tuple(zip(likely[:count], best[:count], strict=True)))
        for value, rank, likely, best, count in zip(*columns, counts, strict=True)
    ]
