"""Layers that keep states (delta nets, Mamba 2, short convolutions): Transformers' own, on our rows.

A pass of the decoder takes windows of one length, as a batch, with a cache made for it: states come from the
rows of their requests and go back there. Keys and values are not its matter; our attention has them.

    row of a layer   [ convolution inputs | recurrent state | zeros ]    float32
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.models.bridge.errors import Unfit
from saccade.models.layers.forward_types import States, WindowGroup
from saccade.models.layers.torch_attention import AttentionBatch

RECURRENT = "recurrent_states"
_KINDS = ("conv_states", RECURRENT)


class StateTensor(NamedTuple):
    """A tensor of a layer's states."""

    kind: str
    number: int  # among those of its kind
    shape: tuple[int, ...]  # of one request
    dtype: torch.dtype
    start: int  # its value before the first token; rows hold what it differs by


class _PassThrough:
    """The cache of a layer whose keys and values are ours."""

    is_compileable = False
    is_sliding: Any = False
    is_initialized = True
    indexer_position_ids: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class TokensBefore(_PassThrough):
    """For layers that count tokens on their own: those before each token, less its place in the step."""

    is_sliding = (False,)  # of its layers

    def __init__(self, positions: Tensor) -> None:
        self.offsets = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer: int = 0) -> Any:
        return self.offsets


class StateLayers:
    """`layers`: of the decoder, those that keep states. `values`: that a row of a layer has space for."""

    def __init__(self, config: Any, layers: Sequence[int], values: int) -> None:
        self.config = config
        self.layers = tuple(layers)
        self.values = values
        self.parts: dict[int, list[StateTensor]] = {}

    def new_cache(self) -> Any:
        cache = import_module("transformers").DynamicCache(config=self.config)
        cache.layers = [layer if i in self.layers else _PassThrough() for i, layer in enumerate(cache.layers)]
        return cache

    def learn(self, cache: Any) -> None:
        """The shapes of states, from a cache that a pass of one request has filled."""
        for layer in self.layers:
            held = cache.layers[layer]
            self.parts[layer] = [
                StateTensor(kind, number, tuple(state.shape[1:]), state.dtype, self._start(state))
                for kind in _KINDS
                for number, state in getattr(held, kind).items()
                if state is not None
            ]
            size = sum(math.prod(part.shape) for part in self.parts[layer])
            if size > self.values:
                raise Unfit(f"layer {layer} keeps {size} values, and its config tells of {self.values}")

    def _start(self, state: Tensor) -> int:
        """Ids of tokens before the first are those of an end."""
        if state.is_floating_point():
            return 0
        end = self.config.eos_token_id
        return int(end[0] if isinstance(end, list) else end)

    def load(self, states: States, rows: Tensor) -> Any:
        cache = self.new_cache()
        for number, layer in enumerate(self.layers):
            held = cache.layers[layer]
            stored = states.recurrent[number, rows].flatten(1)
            start = 0
            for part in self.parts[layer]:
                size = math.prod(part.shape)
                state = stored[:, start : start + size].reshape(len(rows), *part.shape).to(part.dtype)
                start += size
                getattr(held, part.kind)[part.number] = state + part.start
                getattr(held, f"is_{part.kind}_initialized")[part.number] = True
                held.has_previous_state[part.number] = True
                if part.kind == "conv_states":
                    held.conv_kernel_size[part.number] = part.shape[-1]
        return cache

    def store(self, cache: Any, states: States, group: WindowGroup) -> None:
        for number, layer in enumerate(self.layers):
            held = cache.layers[layer]
            parts = [
                (getattr(held, part.kind)[part.number] - part.start).flatten(1) for part in self.parts[layer]
            ]
            values = torch.cat([part.float() for part in parts], 1)
            stored = states.recurrent[number].flatten(1)  # a view
            for rows in (group.rows, group.keep_in):
                if rows is not None:
                    stored[rows, : values.shape[1]] = values


def of_group(batch: AttentionBatch, tokens: Tensor) -> AttentionBatch:
    """The part of a step's batch that a group's windows [windows, length] are: each a piece of a request."""
    ends = list(accumulate(batch.query_lens))
    length = tokens.shape[1]
    seq_lens, requests = [], []
    for first in tokens[:, 0].tolist():
        request = next(i for i, end in enumerate(ends) if first < end)
        requests.append(request)
        seq_lens.append(batch.seq_lens[request] - (ends[request] - first - length))
    return AttentionBatch(
        query_lens=[length] * len(tokens),
        seq_lens=seq_lens,
        block_tables=batch.block_tables[requests],
        slots=batch.slots[tokens.flatten()],
        block_size=batch.block_size,
    )
