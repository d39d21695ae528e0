"""The decoder of a model that runs through Transformers' code, as the engine sees it: no layers of ours."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from saccade.checkpoint.config import TextConfig


class TextModel:
    """`forward` is the model's, with our attention. `eager`: why CUDA graphs cannot hold it, or None."""

    rotary_gain = 1.0
    temperature = None

    def __init__(
        self,
        config: TextConfig,
        embeddings: Any,  # modules of Transformers
        head: Any,
        forward: Callable[..., Tensor],
        *,
        layers: Any,  # module of Transformers that `forward` runs
        eager: Callable[[], str | None],
    ) -> None:
        self.config = config
        self.scale = config.head_dim**-0.5
        self.table: Tensor = embeddings.weight
        self.head: Tensor = head.weight
        self.embedding_size = self.table.shape[1]
        self.forward = forward
        self.layers = layers
        self._embeddings = embeddings
        self._has_bias = getattr(head, "bias", None) is not None
        self._eager = eager
        # Our kernels rotate by nothing: the model's layers have done it.
        half = config.head_dim // 2
        device = self.table.device
        axes = torch.zeros(half, dtype=torch.int64, device=device)
        self.rotary = SimpleNamespace(frequencies=torch.zeros(half, device=device), axes=axes)

    @torch.inference_mode()
    def eager_reason(self) -> str | None:
        """Why CUDA graphs cannot hold it, as far as its modules tell."""
        if reason := self._eager():
            return reason
        if self._has_bias:
            return "its head has a bias"
        ids = torch.arange(min(8, len(self.table)), device=self.table.device)
        if not torch.equal(self._embeddings(ids), self.table[ids]):
            return "its embeddings are more than a table"
        return None
