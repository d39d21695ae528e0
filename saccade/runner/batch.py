"""What the runner keeps of each request, and how a step's windows become packed tensors.

windows    A: [3, 7)        B: [40, 41)   C: [0, 5)
packed     a3 a4 a5 a6      b40           c0 c1 c2 c3 c4       one row per token, no padding
query_lens 4                1             5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.models.layers.torch_attention import AttentionBatch
from saccade.runner.sampler import Row
from saccade.structured.grammar import Bits, Grammar
from saccade.structured.thinking import ThinkingBudget
from saccade.types.media import Key
from saccade.types.prompt import Span
from saccade.types.request import Request
from saccade.types.step import Admission, Sample, ScheduledWindow

Ints = npt.NDArray[np.int64]


class RequestState:
    """One admitted request: its tokens, positions and block table. Dropped when the plan frees it."""

    def __init__(
        self,
        admission: Admission,
        grammar: Grammar | None = None,
        coordinates: Mapping[Key, Ints] = MappingProxyType({}),  # of pruned groups: row and column by token
    ) -> None:
        prompt = admission.request.prompt
        self.request: Request = admission.request
        self.coordinates = coordinates
        self.grammar = grammar  # of structured output, advanced past the tokens it has already
        self.num_prompt = len(prompt)
        self.shift = prompt.next_position - self.num_prompt  # from token index to position after the prompt
        self.samples_on_device = grammar is None and admission.request.params.samples_on_device
        self.is_greedy = admission.request.params.is_greedy
        # Of its prompt: until its first token is there, with what was made of them.
        self.needs_rows = admission.request.params.needs_prompt_rows and not admission.output_token_ids
        self.rows: list[Tensor] = []  # what was made of them so far, in order
        self.spans: tuple[Span, ...] = prompt.spans
        self._is_pruned = any(span.encoder_tokens is not None for span in prompt.spans)
        self.blocks: list[int] = list(admission.block_ids)
        self._array = np.empty(64, np.int64)  # output tokens as an array; grows by doubling
        self._appended: list[int] = list(admission.output_token_ids)  # output tokens not in the array yet
        self.num_tokens = self.num_prompt + len(self._appended)
        self.last_token = (self._appended or prompt.token_ids)[-1]
        self._budget = _thinking_budget(admission)

    def append(self, token: int) -> None:
        """Called for every token of a step, so it is cheap: few requests need the array."""
        self._appended.append(token)
        self.last_token = token
        self.num_tokens += 1

    def _output(self) -> Ints:
        end = self.num_tokens - self.num_prompt
        if end > len(self._array):
            self._array = np.concatenate([self._array, np.empty(max(end, len(self._array)), np.int64)])
        self._array[end - len(self._appended) : end] = self._appended
        self._appended.clear()
        return self._array[:end]

    def take(self, sample: Sample) -> Sample:
        """Append a sampled token; returns the sample, marked as last if the grammar is complete."""
        self.append(sample.token_id)
        if self._budget is not None:
            self._budget.take(sample.token_id)
        if self.grammar is None:
            return sample
        self.grammar.advance(sample.token_id)
        return sample._replace(is_last=self.grammar.is_complete)

    def tokens(self, start: int, end: int) -> Ints:
        assert end <= self.num_tokens, "a window ends at the last known token"
        prompt = self.request.prompt.token_ids[start:end]  # a slice first: a cached prefix is never converted
        output = self._output()[max(start - self.num_prompt, 0) : max(end - self.num_prompt, 0)]
        return np.concatenate([np.array(prompt, np.int64), output])

    def positions(self, start: int, end: int) -> Ints:  # [axes, end - start]
        """Prompt positions come from the processor; after the prompt every axis counts on by one."""
        prompt = self.request.prompt
        inside = prompt.positions[:, start : min(end, self.num_prompt)].astype(np.int64)
        if self._is_pruned and start < self.num_prompt:
            self._add_coordinates(inside, start)
        if end <= self.num_prompt:
            return inside
        count = np.arange(max(start, self.num_prompt), end) + self.shift
        after = np.tile(count, (len(inside), 1))
        if constant := prompt.constant_rows:
            after[-constant:] = prompt.positions[-constant:, -1:]
        return np.concatenate([inside, after], axis=1)

    def _add_coordinates(self, inside: Ints, start: int) -> None:
        """The processor puts a pruned group's tokens at its corner; decoding tells which ones stay."""
        end = start + inside.shape[1]
        for span in overlapping(self.spans, start, end):
            if span.encoder_tokens is not None:
                coordinates = self.coordinates[span.key]  # a KeyError is better than wrong positions
                first = max(start, span.start)
                last = min(end, span.end)
                part = coordinates[:, first - span.start : last - span.start]
                inside[1:, first - start : last - start] += part

    @cached_property
    def _prompt_ids(self) -> Ints:
        """Each once. Cached: too slow for a long prompt to be done at every token."""
        return np.unique(np.array(self.request.prompt.token_ids, np.int64))

    def row(self) -> Row:
        request = self.request
        if self._budget is not None and (forced := self._budget.forced) is not None:
            only = _bits((forced,))  # it outranks whatever else limits the next token
            return Row(request.params, self._prompt_ids, self._output(), frozenset(), request.seed, only)
        end_ids = request.eos_token_ids | frozenset(request.params.stop_token_ids)
        bits = self.grammar.allowed() if self.grammar else None
        if self.grammar and bits is not None and self.grammar.must_end(bits):
            end_ids = frozenset()  # the schema outranks min_tokens
        if (of_request := self._allowed_bits) is not None:
            bits = of_request if bits is None else bits[: len(of_request)] & of_request[: len(bits)]
        return Row(
            params=request.params,
            prompt_ids=self._prompt_ids,
            output_ids=self._output(),
            end_ids=end_ids,
            seed=request.seed,
            allowed=bits,
            forbidden=self._forbidden(),
        )

    @cached_property
    def _allowed_bits(self) -> Bits | None:
        """Of `allowed_token_ids`. Cached: a list may name the whole vocabulary."""
        tokens = self.request.params.allowed_token_ids
        return None if tokens is None else _bits(tokens)

    def _forbidden(self) -> frozenset[int]:
        """Tokens that would complete a bad word."""
        bad = self.request.params.bad_words_token_ids
        if not bad:
            return frozenset()
        longest = max(map(len, bad))
        last = self._output()[-longest:].tolist()
        return frozenset(word[-1] for word in bad if last[len(last) - len(word) + 1 :] == list(word[:-1]))


