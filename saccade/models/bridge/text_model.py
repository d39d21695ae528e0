"""The decoder of a model that runs through Transformers' code, as the engine sees it: no layers of ours."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.models.bridge.tail import Tail

_TRIED = 64  # tokens, over the whole vocabulary


class Passes(Protocol):
    """What a model computes with Transformers' modules."""

    axes: int  # of its RoPE
    tail: Tail

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def forward(self, embeds: Tensor, positions: Tensor, attention: Any) -> Tensor: ...

    def eager_reason(self) -> str | None:
        """Why CUDA graphs cannot hold them, if they cannot."""


class TextModel:
    rotary_gain = 1.0
    temperature = None

    def __init__(
        self,
        config: TextConfig,
        embeddings: Any,  # modules of Transformers
        head: Any,
        passes: Passes,
        *,
        layers: Any,  # module of Transformers that `passes` run
    ) -> None:
        self.config = config
        self.scale = config.head_dim**-0.5
        self.table: Tensor = embeddings.weight
        self.head: Tensor = head.weight
        self.embedding_size = config.embedding_size
        self.embed = passes.embed
        self.forward = passes.forward
        self.layers = layers
        self._passes = passes
        self._bias: Tensor | None = getattr(head, "bias", None)
        # Our kernels rotate by nothing: the model's layers have done it.
        half = config.head_dim // 2
        device = self.table.device
        axes = torch.zeros(half, dtype=torch.int64, device=device)
        self.rotary = SimpleNamespace(frequencies=torch.zeros(half, device=device), axes=axes)

    def eager_reason(self) -> str | None:
        """Why CUDA graphs cannot hold it, as far as its modules tell."""
        return self._passes.eager_reason()

    @cached_property
    @torch.inference_mode()
    def is_table(self) -> bool:
        """Whether the embedding of a token is its row of the table."""
        ids = torch.linspace(0, len(self.table) - 1, _TRIED).long().to(self.table.device)
        embeds = self.embed(ids)
        return embeds.shape[1] == self.table.shape[1] and torch.equal(embeds, self.table[ids])

    def finish(self, logits: Tensor) -> None:
        """Makes the head's logits of the GEMM with its weight, in place."""
        tail = self._passes.tail
        if self._bias is not None or not tail.is_plain:
            biased = logits.float() if self._bias is None else logits.float() + self._bias
            logits.copy_(tail(biased))

    @property
    def position_rows(self) -> int:
        """Of a prompt: RoPE axes, blocks, lengths."""
        switch = self.config.rope_switch
        return self._passes.axes + (self.config.blocks is not None) + (switch is not None)

    @property
    def block_row(self) -> int | None:
        return None if self.config.blocks is None else self._passes.axes
