"""Types between models, layers and the runner."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.checkpoint.config import LinearConfig

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, d]) -> [T, heads, d]. Caches k and v."""


Encoding = Generator[int, None, list[Tensor]]
"""Encoding of several images: yields the number of layers run; returns [slots, width] per image.

The width is the decoder's, or a multiple of it with deepstack (`TextConfig.num_deepstack`).
"""


class CrossAttentionRows(NamedTuple):
    """Rows of a step that cross-attend to the same images."""

    rows: Tensor  # int64 [n]: packed rows
    embeddings: tuple[Tensor, ...]  # of each image, as `encode` returned them


class WindowGroup(NamedTuple):
    """Windows of equal length, computed together."""

    tokens: Tensor  # int64 [windows, length]: packed rows
    rows: Tensor  # int64 [windows]: rows of their states
    keep_in: Tensor | None = None  # int64 [windows]: rows that get a checkpoint of the states afterwards


class States(NamedTuple):
    """Recurrent states of linear attention layers, updated in place."""

    conv: Tensor  # [layers, rows, channels, kernel - 1]: convolution states
    recurrent: Tensor  # float32 [layers, rows, heads, key, value]
    groups: Sequence[WindowGroup] = ()  # every packed token is in one of them

    @classmethod
    def zeros(cls, linear: LinearConfig, rows: int, dtype: torch.dtype, device: torch.device) -> States:
        shape = (len(linear.layers), rows)
        conv = torch.zeros(*shape, linear.kernel - 1, linear.channels, dtype=dtype, device=device)
        heads = (linear.value_heads, linear.key_dim, linear.value_dim)
        recurrent = torch.zeros(*shape, *heads, dtype=torch.float32, device=device)
        return cls(
            conv.transpose(2, 3), recurrent
        )  # channels are dense in memory: kernels read them together
