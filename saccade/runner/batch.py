"""What the runner remembers of each request, and how a step's windows become packed tensors.

works      A: [3, 7)        B: [40, 41)   C: [0, 5)
packed     a3 a4 a5 a6      b40           c0 c1 c2 c3 c4       one row per token, no padding
query_lens 4                1             5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.models.layers.attention import AttentionBatch
from saccade.runner.sampler import Row
from saccade.structured.grammar import Grammar
from saccade.types import Admission, Key, Request, Sample, ScheduledWindow, Span

Ints = npt.NDArray[np.int64]


class RequestState:
    """One admitted request: its tokens, positions and block table. Dropped when the plan says so."""

    def __init__(
        self,
        admission: Admission,
        grammar: Grammar | None = None,
        places: Mapping[Key, Ints] | None = None,  # of pruned groups that are resident: row and column of each token
    ) -> None:
        prompt = admission.request.prompt
        self.request: Request = admission.request
        self.places: Mapping[Key, Ints] = {} if places is None else places
        self.grammar = grammar  # of an answer that must follow a schema, after the tokens it has already
        self.num_prompt = len(prompt)
        self.shift = prompt.next_position - self.num_prompt  # from places to positions behind the prompt
        # Whoever is not is sampled by the host, from logits that wait for it.
        self.samples_on_device = grammar is None and admission.request.params.samples_on_device
        self.is_greedy = admission.request.params.is_greedy
        self.spans: tuple[Span, ...] = prompt.spans
        self._is_pruned = any(span.encoder_tokens is not None for span in prompt.spans)
        self.blocks: list[int] = list(admission.block_ids)
        self._read = np.empty(64, np.int64)  # the answer's tokens as an array; grows by doubling
        self._unread: list[int] = list(admission.output_token_ids)  # behind those: nobody has looked at them yet
        self.num_tokens = self.num_prompt + len(self._unread)
        self.last_token = (self._unread or prompt.token_ids)[-1]

    def append(self, token: int) -> None:
        """Many times a step, while few ever look at the tokens."""
        self._unread.append(token)
        self.last_token = token
        self.num_tokens += 1

    def _answer(self) -> Ints:
        end = self.num_tokens - self.num_prompt
        if end > len(self._read):
            self._read = np.concatenate([self._read, np.empty(max(end, len(self._read)), np.int64)])
        self._read[end - len(self._unread) : end] = self._unread
        self._unread.clear()
        return self._read[:end]

    def take(self, sample: Sample) -> Sample:
        """Append a sampled token; the sample again, which says so when nothing may follow it."""
        self.append(sample.token_id)
        if self.grammar is None:
            return sample
        self.grammar.advance(sample.token_id)
        return sample._replace(is_last=self.grammar.is_complete)

    def tokens(self, start: int, end: int) -> Ints:
        assert end <= self.num_tokens, "a window ends at the last known token"
        asked, first = self.request.prompt.token_ids[start:end], max(start - self.num_prompt, 0)
        answered = self._answer()[first : max(end - self.num_prompt, 0)]
        # Of a prompt that was found in the cache, only the end is ever looked at.
        return np.concatenate([np.array(asked, np.int64), answered])

    def positions(self, start: int, end: int) -> Ints:  # [axes, end - start]
        """Prompt positions come from the processor; behind the prompt every axis counts on by one."""
        prompt = self.request.prompt
        inside = prompt.positions[:, start : min(end, self.num_prompt)].astype(np.int64)
        if self._is_pruned and start < self.num_prompt:
            self._place(inside, start)
        if end <= self.num_prompt:
            return inside
        behind = np.arange(max(start, self.num_prompt), end) + self.shift
        return np.concatenate([inside, np.broadcast_to(behind, (len(inside), len(behind)))], axis=1)

    def _place(self, inside: Ints, start: int) -> None:
        """The processor puts the tokens of a pruned group into its corner: places are known once it is decoded."""
        end = start + inside.shape[1]
        for span in overlapping(self.spans, start, end):
            if span.encoder_tokens is not None:
                places = self.places[span.key]  # not there: better no answer than one from the corner
                first, last = max(start, span.start), min(end, span.end)
                inside[1:, first - start : last - start] += places[:, first - span.start : last - span.start]

    @cached_property
    def _prompt_ids(self) -> Ints:
        """Each once; of a long prompt that takes too long to be done for each token."""
        return np.unique(np.array(self.request.prompt.token_ids, np.int64))

    def row(self) -> Row:
        request = self.request
        end_ids = request.eos_token_ids | frozenset(request.params.stop_token_ids)
        allowed = self.grammar.allowed() if self.grammar else None
        if self.grammar and allowed is not None and self.grammar.must_end(allowed):
            end_ids = frozenset()  # the schema outranks min_tokens
        return Row(
            params=request.params,
            prompt_ids=self._prompt_ids,
            output_ids=self._answer(),
            end_ids=end_ids,
            seed=request.seed,
            allowed=allowed,
        )


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
    query_lens = [work.end - work.start for work in windows]
    ends = np.cumsum(query_lens)
    samples = [i for i, work in enumerate(windows) if work.samples]
    pairs = list(zip(windows, states, strict=True))
    tables = _block_tables(states)
    slots = np.concatenate([slots_of(work, tables[i], block_size) for i, work in enumerate(windows)])
    attention = AttentionBatch(
        query_lens=query_lens,
        context_lens=[work.end for work in windows],
        block_tables=torch.from_numpy(tables).to(device),
        slots=torch.from_numpy(slots).to(device),
        block_size=block_size,
    )
    return Batch(
        token_ids=torch.from_numpy(np.concatenate([s.tokens(w.start, w.end) for w, s in pairs])).to(device),
        positions=torch.from_numpy(np.concatenate([s.positions(w.start, w.end) for w, s in pairs], axis=1)).to(device),
        attention=attention,
        last_rows=torch.from_numpy(ends[samples] - 1).to(device),
        sampled=[windows[i].request_id for i in samples],
    )


def _block_tables(states: Sequence[RequestState]) -> Ints:  # [requests, most blocks]
    """Padded with a block of the request's own: what is masked is still read, and must not be another's."""
    tables = np.empty((len(states), max(len(s.blocks) for s in states)), np.int64)
    for i, state in enumerate(states):
        tables[i, : len(state.blocks)] = state.blocks
        tables[i, len(state.blocks) :] = state.blocks[0]
    return tables


def slots_of(work: ScheduledWindow, table: Ints, block_size: int) -> Ints:
    """Where each new token's keys and values go: block * block_size + offset."""
    index = np.arange(work.start, work.end)
    return table[index // block_size] * block_size + index % block_size


# --- splicing pictures in -----------------------------------------------------------------------------------


def overlapping(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """The spans that the window [start, end) touches."""
    return [span for span in spans if span.start < end and start < span.end]


def splice(embeds: Tensor, row: int, work: ScheduledWindow, span: Span, embedding: Tensor) -> None:
    """Overwrite the placeholder rows of `span` inside the window; `row` is the packed row of the window's start."""
    first, last = max(work.start, span.start), min(work.end, span.end)
    low, high = first - span.start, last - span.start  # the slice of the span that the window covers
    target = embeds[row + first - work.start : row + last - work.start]
    if span.is_embed is None:
        target.copy_(embedding[low:high])
        return
    mask = np.asarray(span.is_embed)
    before = int(mask[:low].sum())
    rows = torch.from_numpy(np.flatnonzero(mask[low:high]))  # not the mask itself: a device would be waited for
    target.index_copy_(0, rows.to(target.device), embedding[before : before + len(rows)])


def embedded(state: RequestState, work: ScheduledWindow) -> Ints:
    """The tokens of a window, -1 where a picture's embedding is spliced in."""
    tokens = state.tokens(work.start, work.end)
    spans = overlapping(state.spans, work.start, work.end) if work.start < state.num_prompt else []
    for span in spans:
        first, last = max(work.start, span.start), min(work.end, span.end)
        inside = tokens[first - work.start : last - work.start]
        mask = True if span.is_embed is None else np.asarray(span.is_embed)[first - span.start : last - span.start]
        inside[mask] = -1
    return tokens
