"""What models, layers and the runner hand each other. Tensors and names; no layer, no model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from torch import Tensor

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, d]) -> [T, heads, d]. It keeps k and v for later."""


Encoding = Generator[int, None, list[Tensor]]
"""Encoding of some pictures: pauses after each layer or a few, and says how many these were; returns one
[slots, width] tensor per picture.

The width is the decoder's, or a multiple of it for towers that feed several of its layers (`TextConfig.num_deepstack`).
"""


class CrossAttentionRows(NamedTuple):
    """Rows of a step that look at the same pictures."""

    rows: Tensor  # int64 [n]: packed rows
    embeddings: tuple[Tensor, ...]  # what `encode` returned for each picture they see


class WindowGroup(NamedTuple):
    """Windows of equal length, computed together."""

    tokens: Tensor  # int64 [windows, length]: their packed rows
    rows: Tensor  # int64 [windows]: the states that belong to them
    keep_in: Tensor | None = None  # int64 [windows]: rows that get a copy of what they are then


class States(NamedTuple):
    """What layers without keys and values remember of each request. Whoever reads a row leaves the next state there."""

    past: Tensor  # [layers, rows, channels, kernel - 1]: inputs that the next convolution still sees
    memory: Tensor  # float32 [layers, rows, heads, key, value]
    groups: Sequence[WindowGroup]  # every packed token is in one of them
