"""The tensors of a model by name, so that weights can stream into them. Knows neither layers nor checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Whole(NamedTuple):
    """Some targets as one tensor, for checkpoints that store them so."""

    tensor: Tensor
    parts: frozenset[str]  # the targets that filling it fills


class Parameters:
    """Allocates a model's tensors and remembers each under a name, so that weights can stream into them later.

    `targets` holds one entry per tensor of a checkpoint. Where several are merged into one for speed (q, k and v, say),
    the entries are views of the parts: filling the parts fills the whole. `wholes` holds what a checkpoint may have as
    one tensor instead.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.targets: dict[str, Tensor] = {}
        self.wholes: dict[str, Whole] = {}
        self._prefix = ""

    def within(self, name: str | int) -> Parameters:
        """The same collection, with this level added in front of every name."""
        inner = Parameters(self.dtype, self.device)
        inner.targets, inner.wholes = self.targets, self.wholes
        inner._prefix = f"{self._prefix}{name}."
        return inner

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def add(self, name: str, tensor: Tensor) -> None:
        self.targets[self._prefix + name] = tensor

    def add_whole(self, name: str, tensor: Tensor, parts: Sequence[str]) -> None:
        self.wholes[self._prefix + name] = Whole(tensor, frozenset(self._prefix + part for part in parts))

    def new(self, name: str, *shape: int) -> Tensor:
        tensor = self.empty(*shape)
        self.add(name, tensor)
        return tensor