def _thinking_budget(admission: Admission) -> ThinkingBudget | None:
    """Advanced past the tokens that the request has already."""
    thinking = admission.request.thinking
    tokens = admission.request.params.thinking_token_budget
    if thinking is None or tokens is None:
        return None
    budget = ThinkingBudget(thinking, tokens)
    for token in admission.output_token_ids:
        budget.take(token)
    return budget


def _bits(tokens: Sequence[int]) -> Bits:
    """One for each of these tokens."""
    is_set = np.zeros((max(tokens) // 32 + 1) * 32, np.bool_)
    is_set[np.array(tokens)] = True
    return np.packbits(is_set, bitorder="little").view("<i4")


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input on the device."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [axes, T]
    attention: AttentionBatch
    last_rows: Tensor  # [samples]: packed row of each request that samples
    sampled: list[str]  # their request ids, in the same order


def build_batch(
    windows: Sequence[ScheduledWindow], states: Sequence[RequestState], block_size: int, device: torch.device
) -> Batch:
    query_lens = [window.end - window.start for window in windows]
    ends = np.cumsum(query_lens)
    samples = [i for i, window in enumerate(windows) if window.samples]
    pairs = list(zip(windows, states, strict=True))
    positions = np.concatenate([state.positions(window.start, window.end) for window, state in pairs], axis=1)
    tables = _block_tables(states)
    slots = np.concatenate([slots_of(window, tables[i], block_size) for i, window in enumerate(windows)])
    attention = AttentionBatch(
        query_lens=query_lens,
        seq_lens=[window.end for window in windows],
        block_tables=torch.from_numpy(tables).to(device),
        slots=torch.from_numpy(slots).to(device),
        block_size=block_size,
    )
    return Batch(
        token_ids=torch.from_numpy(np.concatenate([s.tokens(w.start, w.end) for w, s in pairs])).to(device),
        positions=torch.from_numpy(positions).to(device),
        attention=attention,
        last_rows=torch.from_numpy(ends[samples] - 1).to(device),
        sampled=[windows[i].request_id for i in samples],
    )


def _block_tables(states: Sequence[RequestState]) -> Ints:  # [requests, max blocks]
    """Padded with the request's first block: padding is masked but still read, and must not be another's."""
    tables = np.empty((len(states), max(len(s.blocks) for s in states)), np.int64)
    for i, state in enumerate(states):
        tables[i, : len(state.blocks)] = state.blocks
        tables[i, len(state.blocks) :] = state.blocks[0]
    return tables


def slots_of(window: ScheduledWindow, table: Ints, block_size: int) -> Ints:
    """Where each new token's keys and values go: block * block_size + offset."""
    index = np.arange(window.start, window.end)
    return table[index // block_size] * block_size + index % block_size


def overlapping(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """The spans that overlap the window [start, end)."""
    return [span for span in spans if span.start < end and start < span.end]


def splice(embeds: Tensor, row: int, window: ScheduledWindow, span: Span, embedding: Tensor) -> None:
    """Overwrite the placeholder rows of `span` inside the window, which begins at the packed row `row`."""
    first = max(window.start, span.start)
    last = min(window.end, span.end)
    low = first - span.start  # of the slice of the span that the window covers
    high = last - span.start
    target = embeds[row + first - window.start : row + last - window.start]
    if span.is_embed is None:
        target.copy_(embedding[low:high])
        return
    mask = np.asarray(span.is_embed)
    before = int(mask[:low].sum())
    rows = torch.from_numpy(np.flatnonzero(mask[low:high]))  # indexing by the mask would wait for the device
    target.index_copy_(0, rows.to(target.device), embedding[before : before + len(rows)])


def embedded(state: RequestState, window: ScheduledWindow) -> Ints:
    """The tokens of a window, -1 where an image's embedding is spliced in."""
    tokens = state.tokens(window.start, window.end)
    for span in overlapping(state.spans, window.start, window.end):
        first = max(window.start, span.start)
        last = min(window.end, span.end)
        inside = tokens[first - window.start : last - window.start]
        covered = slice(first - span.start, last - span.start)
        mask = True if span.is_embed is None else np.asarray(span.is_embed)[covered]
        inside[mask] = -1
    return tokens
